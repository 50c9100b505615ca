"""Format rows of measurements as Markdown tables.

A figure is a measurement as a dict: median, low and high quartile, and number of repeats.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatoken.base.console import Console, format_memory, format_quantity


def format_cell(key: str, value: Any) -> str:
    """Format a value in the unit that its key implies; a figure becomes "median (low to high)"."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, dict):
        return _format_figure(key, value)
    if "mfu" in key or "share" in key:
        return f"{value:.1%}"
    if key in ("gain", "ratio", "speedup"):
        return f"{value:,.0f}x" if value >= 1000 else f"{value:.2f}x"
    if key.endswith("_bytes"):
        return format_memory(value)
    if "flops" in key:
        return format_quantity(value, "FLOP/s" if "per_second" in key else "FLOP")
    if key.endswith("seconds") or "seconds_" in key:
        return _format_seconds(value)
    if key == "loss":
        return f"{value:.4f}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _format_figure(key: str, figure: Mapping[str, Any]) -> str:
    median = format_cell(key, figure["median"])
    if figure["repeats"] < 2:
        return median
    unit = median.partition(" ")[2]
    ends = [format_cell(key, figure[name]).removesuffix(f" {unit}") for name in ("low", "high")]
    return f"{median} ({ends[0]} to {ends[1]})"


def _format_seconds(seconds: float) -> str:
    if abs(seconds) >= 1:
        return f"{seconds:.4g} s"
    ms = 1e3 * seconds
    return f"{ms:.4g} ms" if abs(ms) >= 1 else f"{1e3 * ms:.4g} µs"


def format_rows(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of an aligned Markdown table.

    columns: headings by key; columns without any values are left out. A last column says why rows
    were skipped.
    """
    table = [
        [heading, *(format_cell(key, row.get(key)) for row in rows)]
        for key, heading in columns.items()
    ]
    reasons = [f"skipped: {row['skipped']}" if row.get("skipped") else "" for row in rows]
    table.append(["", *reasons])
    table = [column for column in table if any(column[1:])]
    widths = [max(map(len, column)) for column in table]
    headings, *cells = zip(*table, strict=True)
    rule = ["-" * width for width in widths]
    return [
        "| " + " | ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)) + " |"
        for line in (headings, rule, *cells)
    ]


def show_rows(
    columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], console: Console
) -> None:
    """Print rows as a Markdown table."""
    for line in format_rows(columns, rows) if rows else ():
        console.print(line)
