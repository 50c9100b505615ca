"""Curves and pictures from a run folder: loss, learning rate, gradient norm, tokens/s; embeddings and a matrix.

In: metrics.jsonl of one or several runs, the weights of one. Out: PNG files. Needs the plot extra (matplotlib);
without it a run says so in one line and goes on.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.errors import Exit, Fault
from megatoken.evaluate.choice import SCORES
from megatoken.interop.weights import load_weights
from megatoken.train.journal import read_metrics

PANELS = (
    ("loss", "loss (nats per token)"),
    ("lr", "learning rate"),
    ("grad_norm", "gradient norm"),
    ("tokens_per_second", "tokens per second"),
)
SMOOTH_SHARE = 0.02  # of the run: the window of the bold line over the raw training loss


def load_pyplot() -> Any:
    """matplotlib's pyplot, drawing to files only. Raises Fault(CONFIG) when it is not installed."""
    try:
        import matplotlib
    except ImportError:
        fix = 'pip install "megatoken[plot]"'
        raise Fault(Exit.CONFIG, "pictures need matplotlib, which is not installed", fix=fix) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_run(run: Path, *, pictures: bool) -> str:
    """Draw a finished run's curves, and its pictures if asked; return one line saying where, or why not."""
    try:
        drawn = [draw_curves([run], run / "plots" / "curves.png")]
        if pictures:
            drawn += draw_weights(run, run / "plots")
    except Fault as fault:
        return f"not drawn: {fault}"
    return f"curves: {', '.join(map(str, drawn))}"


def draw_curves(runs: Sequence[Path], target: Path) -> Path:
    """Four panels over training tokens, and one for each task scored, a colour a run; validation loss as dots.

    Returns `target`.

    Raises Fault(DATA) when a folder holds no metrics, Fault(CONFIG) without matplotlib.
    """
    rows = {run: read_metrics(run) for run in runs}
    for run, found in rows.items():
        if not any(row["kind"] == "train" for row in found):
            raise Fault(Exit.DATA, "no training steps are recorded here", str(run), "give the folder of a run")
    pyplot = load_pyplot()
    tasks = sorted({row["task"] for found in rows.values() for row in found if row["kind"] == "eval"})
    lines = 2 + -(-len(tasks) // 2)
    figure, grid = pyplot.subplots(lines, 2, figsize=(11, 3.5 * lines), layout="constrained")
    axes, exams = grid.flat[: len(PANELS)], grid.flat[len(PANELS) :]
    for axis, task in zip_longest(exams, tasks):
        _draw_scores(axis, task, rows)
    for index, run in enumerate(runs):
        train = [row for row in rows[run] if row["kind"] == "train"]
        val = [row for row in rows[run] if row["kind"] == "val"]
        color = f"C{index % 10}"
        for axis, (key, _) in zip(axes, PANELS, strict=True):
            x = np.array([row["tokens"] for row in train], dtype=float)
            y = np.array([_number(row.get(key)) for row in train], dtype=float)
            name = run.name or str(run)
            if key != "loss":
                axis.plot(x, y, color=color, lw=1, label=name)
                continue
            axis.plot(x, y, color=color, lw=0.6, alpha=0.35)
            axis.plot(x, _smooth(y), color=color, lw=1.6, label=f"{name}, train")
            if val:
                dots = [row["tokens"] for row in val], [_number(row["loss"]) for row in val]
                axis.plot(*dots, "o", color=color, mec="white", ms=6, label=f"{name}, validation")
    for axis, (_, title) in zip(axes, PANELS, strict=True):
        axis.set(title=title, xlabel="training tokens", xlim=(0, None))
        axis.grid(alpha=0.25)
        if title != PANELS[0][1]:
            axis.set_ylim(0, None)
    axes[0].legend()
    return save_figure(pyplot, figure, target)


def _draw_scores(axis: Any, task: str | None, rows: Mapping[Path, list[dict[str, Any]]]) -> None:
    """A task's scores with their standard errors, a colour a run and a marker a score; no task: an empty corner."""
    if task is None:
        axis.axis("off")
        return
    for index, (run, found) in enumerate(rows.items()):
        scored = [row for row in found if row["kind"] == "eval" and row["task"] == task]
        for score, marker in zip(SCORES, "osv", strict=True):
            kept = [row for row in scored if row[score] is not None]
            x, y = [row["tokens"] for row in kept], [row[score] for row in kept]
            errors = [row["stderr"][score] or 0.0 for row in kept]
            if kept:
                label = f"{run.name or run}, {score}"
                axis.errorbar(x, y, errors, fmt=f"{marker}-", color=f"C{index % 10}", ms=5, lw=1, label=label)
    axis.set(title=task, xlabel="training tokens", xlim=(0, None))
    axis.grid(alpha=0.25)
    axis.legend()


def _number(value: Any) -> float:
    """A metric as a float; what was not finite is written as text or null and stays a gap in the curve."""
    return float(value) if isinstance(value, int | float) else float("nan")


def _smooth(y: np.ndarray) -> np.ndarray:
    """Centred mean over a small share of the run, shorter at both ends."""
    half = int(len(y) * SMOOTH_SHARE / 2)
    sums = np.concatenate([[0.0], np.nancumsum(y)])
    right = np.minimum(np.arange(len(y)) + half + 1, len(y))
    left = np.maximum(np.arange(len(y)) - half, 0)
    return np.asarray((sums[right] - sums[left]) / (right - left))


def draw_weights(run: Path, folder: Path, warn: Callable[[str], None] = lambda text: None) -> list[Path]:
    """Pictures of a run's or Hugging Face model's weights: position embeddings, if it has any, with three of their
    columns, and a corner of the first block's query/key/value matrix. Returns their paths."""
    model = load_weights(str(run), warn).model
    matrix = model.blocks[0].attention.qkv.weight.detach().numpy()  # type: ignore[union-attr,operator]
    pyplot = load_pyplot()
    drawn = []
    if model.positions is not None:
        drawn.append(_draw_positions(pyplot, model.positions.weight.detach().numpy(), folder / "positions.png"))
    figure, axis = pyplot.subplots(figsize=(6, 6), layout="constrained")
    axis.imshow(matrix[:300, :300], cmap="gray")
    axis.set(title="blocks.0.attention.qkv, first 300 x 300", xlabel="input channel", ylabel="output channel")
    return [*drawn, save_figure(pyplot, figure, folder / "matrix.png")]


def _draw_positions(pyplot: Any, positions: np.ndarray, target: Path) -> Path:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    left.imshow(positions, aspect="auto", cmap="gray")
    left.set(title="position embeddings", xlabel="channel", ylabel="position")
    for channel in np.linspace(0, positions.shape[1] - 1, 5).astype(int)[1:4]:
        right.plot(positions[:, channel], lw=1, label=f"channel {channel}")
    right.set(title="three of their columns", xlabel="position", ylabel="value")
    right.legend()
    return save_figure(pyplot, figure, target)


def save_figure(pyplot: Any, figure: Any, target: Path) -> Path:
    """Write a figure as the kind of file that `target` ends in, close it, return `target`.

    Raises Fault(STORAGE) when it cannot be written, Fault(CONFIG) for an ending that is no picture.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)
    except OSError as wrong:
        raise Fault(Exit.STORAGE, f"cannot write picture: {wrong.strerror}", str(target), "choose --out") from None
    except ValueError as wrong:  # a file ending that is no picture
        raise Fault(Exit.CONFIG, f"cannot draw: {wrong}", str(target), "name a .png file") from None
    finally:
        pyplot.close(figure)
    return target
