"""Curves from metrics.jsonl and pictures of weights, as PNG files. Needs the plot extra (matplotlib)."""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.errors import ConfigError, DataError, StorageError
from megatoken.eval.tasks import SCORES
from megatoken.system.metrics_log import read_metrics

# Panels below that of the loss: title, and how the last value is written.
PANELS = {
    "lr": ("learning rate", "{:.3g}"),
    "grad_norm": ("gradient norm", "{:.3g}"),
    "tokens_per_second": ("tokens per second", "{:,.0f}"),
    "mfu": ("MFU (full attention)", "{:.1%}"),
}
PERCENT = ("mfu", *SCORES)
X_AXES = {
    "tokens": ("tokens", "training tokens"),
    "steps": ("step", "steps"),
    "seconds": ("elapsed_seconds", "time"),
}
TIME_UNITS = (
    (172800, 86400, "days"),
    (7200, 3600, "hours"),
    (120, 60, "minutes"),
    (0, 1, "seconds"),
)
SMOOTHED_SHARE = 0.02  # of the run: the window of the bold line over the raw training loss
LARGEST_VALUE = 1e30  # matplotlib's scales overflow beyond
LINE_INCHES = 0.15  # between two values written at the right of a panel
INSIDE_SHARE = 0.7  # of a panel's height, without title and labels
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


def check_picture(target: Path) -> None:
    """Raise ConfigError where no picture can be drawn, or none with the target's ending: before what takes long."""
    load_pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if target.suffix and target.suffix[1:].lower() not in known:
        what = f"cannot draw a picture in the format {target.suffix}"
        raise ConfigError(what, str(target), f"name a .png file; known: {', '.join(sorted(known))}")


def draw_run(run: Path, *, pictures: bool) -> str:
    """Draw a run's curves, and its weights if asked. Returns one line: the files, or why there are none."""
    try:
        drawn = [draw_curves([run], run / "plots" / "curves.png")]
        if pictures:
            drawn += draw_weights(run, run / "plots")
    except Exception as error:  # matplotlib raises many types, and a picture must not end a run
        return f"not drawn: {error}"
    return f"curves: {', '.join(map(str, drawn))}"


def draw_curves(
    runs: Sequence[Path],
    target: Path,
    x: str = "tokens",
    warn: Callable[[str], None] = warnings.warn,
) -> Path:
    """Draw the loss, the PANELS that were measured and a panel for each task, over a key of X_AXES.

    warn: called with a line for each run without training steps beside others, and as of `read_metrics`. Raises
    DataError when no folder has training steps, or the rows of one no time.
    """
    rows = _read_runs(runs, warn)
    label = _set_x(rows, x)
    pyplot = load_pyplot()
    every_row = [row for run_rows in rows.values() for row in run_rows]
    keys = [key for key in PANELS if any(number(row.get(key)) == row.get(key) for row in every_row)]
    tasks = sorted({str(row.get("task")) for row in every_row if row["kind"] == "eval"})
    figure, panels, task_panels = _open_panels(pyplot, keys, tasks)
    are_unique = len({run.resolve().name for run in rows}) == len(rows)
    for index, (run, run_rows) in enumerate(rows.items()):
        style = {"color": f"C{index % 10}", "ls": "--" if index >= 10 else "-"}
        panels["loss"].plot([], [], label=run.resolve().name if are_unique else str(run), **style)
        _draw_loss(panels["loss"], run_rows, style)
        for key in keys:
            values = _points(run_rows, "train", key)
            panels[key].plot(*values, lw=1, marker=_marker(values[1]), **style)
            _note_last(panels[key], *values, PANELS[key][1], style["color"])
        for task, axis in task_panels.items():
            _draw_scores(axis, [row for row in run_rows if str(row.get("task")) == task], style)
    for key in keys:
        panels[key].set_ylim(0, None)
    for axis in (*panels.values(), *task_panels.values()):
        axis.set(xlabel=label, xlim=(0, None))
        axis.xaxis.set_major_formatter(lambda value, _: format_tick(value))
        axis.grid(alpha=0.25)
        _space_notes(axis)
    figure.legend(
        *panels["loss"].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    return save_figure(pyplot, figure, target)


def _read_runs(runs: Sequence[Path], warn: Callable[[str], None]) -> dict[Path, list[Row]]:
    """The rows of the runs that have training steps. Raises DataError where none has."""
    rows, errors = dict[Path, list[Row]](), list[DataError]()
    for run in runs:
        try:
            found = read_metrics(run, warn)
            if not any(row["kind"] == "train" for row in found):
                raise DataError(
                    "no training steps are recorded here", str(run), "give the folder of a run"
                )
            rows[run] = found
        except DataError as error:
            errors.append(error)
    if not rows:
        raise errors[0]
    for left_out in errors:
        warn(f"left out: {left_out}")
    return rows


def _set_x(rows: dict[Path, list[Row]], x: str) -> str:
    """Put the place of every row on the horizontal axis in `x`; return that axis's label."""
    key, label = X_AXES[x]
    places = [
        number(row.get(key))
        for run_rows in rows.values()
        for row in run_rows
        if row["kind"] == "train"
    ]
    divisor = 1
    if key == "elapsed_seconds":
        for run, run_rows in rows.items():
            if any(key not in row for row in run_rows if row["kind"] == "train"):
                what = "its rows have no time: an earlier version began this run"
                raise DataError(what, str(run), "use --x tokens or --x steps")
        divisor, unit = choose_time_unit(np.nanmax(places, initial=0.0))
        label = f"{label} ({unit})"
    for run, run_rows in rows.items():
        rows[run] = [row | {"x": number(row.get(key)) / divisor} for row in run_rows]
    return label


def choose_time_unit(seconds: float) -> tuple[int, str]:
    """(seconds in it, its name) of the unit for an axis of so many seconds."""
    return next((divisor, unit) for least, divisor, unit in TIME_UNITS if seconds >= least)


def _open_panels(
    pyplot: Any, keys: Sequence[str], tasks: Sequence[str]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A figure with a wide panel of the loss and two panels a row below: figure, panels by key, panels by task."""
    inches = [4.5, *[2.6] * -(-(len(keys) + len(tasks)) // 2)]
    figure = pyplot.figure(figsize=(11, sum(inches)), layout="constrained")
    grid = figure.add_gridspec(len(inches), 2, height_ratios=inches)
    loss = figure.add_subplot(grid[0, :])
    loss.set(title="loss (nats per token)")
    small = [
        figure.add_subplot(grid[1 + index // 2, index % 2])
        for index in range(len(keys) + len(tasks))
    ]
    panels = {"loss": loss, **dict(zip(keys, small, strict=False))}
    task_panels = dict(zip(tasks, small[len(keys) :], strict=True))
    for key in keys:
        panels[key].set(title=PANELS[key][0])
        panels[key].yaxis.set_major_formatter(
            _format_percent if key in PERCENT else lambda v, _: format_tick(v)
        )
    for task, axis in task_panels.items():
        axis.set(title=task)
        axis.yaxis.set_major_formatter(_format_percent)
    return figure, panels, task_panels


def format_tick(value: float) -> str:
    """A number on an axis: 0.0006, 250k, 1.5M, 10B."""
    size, suffix = next(
        ((s, t) for s, t in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if abs(value) >= s),
        (1, ""),
    )
    return f"{value / size:g}{suffix}"


def _format_percent(value: float, _: object) -> str:
    return f"{100 * value:g}%"


def _draw_loss(axis: Any, rows: Sequence[Row], style: dict[str, Any]) -> None:
    """The loss of the training steps, its smoothed curve and the validations, with their last values."""
    color = style["color"]
    x, y = _points(rows, "train", "loss")
    smooth = _smooth(y)
    axis.plot(x, y, lw=0.6, alpha=0.3, **style)
    axis.plot(x, smooth, lw=1.6, marker=_marker(smooth), **style)
    _note_last(axis, x, smooth, "{:.4f} train", color)
    x, y = _points(rows, "val", "loss")
    axis.plot(x, y, "o", color=color, mec="white", ms=6)
    _note_last(axis, x, y, "{:.4f} val", color)


def _marker(y: np.ndarray) -> str:
    """The mark of a curve of one point, which has no line; none of others. Validations have round ones."""
    return "+" if np.isfinite(y).sum() == 1 else ""


def _note_last(axis: Any, x: np.ndarray, y: np.ndarray, form: str, color: str) -> None:
    """Keep the last number of a curve, to be written beside it when all curves are drawn."""
    numbers = y[np.isfinite(x) & np.isfinite(y)]
    if len(numbers):
        axis.annotate(form.format(numbers[-1]), (1, numbers[-1]), color=color, fontsize=8, va="center",
                      xycoords=axis.get_yaxis_transform(), xytext=(4, 0), textcoords="offset points")  # fmt: skip


def _space_notes(axis: Any) -> None:
    """Move the values beside a panel apart where they would cover each other."""
    low, high = axis.get_ylim()
    place = axis.get_subplotspec()
    inches = INSIDE_SHARE * place.get_gridspec().get_height_ratios()[place.rowspan.start]
    notes = sorted(axis.texts, key=lambda note: note.xy[1])
    gap = min(LINE_INCHES / inches, 1 / max(len(notes), 1)) * (high - low)
    y = [note.xy[1] for note in notes]
    for index in range(1, len(y)):
        y[index] = max(y[index], y[index - 1] + gap)
    for index in reversed(range(len(y))):
        y[index] = min(y[index], high - gap * (len(y) - 1 - index))
    for note, value in zip(notes, y, strict=True):
        note.xy = (1, value)


def _points(rows: Sequence[Row], kind: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Places and values; values that are missing or not numbers become gaps in the curve."""
    rows = [row for row in rows if row["kind"] == kind]
    return np.array([row["x"] for row in rows]), np.array([number(row.get(key)) for row in rows])


def number(value: Any) -> float:
    """The value if it is a number that a picture can show, else NaN."""
    is_number = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= LARGEST_VALUE
    )
    return float(value) if is_number else math.nan


def _draw_scores(axis: Any, rows: Sequence[Row], style: dict[str, Any]) -> None:
    """A task's scores in one run with their standard errors, a marker a score."""
    for score, marker in zip(SCORES, "osv", strict=True):
        scored = [row for row in rows if row["kind"] == "eval" and row.get(score) is not None]
        if scored:
            x, y = (
                np.array([row["x"] for row in scored]),
                np.array([number(row[score]) for row in scored]),
            )
            stderr = [
                row["stderr"] if isinstance(row.get("stderr"), dict) else {} for row in scored
            ]
            errors = np.abs(np.nan_to_num([number(each.get(score)) for each in stderr]))
            axis.errorbar(x, y, errors, marker=marker, ms=5, lw=1, **style)
            _note_last(axis, x, y, f"{{:.1%}} {score}", style["color"])


def _smooth(y: np.ndarray) -> np.ndarray:
    """Centred mean over a small share of the run, shorter at both ends."""
    half = int(len(y) * SMOOTHED_SHARE / 2)
    sums = np.concatenate([[0.0], np.nancumsum(y)])
    right = np.minimum(np.arange(len(y)) + half + 1, len(y))
    left = np.maximum(np.arange(len(y)) - half, 0)
    return np.asarray((sums[right] - sums[left]) / (right - left))


def draw_weights(run: Path, folder: Path) -> list[Path]:
    """Draw a model's position embeddings, if it has any, and a corner of the first query/key/value matrix."""
    from megatoken.convert.load_pretrained import load_pretrained

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
    axis.set(
        title="blocks.0.attention.qkv, first 300 x 300",
        xlabel="input channel",
        ylabel="output channel",
    )
    return [*drawn, save_figure(pyplot, figure, folder / "matrix.png")]


def save_figure(pyplot: Any, figure: Any, target: Path) -> Path:
    """Write a figure in the format of the target's ending, PNG where it has none, and close it; the file's path.

    Raises StorageError or ConfigError.
    """
    target = target if target.suffix else target.with_name(f"{target.name}.png")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)
    except OSError as error:
        raise StorageError(
            f"cannot write picture: {error.strerror}", str(target), "choose --out"
        ) from None
    except ValueError as error:
        raise ConfigError(f"cannot draw: {error}", str(target), "name a .png file") from None
    finally:
        pyplot.close(figure)
    return target
