"""Draw panels of lines, dots and images to a file. Needs matplotlib (the plot extra)."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatoken.base.errors import ConfigError, import_extra
from megatoken.base.system.atomic_write import storage_errors

LARGEST_VALUE = 1e30  # matplotlib's scales overflow for larger values
NOTE_POSITIONS = {  # of a note: offset from its point in printer's points, and alignment
    "right": {"xytext": (7, 0), "ha": "left", "va": "center"},
    "above": {"xytext": (0, 7), "ha": "center", "va": "bottom"},
    "below": {"xytext": (0, -7), "ha": "center", "va": "top"},
}
OUTSIDE = {  # a legend at the right of its panel, with colored texts instead of lines
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
    "labelcolor": "linecolor",
    "handlelength": 0,
    "frameon": False,
    "fontsize": 8,
}


Draw = Callable[[Any], None]  # a function that draws on a matplotlib axis


def line(
    x: Any,
    y: Any,
    label: str = "",
    *,
    band: Any = None,
    notes: Sequence[str] = (),
    note_position: str = "below",
    **style: Any,
) -> Draw:
    """Return a line through points, or dots if `fmt` is a marker such as "o".

    x, y: values; NaN leaves a gap. label: its entry in the legend. band: lower and upper
    limits of y, between which a pale area is drawn. notes: a text for each point. note_position: a
    key of NOTE_POSITIONS. style: arguments of matplotlib's `Axes.errorbar`.
    """

    def draw_line(axis: Any) -> None:
        drawn, *_ = axis.errorbar(x, y, label=label, **style)
        if band is not None:
            axis.fill_between(x, *band, color=drawn.get_color(), alpha=0.15, lw=0)
        for note, *point in zip(notes, x, y, strict=False):
            axis.annotate(
                note, point, textcoords="offset points", fontsize=8, **NOTE_POSITIONS[note_position]
            )

    return draw_line


def panel(
    *lines: Draw,
    names: Sequence[str] = (),
    image: Any = None,
    outside: str | None = None,
    formats: Sequence[str | Callable[..., str]] = (),
    **axes: Any,
) -> Draw:
    """Return a rectangle with axes, in which lines or an image are drawn.

    names: labels of the rows at y = 0, 1, ..., from the top. image: a matrix of weights. outside:
    title of a legend at the right; None puts it inside. formats: tick formats of the x axis and the
    y axis. axes: arguments of matplotlib's `Axes.set`.
    """

    def draw_panel(axis: Any) -> None:
        if image is None:
            axis.grid(alpha=0.25)
        else:
            shown = axis.imshow(image, aspect="auto", cmap="gray")
            axis.figure.colorbar(shown, label="weight")
        for each in lines:
            each(axis)
        if names:
            axis.set_yticks(range(len(names)), names)
            axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set(**axes)
        for side, formatter in zip((axis.xaxis, axis.yaxis), formats, strict=False):
            side.set_major_formatter(formatter)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(**({} if outside is None else {"title": outside} | OUTSIDE))

    return draw_panel


def draw(
    rows: Sequence[Sequence[Draw]],
    target: Path,
    *,
    width: float = 5.5,
    heights: Sequence[float] = (4.5,),
    key: Sequence[str] = (),
    title: str = "",
    note: str = "",
) -> Path:
    """Draw rows of panels, and write them as PNG if the target has no suffix; return the path.

    A row with a single panel has the full width. Raises ConfigError and StorageError.

    width: inches per panel of the longest row. heights: inches per row. key: labels of
    `line_style` 0, 1, ..., in a legend above all panels. note: a text below them.
    """
    pyplot = load_pyplot()
    columns = max(map(len, rows))
    panels: list[Draw] = []
    mosaic = []
    for row in rows:
        numbers = [*range(len(panels), len(panels) + len(row)), *[-1] * (columns - len(row))]
        mosaic.append(numbers if len(row) > 1 else numbers[:1] * columns)
        panels += row
    figure = pyplot.figure(figsize=(width * columns, sum(heights)), layout="constrained")
    axes = figure.subplot_mosaic(mosaic, height_ratios=heights, empty_sentinel=-1)
    for number, each in enumerate(panels):
        each(axes[number])
    if key:
        handles = [pyplot.Line2D([], [], label=name, **line_style(i)) for i, name in enumerate(key)]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    figure.suptitle(title)
    figure.supxlabel(note, fontsize=8)
    return save_figure(figure, target)


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


def line_style(index: int) -> dict[str, Any]:
    """Return the color and dashes of curve number `index`."""
    return {"color": f"C{index % 10}", "ls": ("-", "--", ":", "-.")[index // 10 % 4]}


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
