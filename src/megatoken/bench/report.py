"""bench report: records as one table, and which of their figures changed beyond the noise.

In: folders of records, as bench/record.py writes them and as older programs did. Out: a Markdown table of each record's
headline figures and, against another folder, the ratio of every figure that both have. A figure is an object with
median, low, high and repeats anywhere in an answer; its name is the way there: `rows[64,8192].tokens_per_second`.
Absent: measuring, torch, judging whether more is better.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from megatoken.console import Console, format_quantity
from megatoken.errors import Exit, Fault

# The range beside a median: quartiles as measure.py gives them; extremes, which are wider, in older records.
RANGES = (("low", "high"), ("lowest", "highest"), ("min", "max"))
FEWEST_REPEATS = 3  # fewer have no middle half
MOST_HEADLINES = 3
UNITS = (  # by what a key contains, the first that fits
    ("tokens_per_second", "tokens/s"),
    ("megabytes_per_second", "MB/s"),
    ("flops", "FLOP/s"),
    ("megabytes", "MB"),
    ("bytes", "B"),
    ("milliseconds", "ms"),
    ("seconds", "s"),
    ("loss", "nats"),
)
# What records say first that count instead of timing.
COUNTS: Mapping[str, tuple[str, ...]] = {
    "commit-soak": ("tried", "bit_flips.flips", "bit_flips.found_named_and_passed_over"),
    "train-soak": ("kill.kills", "kill.bit_identical", "checkpoint.named_and_passed_over"),
    "prepare-kills": ("kills", "byte_identical"),
    "prepare-memory": ("peak_resident_megabytes",),
    "journey": ("first_loss", "overfit_loss", "windows_mean_of_last_5"),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number with its spread. repeats: 0 if the record does not say."""

    median: float
    low: float
    high: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Record:
    """One file."""

    name: str
    date: str
    commit: str
    hardware: str
    answer: dict[str, Any]

    def figures(self) -> dict[str, Figure]:
        """Every figure of the answer by its path."""
        return {path: leaf for path, leaf in list_leaves(self.answer) if isinstance(leaf, Figure)}


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Show the records of a folder. Raises Fault(DATA) when it, or the one to compare with, holds none."""
    records = read_records(options.folder, console)
    older = read_records(options.against, console) if options.against else []
    headlines = {record.name: choose_headlines(record) for record in records}
    show_table(
        ("record", "figure", "value", "low to high (repeats)", "hardware", "commit", "date"),
        [row for record in records for row in _describe_record(record, headlines[record.name])],
        console,
    )
    changes = compare(records, older)
    if options.against:
        console.say()
        _show_changes(changes, records, older, console)
    described = [
        {
            "name": record.name,
            "date": record.date,
            "commit": record.commit,
            "hardware": record.hardware,
            "headline": list(headlines[record.name]),
            "figures": {path: asdict(figure) for path, figure in record.figures().items()},
        }
        for record in records
    ]
    return {"records": described, "changes": changes}


def read_records(folder: Path, console: Console) -> list[Record]:
    """The records of a folder in the order of their files; a warning for each file that is none.

    Raises Fault(DATA) when there is no folder, or no record in it.
    """
    fix = f"measure first, for example: megatoken bench loader --out {folder}"
    if not folder.is_dir():
        raise Fault(Exit.DATA, "no such folder of records", str(folder), fix)
    records: dict[str, Record] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = _read_record(path)
        except (OSError, ValueError, RecursionError) as wrong:
            console.warn(f"{path}: passed over: {' '.join(str(wrong).split())}")
            continue
        if record.name in records:
            console.warn(f"{path}: passed over: another file here holds the record '{record.name}'")
        else:
            records[record.name] = record
    if not records:
        raise Fault(Exit.DATA, "the folder holds no record", str(folder), fix)
    return list(records.values())


def _read_record(path: Path) -> Record:
    """Raises ValueError saying what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as wrong:
        raise ValueError(f"not JSON: {wrong}") from None
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    kinds = {"name": str, "date": str, "commit": str, "hardware": dict, "answer": dict}
    lacking = [key for key, kind in kinds.items() if not isinstance(content.get(key), kind)]
    if lacking:
        raise ValueError(f"lacks {', '.join(lacking)}")
    hardware = content["hardware"]
    cores = f", {hardware['cores']} cores" if "cores" in hardware else ""
    name, date, commit, answer = (content[key] for key in ("name", "date", "commit", "answer"))
    return Record(name, date, commit, f"{hardware.get('device', 'unknown')}{cores}", answer)


def list_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Figure | float]]:
    """(path, figure) and (path, number) of everything in an answer, in its order; a truth counts as 0 or 1."""
    if (figure := _read_figure(value)) is not None:
        yield path, figure
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from list_leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for label, item in zip(_label_items(value), value, strict=True):
            yield from list_leaves(item, f"{path}[{label}]")
    elif _is_number(value):
        yield path, value


def _read_figure(value: Any) -> Figure | None:
    if not isinstance(value, dict):
        return None
    for low, high in RANGES:
        if all(_is_number(value.get(key)) for key in ("median", low, high)):
            repeats = value.get("repeats", value.get("n", 0))
            return Figure(value["median"], value[low], value[high], repeats if isinstance(repeats, int) else 0)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _label_items(items: Sequence[Any]) -> list[str]:
    """What tells the items of a list apart: their names, else the words and whole numbers they begin with, else places.

    So a row is compared with the row of the same sizes, wherever that stands.
    """
    objects = [item if isinstance(item, dict) else {} for item in items]
    for labels in ([str(item.get("name", "")) for item in objects], list(map(_read_sizes, objects))):
        if all(labels) and len(set(labels)) == len(labels):
            return labels
    return [str(place) for place in range(len(items))]


def _read_sizes(item: dict[str, Any]) -> str:
    if _read_figure(item) is not None:  # what it begins with may be measured too
        return ""
    known = takewhile(lambda value: isinstance(value, str | int) and not isinstance(value, bool), item.values())
    return ",".join(map(str, known))


def choose_headlines(record: Record) -> dict[str, Figure | float]:
    """Up to three things a record says first: its figures, of a list the highest; else its rates; else its numbers."""
    leaves = dict(list_leaves(record.answer))
    counted = {path: leaves[path] for path in COUNTS.get(record.name, ()) if path in leaves}
    if counted:
        return counted
    best: dict[str, str] = {}
    figures = record.figures()
    for path, figure in figures.items():
        group = re.sub(r"\[.*?\]", "[]", path)
        if group not in best or figure.median > figures[best[group]].median:
            best[group] = path
    rates = [path for path in leaves if find_unit(path).endswith("/s")]
    return {path: leaves[path] for path in list(best.values() or rates or leaves)[:MOST_HEADLINES]}


def find_unit(path: str) -> str:
    """The unit that the last telling key of a path says; empty for a plain number."""
    for key in reversed(path.split(".")):
        for part, unit in UNITS:
            if part in key:
                return unit
    return ""


def compare(records: Sequence[Record], older: Sequence[Record]) -> list[dict[str, Any]]:
    """Every figure that a record and the older one of its name both have, medians and their ratio new / old.

    outside_noise: whether the quartile ranges lie apart; null with fewer than three repeats on either side. A ratio to
    an old 0 is null.
    """
    before = {record.name: record.figures() for record in older}
    changes = []
    for record in records:
        for path, new in record.figures().items():
            if (old := before.get(record.name, {}).get(path)) is None:
                continue
            enough = min(new.repeats, old.repeats) >= FEWEST_REPEATS
            changes.append(
                {
                    "record": record.name,
                    "figure": path,
                    "old": old.median,
                    "new": new.median,
                    "ratio": new.median / old.median if old.median else None,
                    "outside_noise": (new.low > old.high or new.high < old.low) if enough else None,
                }
            )
    return changes


def _show_changes(
    changes: list[dict[str, Any]], records: Sequence[Record], older: Sequence[Record], console: Console
) -> None:
    """The comparison as a table, after what makes it less than fair."""
    before = {record.name: record for record in older}
    for record in records:
        old = before.get(record.name)
        if old is not None and old.hardware != record.hardware:
            console.warn(f"{record.name}: measured on {record.hardware} now, on {old.hardware} before")
    if not changes:
        console.say("no figure is in both folders")
        return
    verdicts = {True: "outside the noise", False: "inside the noise", None: "too few repeats"}
    rows = [
        (
            change["record"],
            change["figure"],
            format_value(change["old"], find_unit(change["figure"])),
            format_value(change["new"], find_unit(change["figure"])),
            "" if change["ratio"] is None else f"{change['ratio']:.3f}",
            verdicts[change["outside_noise"]],
        )
        for change in changes
    ]
    show_table(("record", "figure", "old", "new", "new/old", "change"), rows, console)


def _describe_record(record: Record, headlines: Mapping[str, Figure | float]) -> Iterator[tuple[str, ...]]:
    """Table rows of one record; only the first names it."""
    names = (record.name, (record.hardware, record.commit, record.date))
    for path, value in headlines.items() or [("", math.nan)]:
        unit = find_unit(path) or str(record.answer.get("unit", ""))
        shown, spread = "", ""
        if isinstance(value, Figure):
            shown = format_value(value.median, unit)
            repeats = f" ({value.repeats})" if value.repeats else ""
            spread = f"{format_value(value.low)} to {format_value(value.high)}{repeats}"
        elif path:
            shown = format_value(value, unit)
        yield (names[0], path, shown, spread, *names[1])
        names = ("", ("", "", ""))


def format_value(value: float, unit: str = "") -> str:
    """A number as a table shows it, four digits or all of a large one; FLOP/s and bytes with a metric prefix."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit in ("FLOP/s", "B"):
        return format_quantity(value, unit)
    return f"{value:,.0f} {unit}".rstrip() if abs(value) >= 1000 else f"{value:.4g} {unit}".rstrip()


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print a Markdown table whose columns also line up on a screen."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, ["-" * width for width in widths], *rows):
        console.say("| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + " |")
