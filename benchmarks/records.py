"""Read the records of a folder and list their figures.

A figure is named by its path in the result: `rows[64,8192].tokens_per_second`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from megatoken.base.console import Console
from megatoken.base.errors import DataError

FIGURE = {"median", "low", "high", "repeats"}
MOST_HEADLINES = 3


def read_records(folder: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Return the records of a folder by name, with a warning for each other JSON file."""
    records: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            keys = ("date", "commit", "hardware", "answer")
            records[path.stem] = {key: record[key] for key in keys}
        except (OSError, ValueError, KeyError, TypeError) as error:
            console.warn(f"{path}: not a record: {error}")
    if not records:
        raise DataError("no records", str(folder), f"run megatoken bench ladder --out {folder}")
    return records


def describe_hardware(record: Mapping[str, Any]) -> str:
    """Return the machine of a record."""
    return f"{record['hardware'].get('device')}, {record['hardware'].get('cores')} cores"


def list_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, figure or number) of everything in a result.

    A row of a list is labeled by its first words and integers, so that rows of the same sizes
    match wherever they are in the list.
    """
    if isinstance(value, dict) and value.keys() == FIGURE:
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from list_leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            cells = item.values() if isinstance(item, dict) and "median" not in item else ()
            labels = [str(cell) for cell in takewhile(lambda c: isinstance(c, str | int), cells)]
            yield from list_leaves(item, f"{path}[{','.join(labels[:3]) or index}]")
    elif isinstance(value, int | float):
        yield path, value


def choose_headline(leaves: Mapping[str, Any]) -> list[str]:
    """Return up to three paths to show: the highest figure of each list, or else numbers."""
    best: dict[str, str] = {}
    for path, leaf in leaves.items():
        if not isinstance(leaf, dict):
            continue
        group = re.sub(r"\[.*?\]", "[]", path)
        if group not in best or leaf["median"] > leaves[best[group]]["median"]:
            best[group] = path
    return list(best.values() or leaves)[:MOST_HEADLINES]
