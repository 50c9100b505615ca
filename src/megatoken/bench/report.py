"""Records, tables and pictures of benches; `bench report` shows the records of a folder and compares two folders.

A figure is an object with median, low, high and repeats anywhere in an answer; its name is its path:
`rows[64,8192].tokens_per_second`.
"""

import argparse
import ast
import datetime
import json
import platform
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

import xxhash

from megatoken import LAYERS
from megatoken.console import Console, format_quantity
from megatoken.errors import DataError, MegatokenError
from megatoken.plots import load_pyplot
from megatoken.redact import redact
from megatoken.system.atomic_write import storage_errors
from megatoken.system.machine import cpu_count, find_commit

PACKAGES = ("torch", "numpy", "tokenizers", "tiktoken", "transformers", "triton")
FIGURE = ("median", "low", "high", "repeats")
FEWEST_REPEATS = 3  # fewer have no middle half
MOST_HEADLINES = 3
SOURCE = Path(__file__).parents[1]
CODE_FILES = "*.py", "*.cc", "*.h"
NO_FIGURES = "config/words.py"  # it decides what errors suggest, and no figure


def write_record(
    folder: Path, name: str, answer: dict[str, Any], device: str, command: Sequence[str]
) -> Path:
    """Write an answer and what it was measured on and with as FOLDER/NAME.json; return that path.

    device: its name. Raises StorageError when the file cannot be written.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    record = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "command": redact(shlex.join(command)),
        "commit": find_commit(),
        "code": hash_code(),
        "hardware": {"device": device, "cores": cpu_count(), "system": platform.machine()},
        "versions": versions,
        "answer": answer,
    }
    path = folder / f"{name}.json"
    with storage_errors(folder, what="cannot write record", fix="choose --out"):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def hash_code() -> dict[str, str]:
    """A hash of each package of LAYERS without comments, docstrings, empty lines: which code a record measured."""
    hashes = {}
    for name in LAYERS:
        files = sorted(
            [
                SOURCE / f"{name}.py",
                *(path for end in CODE_FILES for path in (SOURCE / name).rglob(end)),
            ]
        )
        files = [file for file in files if file.is_file() and file != SOURCE / NO_FIGURES]
        texts = [(file.read_text("utf-8"), file.suffix == ".py") for file in files]
        code = "\n".join(
            line for text, is_python in texts for line in list_code_lines(text, is_python)
        )
        hashes[name] = xxhash.xxh3_64_hexdigest(code.encode())
    return hashes


@cache
def list_code_lines(text: str, is_python: bool) -> list[str]:
    """The lines of a source file but for empty ones, those that are comments alone and, in Python, docstrings."""
    lines = [line.rstrip() for line in text.splitlines()]
    if is_python:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                match node.body:
                    case [ast.Expr(value=ast.Constant(value=str())) as text_node, *_]:
                        span = slice(text_node.lineno - 1, text_node.end_lineno)
                        lines[span] = [""] * len(lines[span])
    comment = "#" if is_python else "//"
    return [line for line in lines if line and not line.lstrip().startswith(comment)]


def format_cell(key: str, value: Any) -> str:
    """A value of a record's row for people; its unit is in its key. A figure is its median (low to high)."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, dict):
        (median, unit), *ends = (
            format_cell(key, value[name]).partition(" ")[::2] for name in FIGURE[:3]
        )
        low, high = (number if same == unit else f"{number} {same}" for number, same in ends)
        return f"{median} {unit}".rstrip() + (f" ({low} to {high})" if value["repeats"] > 1 else "")
    if "mfu" in key or "share" in key:
        return f"{value:.1%}"
    if key in ("gain", "ratio", "speedup"):
        return f"{value:,.0f}x" if value >= 1000 else f"{value:.2f}x"
    if key.endswith("_bytes"):
        return format_quantity(value, "B")
    if "flops" in key:
        return format_quantity(value, "FLOP/s" if "per_second" in key else "FLOP")
    if key.endswith("seconds") or "seconds_" in key:
        unit, many = (
            ("s", 1) if abs(value) >= 1 else ("ms", 1e3) if abs(value) >= 1e-3 else ("us", 1e6)
        )
        return f"{many * value:.4g} {unit}"
    return f"{value:.4f}" if key == "loss" else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def format_rows(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a Markdown table that also lines up on a screen. columns: heads by key; empty ones are left out.

    The last column is why a row was skipped.
    """
    table = [
        [head, *(format_cell(key, row.get(key)) for row in rows)] for key, head in columns.items()
    ]
    table.append(
        ["", *(f"skipped: {row['skipped']}" if row.get("skipped") else "" for row in rows)]
    )
    table = [column for column in table if any(column[1:])]
    widths = [max(map(len, column)) for column in table]
    heads, *cells = zip(*table, strict=True)
    lines = [heads, ["-" * width for width in widths], *cells]
    return [
        "| " + " | ".join(f"{cell:<{n}}" for cell, n in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]


def show_rows(
    columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], console: Console
) -> None:
    """Print rows as a Markdown table."""
    for line in format_rows(columns, rows) if rows else ():
        console.print(line)


def print_rates(rates: Mapping[str, Mapping[str, float]], unit: str, console: Console) -> None:
    """Print a line for each rate: its median and quartiles."""
    for name, rate in rates.items():
        console.print(
            f"{name:<18} {rate['median']:8.2f} {unit} ({rate['low']:.2f} to {rate['high']:.2f})"
        )


def save_picture(draw: Callable[[Any, Path], Path], path: Path, console: Console) -> None:
    """Draw with matplotlib's pyplot into a file; without matplotlib print that there is no picture."""
    try:
        console.print(f"picture: {draw(load_pyplot(), path)}")
    except MegatokenError as error:
        console.print(f"not drawn: {error}")


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Show the records of a folder. Raises DataError when it, or the one to compare with, holds none."""
    (folder,) = options.folders
    records = read_records(folder, console)
    rows, described = [], []
    for name, record in records.items():
        leaves = dict(list_leaves(record["answer"]))
        headline = choose_headline(leaves)
        about = {
            "name": name,
            "date": record["date"],
            "commit": record["commit"],
            "hardware": describe_hardware(record),
        }
        rows += [
            about | {"figure": path, "value": format_cell(path, leaves[path])} for path in headline
        ] or [about]
        figures = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, dict)}
        described.append(about | {"headline": headline, "figures": figures})
    heads = {"name": "record", "figure": "figure", "value": "value (low to high)"}
    show_rows(heads | {key: key for key in ("date", "commit", "hardware")}, rows, console)
    changes = []
    if options.against:
        console.print()
        changes = compare(records, read_records(options.against, console), console)
    return {"records": described, "changes": changes}


def read_records(folder: Path, console: Console) -> dict[str, dict[str, Any]]:
    """The records of a folder by file name; a warning for each file that is none. Raises DataError without any."""
    records: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            records[path.stem] = {
                key: record[key] for key in ("date", "commit", "hardware", "answer")
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            console.warn(f"{path}: skipped, not a record: {' '.join(str(error).split())}")
    if not records:
        fix = f"measure first, for example: megatoken bench loader --out {folder}"
        raise DataError("no records in this folder", str(folder), fix)
    return records


def describe_hardware(record: Mapping[str, Any]) -> str:
    """The machine of a record."""
    return f"{record['hardware'].get('device')}, {record['hardware'].get('cores')} cores"


def list_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, figure or number) of everything in an answer, in its order. A row of a list is labelled by the first words
    and whole numbers in it, so that it is compared with the row of the same sizes wherever that stands."""
    if isinstance(value, dict) and value.keys() == set(FIGURE):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from list_leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            cells = item.values() if isinstance(item, dict) and "median" not in item else ()
            words = [
                str(cell) for cell in takewhile(lambda cell: isinstance(cell, str | int), cells)
            ]
            yield from list_leaves(item, f"{path}[{','.join(words[:3]) or index}]")
    elif isinstance(value, int | float):
        yield path, value


def choose_headline(leaves: Mapping[str, Any]) -> list[str]:
    """Up to three paths to show first: figures, of a list the highest; else numbers."""
    best: dict[str, str] = {}
    for path, leaf in leaves.items():
        group = re.sub(r"\[.*?\]", "[]", path)
        if isinstance(leaf, dict) and (
            group not in best or leaf["median"] > leaves[best[group]]["median"]
        ):
            best[group] = path
    return list(best.values() or leaves)[:MOST_HEADLINES]


def compare(
    records: Mapping[str, Any], older: Mapping[str, Any], console: Console
) -> list[dict[str, Any]]:
    """Show every figure that a record and the older one of its name both have: medians, and their ratio new / old.

    outside_noise: whether the quartile ranges lie apart; None with fewer than three repeats on either side. A ratio to
    an old 0 is None.
    """
    changes, cells = [], []
    for name in [name for name in records if name in older]:
        now, then = describe_hardware(records[name]), describe_hardware(older[name])
        if now != then:
            console.warn(f"{name}: measured on {now} now, on {then} before")
        before = dict(list_leaves(older[name]["answer"]))
        for path, new in dict(list_leaves(records[name]["answer"])).items():
            if isinstance(new, dict) and isinstance(old := before.get(path), dict):
                apart = new["low"] > old["high"] or new["high"] < old["low"]
                enough = min(new["repeats"], old["repeats"]) >= FEWEST_REPEATS
                ratio = new["median"] / old["median"] if old["median"] else None
                change = {
                    "record": name,
                    "figure": path,
                    "old": old["median"],
                    "new": new["median"],
                    "ratio": ratio,
                }
                changes.append({**change, "outside_noise": apart if enough else None})
                verdict = (
                    ("outside" if apart else "inside") + " the noise"
                    if enough
                    else "too few repeats"
                )
                medians = {key: format_cell(path, change[key]) for key in ("old", "new")}
                cells.append(change | medians | {"verdict": verdict})
    heads = {key: key for key in ("record", "figure", "old", "new")} | {
        "ratio": "new/old",
        "verdict": "change",
    }
    show_rows(heads, cells, console)
    return changes
