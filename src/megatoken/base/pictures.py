"""Draw panels of lines, dots and images to a file. Needs matplotlib (the plot extra)."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatoken.base.errors import ConfigError, import_extra
from megatoken.base.system.atomic_write import storage_errors

LARGEST_VALUE = 1e30  # matplotlib's scales overflow for larger values
PLACES = {  # of a note: offset from its point in printer's points, and alignment
    "right": {"xytext": (7, 0), "ha": "left", "va": "center"},
    "above": {"xytext": (0, 7), "ha": "center", "va": "bottom"},
    "below": {"xytext": (0, -7), "ha": "center", "va": "top"},
}
OUTSIDE = {  # a legend at the right of its panel, with colored texts instead of lines
    "loc": "upper left",
    "bbox_to_anchor": (1, 1),
    "labelcolor": "linecolor",
    "handlelength": 0,
    "markerscale": 0.7,
    "frameon": False,
    "fontsize": 8,
    "title_fontsize": 8,
}


class Line:
    """Points of a panel, joined by a line, or dots if `fmt` is a marker such as "o"."""

    def __init__(
        self,
        x: Any,
        y: Any,
        label: str = "",
        *,
        band: Any = None,
        notes: Sequence[str] = (),
        place: str = "below",
        **style: Any,
    ) -> None:
        """Describe a line.

        x, y: values; NaN leaves a gap. label: its entry in the legend. band: the lowest and the
        highest y, drawn pale. notes: a text for each point. place: of the notes, a key of PLACES.
        style: arguments of matplotlib's `Axes.errorbar`.
        """
        self._points = x, y
        self._band = band
        self._notes = notes
        self._place = PLACES[place]
        self._style = {"label": label} | style

    def draw(self, axis: Any) -> None:
        """Draw the line on a matplotlib axis."""
        line, *_ = axis.errorbar(*self._points, **self._style)
        if self._band is not None:
            x, _ = self._points
            axis.fill_between(x, *self._band, color=line.get_color(), alpha=0.15, lw=0)
        for note, *point in zip(self._notes, *self._points, strict=False):
            axis.annotate(note, point, textcoords="offset points", fontsize=8, **self._place)


class Panel:
    """A rectangle with axes, in which lines or an image are drawn."""

    def __init__(
        self,
        *lines: Line,
        names: Sequence[str] = (),
        image: Any = None,
        outside: str | None = None,
        formats: tuple[str | Callable[..., str], ...] = (),
        log2: bool = False,
        **axes: Any,
    ) -> None:
        """Describe a panel.

        names: of the rows at y = 0, 1, ..., from the top. image: a matrix of weights. outside:
        title of a legend at the right; None puts it inside. formats: of the ticks on the x axis and
        the y axis. log2: whether x is logarithmic with base 2. axes: arguments of `Axes.set`.
        """
        self._lines = lines
        self._names = names
        self._image = image
        self._outside = outside
        self._formats = formats
        self._log2 = log2
        self._axes = axes

    def draw(self, axis: Any) -> None:
        """Draw the panel on a matplotlib axis."""
        for line in self._lines:
            line.draw(axis)
        if self._image is None:
            axis.grid(alpha=0.25)
        else:
            image = axis.imshow(self._image, aspect="auto", cmap="gray")
            axis.figure.colorbar(image, label="weight")
        if self._names:
            axis.set_yticks(range(len(self._names)), self._names)
            axis.set_ylim(len(self._names) - 0.5, -0.5)
        axis.set(**self._axes)
        if self._log2:
            axis.set_xscale("log", base=2)
        for each, form in zip((axis.xaxis, axis.yaxis), self._formats, strict=False):
            each.set_major_formatter(form)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(**({} if self._outside is None else {"title": self._outside} | OUTSIDE))


def draw(
    rows: Sequence[Sequence[Panel]],
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

    width: inches per panel of the longest row. heights: inches per row. key: names of the
    `line_style` of 0, 1, ..., on top of all. note: a text below.
    """
    pyplot = load_pyplot()
    columns = max(map(len, rows))
    places = [
        [f"{row} {column}" if column < len(panels) else "." for column in range(columns)]
        if len(panels) > 1
        else [f"{row} 0"] * columns
        for row, panels in enumerate(rows)
    ]
    figure = pyplot.figure(figsize=(width * columns, sum(heights)), layout="constrained")
    axes = figure.subplot_mosaic(places, height_ratios=heights)
    for row, panels in enumerate(rows):
        for column, panel in enumerate(panels):
            panel.draw(axes[f"{row} {column}"])
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
