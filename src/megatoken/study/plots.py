"""Draw the curves of runs, and pictures of weights."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.base.errors import DataError, Warn
from megatoken.base.pictures import Draw, draw, format_tick, line, line_style, number, panel
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
SHOWN = 300  # rows and columns of a weight


def choose_time_unit(seconds: float) -> tuple[int, str]:
    """Choose the unit for a time axis that ends at `seconds`.

    Returns the number of seconds in the unit, and its name.
    """
    return next((divisor, unit) for least, divisor, unit in TIME_UNITS if seconds >= least)


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
    logs = [read_metrics(run, warn) for run in runs]
    rows = [row for log in logs for row in log]
    if not of_kind(rows, "train"):
        raise DataError("no training steps", runs[0], "name the folder of a run")
    label = _set_x(rows, x)
    right = 1.03 * max(row["x"] for row in rows if math.isfinite(row["x"]))
    axes: dict[str, Any] = {
        "xlabel": label,
        "xlim": (-0.02 * right, right),
        "outside": "last",
    }  # shows points at 0
    keys = [key for key in PANELS if any(math.isfinite(number(row.get(key))) for row in rows)]
    styles = [line_style(index) for index in range(len(logs))]
    panels = []
    for key in keys:
        title, ticks, template = PANELS[key]
        lines: list[Draw] = []
        for log, style in zip(logs, styles, strict=True):
            lines += (
                _list_losses(log, style)
                if key == "loss"
                else [_line(log, "train", key, template, lw=1, **style)]
            )
        zero: dict[str, Any] = {} if key == "loss" else {"ylim": (0, None)}
        panels.append(panel(*lines, title=title, formats=(format_tick, ticks), **zero, **axes))
    for task in sorted({row["task"] for row in of_kind(rows, "eval")}):
        lines = []
        for log, style in zip(logs, styles, strict=True):
            lines += _list_scores([row for row in log if row.get("task") == task], style)
        panels.append(panel(*lines, title=task, formats=(format_tick, "{x:.0%}"), **axes))
    small = [panels[start : start + 3] for start in range(1, len(panels), 3)]
    heights = [4.5, *[2.6] * len(small)]
    return draw([panels[:1], *small], target, width=3.7, heights=heights, key=[*map(str, runs)])


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


def _list_losses(rows: Sequence[Row], style: dict[str, Any]) -> list[Draw]:
    """Return the training loss, raw and smoothed, and the validations as dots."""
    x, y = _read_points(rows, "train", "loss")
    dots = {"marker": "o", "mec": "white", "color": style["color"], "ls": ""}
    return [
        _line(rows, "train", "loss", "{:.4f} train", lw=0.6, alpha=0.3, **style),
        line(x, _smooth(y) if len(y) else y, lw=1.6, **style),
        _line(rows, "val", "loss", "{:.4f} val", **dots),
    ]


def _list_scores(rows: Sequence[Row], style: dict[str, Any]) -> list[Draw]:
    """Return the scores of one run on a task, with standard errors and a marker per score."""
    lines = []
    for score, marker in zip(SCORES, "osv", strict=True):
        scored = [row for row in rows if row.get(score) is not None]
        errors = [row.get("stderr", {}).get(score) or 0 for row in scored]
        template = f"{{:.1%}} {score}"
        lines.append(
            _line(scored, "eval", score, template, yerr=errors, marker=marker, lw=1, **style)
        )
    return lines


def _read_points(rows: Sequence[Row], kind: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return horizontal positions and values of `key` in rows of a kind.

    A value that is missing or not a number becomes NaN, which leaves a gap in the curve.
    """
    rows = of_kind(rows, kind)
    return np.array([row["x"] for row in rows]), np.array([number(row.get(key)) for row in rows])


def _line(rows: Sequence[Row], kind: str, key: str, template: str, **style: Any) -> Draw:
    """Return the curve of `key`, with its last value as its label; a single point is a cross.

    template: format of the value.
    """
    x, y = _read_points(rows, kind, key)
    values = y[np.isfinite(y)]
    style.setdefault("marker", "+" if len(values) == 1 else "")
    return line(x, y, template.format(values[-1]) if len(values) else "", **style)


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
    from megatoken.store.pretrained import load_weights

    model = load_weights(run, warn=lambda text: None).model
    state = model.state_dict()
    paths = []
    if "positions.weight" in state:
        positions = state["positions.weight"].numpy()
        shown = [n for n in channels if n < positions.shape[1]] or range(3)
        rows = range(len(positions))
        image, columns = (
            panel(
                image=positions, title="position embeddings", xlabel="channel", ylabel="position"
            ),
            panel(
                *(line(rows, positions[:, n], f"channel {n}") for n in shown),
                outside="",
                title="columns of the embeddings",
                xlabel="position",
                ylabel="weight",
            ),
        )
        paths.append(draw([[image, columns]], folder / "positions.png"))
    name = f"blocks.{min(block, model.config.n_layer - 1)}.attention.qkv"
    weight = state[f"{name}.weight"].numpy()
    matrix = panel(
        image=weight[:SHOWN, :SHOWN],
        title=f"corner of {name}" if max(weight.shape) > SHOWN else name,
        xlabel="input channel",
        ylabel="output channel",
    )
    return [*paths, draw([[matrix]], folder / "matrix.png", width=6.5, heights=(5.5,))]
