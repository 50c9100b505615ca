"""Curves from metrics.jsonl and pictures of weights, as PNG files. Needs the plot extra (matplotlib)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.convert.load_pretrained import load_pretrained
from megatoken.errors import ConfigError, DataError, StorageError
from megatoken.eval.multiple_choice import SCORES
from megatoken.train.metrics_log import read_metrics

PANELS = {
    "loss": "loss (nats per token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
}
SMOOTHED_SHARE = 0.02  # of the run: the window of the bold line over the raw training loss
LARGEST_VALUE = 1e30  # matplotlib's scales overflow beyond
Row = dict[str, Any]


def load_pyplot() -> Any:
    """matplotlib's pyplot, drawing to files only. Raises ConfigError when it is not installed."""
    try:
        import matplotlib
    except ImportError:
        fix = 'pip install "megatoken[plot]"'
        raise ConfigError("pictures need matplotlib, which is not installed", fix=fix) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_run(run: Path, *, pictures: bool) -> str:
    """Draw a run's curves, and its weights if asked. Returns one line: the files, or why there are none."""
    try:
        drawn = [draw_curves([run], run / "plots" / "curves.png")]
        if pictures:
            drawn += draw_weights(run, run / "plots")
    except Exception as error:  # matplotlib raises many types, and a picture must not end a run
        return f"not drawn: {error}"
    return f"curves: {', '.join(map(str, drawn))}"


def draw_curves(runs: Sequence[Path], target: Path) -> Path:
    """Draw four panels over training tokens and one for each task. Raises DataError when a folder has no metrics."""
    rows = {run: read_metrics(run) for run in runs}
    for run, run_rows in rows.items():
        if not any(row["kind"] == "train" for row in run_rows):
            raise DataError("no training steps are recorded here", str(run), "give the folder of a run")
    pyplot = load_pyplot()
    tasks = sorted({str(row.get("task")) for run_rows in rows.values() for row in run_rows if row["kind"] == "eval"})
    titles = [*PANELS.values(), *tasks]
    grid_rows = -(-len(titles) // 2)
    figure, grid = pyplot.subplots(grid_rows, 2, figsize=(11, 3.5 * grid_rows), layout="constrained")
    panels, task_panels = grid.flat[: len(PANELS)], grid.flat[len(PANELS) :]
    for index, (run, run_rows) in enumerate(rows.items()):
        name, color = run.name or str(run), f"C{index % 10}"
        for axis, key in zip(panels, PANELS, strict=True):
            _draw_metric(axis, key, name, color, run_rows)
            axis.set_ylim(None if key == "loss" else 0, None)
        for axis, task in zip(task_panels, tasks, strict=False):
            scores = [row for row in run_rows if row["kind"] == "eval" and str(row.get("task")) == task]
            _draw_scores(axis, name, color, scores)
    for axis, title in zip(grid.flat, titles, strict=False):
        axis.set(title=title, xlabel="training tokens", xlim=(0, None))
        axis.grid(alpha=0.25)
    for axis in (panels[0], *task_panels[: len(tasks)]):
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    for axis in task_panels[len(tasks) :]:
        axis.axis("off")
    return save_figure(pyplot, figure, target)


def _draw_metric(axis: Any, key: str, name: str, color: str, rows: Sequence[Row]) -> None:
    """A metric of the training steps of one run; of the loss the smoothed curve and the validations, too."""
    x, y = _points(rows, "train", key)
    if key != "loss":
        axis.plot(x, y, color=color, lw=1, label=name)
        return
    axis.plot(x, y, color=color, lw=0.6, alpha=0.35)
    axis.plot(x, _smooth(y), color=color, lw=1.6, label=f"{name}, train")
    if any(row["kind"] == "val" for row in rows):
        axis.plot(*_points(rows, "val", key), "o", color=color, mec="white", ms=6, label=f"{name}, validation")


def _points(rows: Sequence[Row], kind: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and values; values that are missing or not numbers become gaps in the curve."""
    rows = [row for row in rows if row["kind"] == kind]
    return np.array([_number(row["tokens"]) for row in rows]), np.array([_number(row.get(key)) for row in rows])


def _number(value: Any) -> float:
    """The value if it is a number that a picture can show, else NaN."""
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST_VALUE else math.nan


def _draw_scores(axis: Any, name: str, color: str, rows: Sequence[Row]) -> None:
    """A task's scores in one run with their standard errors, a marker a score."""
    for score, marker in zip(SCORES, "osv", strict=True):
        scored = [row for row in rows if row.get(score) is not None]
        if scored:
            x, y = [_number(row["tokens"]) for row in scored], [_number(row[score]) for row in scored]
            stderr = [row["stderr"] if isinstance(row.get("stderr"), dict) else {} for row in scored]
            errors, label = np.abs(np.nan_to_num([_number(each.get(score)) for each in stderr])), f"{name}, {score}"
            axis.errorbar(x, y, errors, fmt=f"{marker}-", ms=5, lw=1, color=color, label=label)


def _smooth(y: np.ndarray) -> np.ndarray:
    """Centred mean over a small share of the run, shorter at both ends."""
    half = int(len(y) * SMOOTHED_SHARE / 2)
    sums = np.concatenate([[0.0], np.nancumsum(y)])
    right = np.minimum(np.arange(len(y)) + half + 1, len(y))
    left = np.maximum(np.arange(len(y)) - half, 0)
    return np.asarray((sums[right] - sums[left]) / (right - left))


def draw_weights(run: Path, folder: Path) -> list[Path]:
    """Draw a model's position embeddings, if it has any, and a corner of the first query/key/value matrix."""
    state = load_pretrained(run, warn=lambda text: None).model.state_dict()
    pyplot, drawn = load_pyplot(), []
    if "positions.weight" in state:
        positions = state["positions.weight"].numpy()
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
        left.imshow(positions, aspect="auto", cmap="gray")
        left.set(title="position embeddings", xlabel="channel", ylabel="position")
        for channel in np.linspace(0, positions.shape[1] - 1, 5).astype(int)[1:4]:
            right.plot(positions[:, channel], lw=1, label=f"channel {channel}")
        right.set(title="three of their columns", xlabel="position", ylabel="value")
        right.legend()
        drawn.append(save_figure(pyplot, figure, folder / "positions.png"))
    figure, axis = pyplot.subplots(figsize=(6, 6), layout="constrained")
    axis.imshow(state["blocks.0.attention.qkv.weight"].numpy()[:300, :300], cmap="gray")
    axis.set(title="blocks.0.attention.qkv, first 300 x 300", xlabel="input channel", ylabel="output channel")
    return [*drawn, save_figure(pyplot, figure, folder / "matrix.png")]


def save_figure(pyplot: Any, figure: Any, target: Path) -> Path:
    """Write a figure in the format of the target's ending and close it. Raises StorageError or ConfigError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)
    except OSError as error:
        raise StorageError(f"cannot write picture: {error.strerror}", str(target), "choose --out") from None
    except ValueError as error:
        raise ConfigError(f"cannot draw: {error}", str(target), "name a .png file") from None
    finally:
        pyplot.close(figure)
    return target
