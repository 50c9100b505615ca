"""Draw the curves of runs and pictures of weights. Needs matplotlib (the plot extra)."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.base.errors import ConfigError, DataError, Warn, import_extra
from megatoken.base.system.atomic_write import storage_errors
from megatoken.base.system.metrics_log import Row, of_kind, read_metrics
from megatoken.inference.tasks import SCORES

# Panels: title, format of ticks, format of the last value.
PANELS = {
    "loss": ("loss (nats per token)", "{x:g}", ""),
    "lr": ("learning rate", "{x:g}", "{:.3g}"),
    "grad_norm": ("gradient norm", "{x:g}", "{:.3g}"),
    "tokens_per_second": ("tokens/s", "{x:,.0f}", "{:,.0f}"),
}
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
SMOOTHED_SHARE = 0.02  # the window that smooths the training loss, as a share of the run
LAST_VALUES = {  # legend at the right of a panel
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
    "labelcolor": "linecolor",
    "handlelength": 0,
    "markerscale": 0.7,
    "frameon": False,
    "fontsize": 8,
}
SHOWN = 300  # rows and columns of a weight
LARGEST_VALUE = 1e30  # matplotlib's scales overflow for larger values


def load_pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw to files. Raises ConfigError without matplotlib."""
    import_extra("matplotlib", "plot").use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_picture(target: Path) -> None:
    """Raise ConfigError if matplotlib is missing or cannot write files with the target's suffix."""
    formats = load_pyplot().FigureCanvasBase.get_supported_filetypes()
    if target.suffix and target.suffix[1:].lower() not in formats:
        raise ConfigError(f"unknown picture format {target.suffix}", target, "name a .png file")


def open_panels(columns: int = 1, size: tuple[float, float] = (5.5, 4.5)) -> Any:
    """Return a figure, and a list of its panels, each with a grid.

    size: width and height of each panel in inches.
    """
    figure, axes = load_pyplot().subplots(
        1, columns, figsize=(columns * size[0], size[1]), layout="constrained", squeeze=False
    )
    for axis in axes[0]:
        axis.grid(alpha=0.25)
    return figure, list(axes[0])


def line_style(index: int) -> dict[str, Any]:
    """Return the color and dashes of curve number `index`."""
    return {"color": f"C{index % 10}", "ls": ("-", "--", ":", "-.")[index // 10 % 4]}


def save_figure(figure: Any, target: Path) -> Path:
    """Write and close a figure, as PNG if the target has no suffix; return the path.

    Raises StorageError or ConfigError.
    """
    target = target if target.suffix else target.with_name(f"{target.name}.png")
    check_picture(target)
    with storage_errors(target, what="cannot write picture", fix="choose --out"):
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120, bbox_inches="tight")
    load_pyplot().close(figure)
    return target


def choose_time_unit(seconds: float) -> tuple[int, str]:
    """Choose the unit for a time axis that ends at `seconds`.

    Returns the number of seconds in the unit, and its name.
    """
    return next((divisor, unit) for least, divisor, unit in TIME_UNITS if seconds >= least)


def format_tick(value: float, _: object = None) -> str:
    """Format a number on an axis, for example as 0.0006, 250k, 1.5M or 10B."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def number(value: Any) -> float:
    """Return `value` if it is a number that matplotlib can draw, else NaN."""
    is_number = isinstance(value, int | float) and abs(value) <= LARGEST_VALUE
    return float(value) if is_number else math.nan


def draw_run(run: Path, *, pictures: bool) -> str:
    """Draw a run's curves, and also its weights if `pictures` is True.

    Returns a line that names the files or the error.
    """
    try:
        paths = [draw_curves([run], run / "plots" / "curves.png")]
        if pictures:
            paths += draw_weights(run, run / "plots")
    except Exception as error:  # matplotlib raises many types, and a picture must not end a run
        return f"not drawn: {error}"
    return f"curves: {', '.join(map(str, paths))}"


def draw_curves(
    runs: Sequence[Path], target: Path, x: str = "tokens", warn: Warn = warnings.warn
) -> Path:
    """Plot the curves of runs against `x`, and return the path of the picture.

    There is a panel for the loss, one for each task, and one for each of PANELS that was logged.
    Raises DataError if no run has training steps.

    x: a key of X_AXES. warn: as in `read_metrics`.
    """
    rows = {run: read_metrics(run, warn) for run in runs}
    all_rows = [row for run_rows in rows.values() for row in run_rows]
    if not of_kind(all_rows, "train"):
        raise DataError("no training steps", runs[0], "name the folder of a run")
    x_label = _set_x(all_rows, x)
    keys = [key for key in PANELS if any(math.isfinite(number(row.get(key))) for row in all_rows)]
    tasks = sorted({row["task"] for row in of_kind(all_rows, "eval")})
    pyplot = load_pyplot()
    small = [*keys[1:], *tasks, ".", "."]  # three in a row; those left over stay empty
    names = [("loss",) * 3, *zip(small[::3], small[1::3], small[2::3], strict=False)]
    inches = [4.5, *[2.6] * (len(names) - 1)]
    figure = pyplot.figure(figsize=(11, sum(inches)), layout="constrained")
    panels = figure.subplot_mosaic(names, height_ratios=inches)
    handles = []
    for index, (run, run_rows) in enumerate(rows.items()):
        style = line_style(index)
        handles.append(pyplot.Line2D([], [], label=str(run), **style))
        _draw_loss(panels["loss"], run_rows, style)
        for key in keys[1:]:
            points = _read_points(run_rows, "train", key)
            _plot(panels[key], *points, PANELS[key][2], lw=1, **style)
        for task in tasks:
            _draw_scores(panels[task], [row for row in run_rows if row.get("task") == task], style)
    for name, axis in panels.items():
        title, ticks, _ = PANELS.get(name, (name, "{x:.0%}", ""))
        right = axis.get_xlim()[1]
        axis.set(title=title, xlabel=x_label, xlim=(-0.02 * right, right))  # shows points at 0
        if name in keys[1:]:
            axis.set_ylim(0, 1.05 * axis.dataLim.ymax)
        axis.xaxis.set_major_formatter(format_tick)
        axis.yaxis.set_major_formatter(ticks)
        axis.grid(alpha=0.25)
        axis.legend(title="last", title_fontsize=8, **LAST_VALUES)
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    return save_figure(figure, target)


def _set_x(rows: Sequence[Row], x: str) -> str:
    """Set the key `x` of all rows to their position on the horizontal axis; return its label.

    x: a key of X_AXES.
    """
    key, label = X_AXES[x]
    divisor = 1
    if x == "seconds":
        divisor, unit = choose_time_unit(max(row.get(key, 0) for row in rows))
        label = f"{label} ({unit})"
    for row in rows:
        row["x"] = number(row.get(key)) / divisor
    return label


def _draw_loss(axis: Any, rows: Sequence[Row], style: dict[str, Any]) -> None:
    """Draw the training loss, raw and smoothed, and the validations as dots."""
    x, y = _read_points(rows, "train", "loss")
    _plot(axis, x, y, "{:.4f} train", lw=0.6, alpha=0.3, **style)
    axis.plot(x, _smooth(y) if len(y) else y, lw=1.6, **style)
    points = _read_points(rows, "val", "loss")
    _plot(axis, *points, "{:.4f} val", marker="o", mec="white", color=style["color"], ls="")


def _draw_scores(axis: Any, rows: Sequence[Row], style: dict[str, Any]) -> None:
    """Plot the scores of one run on a task, with standard errors and a marker per kind of score."""
    for score, marker in zip(SCORES, "osv", strict=True):
        scored = [row for row in rows if row.get(score) is not None]
        x, y = _read_points(scored, "eval", score)
        errors = [row.get("stderr", {}).get(score) or 0 for row in scored]
        axis.errorbar(x, y, errors, ls="", color=style["color"])
        _plot(axis, x, y, f"{{:.1%}} {score}", marker=marker, lw=1, **style)


def _read_points(rows: Sequence[Row], kind: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return horizontal positions and values of `key` in rows of a kind.

    A value that is missing or not a number becomes NaN, which leaves a gap in the curve.
    """
    rows = of_kind(rows, kind)
    return np.array([row["x"] for row in rows]), np.array([number(row.get(key)) for row in rows])


def _plot(axis: Any, x: np.ndarray, y: np.ndarray, form: str, **style: Any) -> None:
    """Plot a curve and write its last value into the label; draw a single point as a cross.

    form: format of the value.
    """
    values = y[np.isfinite(y)]
    if len(values):
        style.setdefault("marker", "+" if len(values) == 1 else "")
        axis.plot(x, y, label=form.format(values[-1]), **style)


def _smooth(y: np.ndarray) -> np.ndarray:
    """Return the moving average over a centered window of SMOOTHED_SHARE of the run.

    The window is shorter at both ends.
    """
    window = np.ones(2 * int(len(y) * SMOOTHED_SHARE / 2) + 1)
    is_finite = np.isfinite(y)
    sums = np.convolve(np.where(is_finite, y, 0.0), window, "same")
    with np.errstate(invalid="ignore"):  # 0 / 0 in a gap
        return np.asarray(sums / np.convolve(is_finite, window, "same"))


def draw_weights(
    run: Path, folder: Path, channels: Sequence[int] = (150, 200, 250), block: int = 1
) -> list[Path]:
    """Draw a model's learned position embeddings, if any, and a corner of a QKV weight.

    Returns the paths of the pictures.

    channels: columns of the embeddings to plot as curves. Those beyond the model's width are left
    out; if none remains, the first 3 are plotted. block: index of the block, at most the last.
    """
    from megatoken.convert.load_pretrained import load_pretrained

    model = load_pretrained(run, warn=lambda text: None).model
    state = model.state_dict()
    paths = []
    if "positions.weight" in state:
        positions = state["positions.weight"].numpy()
        figure, (image, columns) = open_panels(2)
        image.grid(visible=False)
        figure.colorbar(image.imshow(positions, aspect="auto", cmap="gray"), label="weight")
        image.set(title="position embeddings", xlabel="channel", ylabel="position")
        for channel in [n for n in channels if n < positions.shape[1]] or range(3):
            columns.plot(positions[:, channel], label=f"channel {channel}")
        columns.set(title="columns of the embeddings", xlabel="position", ylabel="weight")
        columns.legend(**LAST_VALUES)
        paths.append(save_figure(figure, folder / "positions.png"))
    figure, (image,) = open_panels(size=(6.5, 5.5))
    name = f"blocks.{min(block, model.config.n_layer - 1)}.attention.qkv"
    image.grid(visible=False)
    weight = state[f"{name}.weight"].numpy()
    figure.colorbar(image.imshow(weight[:SHOWN, :SHOWN], cmap="gray"), label="weight")
    title = f"corner of {name}" if max(weight.shape) > SHOWN else name
    image.set(title=title, xlabel="input channel", ylabel="output channel")
    return [*paths, save_figure(figure, folder / "matrix.png")]
