"""`report`: the records of a folder as a table, compared with older ones or with other machines'."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.records import choose_headline, describe_hardware, list_leaves, read_records
from benchmarks.scoreboard import show_scoreboard
from benchmarks.sweep import VIEWS, draw_record
from megatoken.base.console import Console
from megatoken.base.markdown_table import format_cell, show_rows
from megatoken.study.bench.ladder import draw_rungs, list_published
from megatoken.study.bench.report import save_picture

FEWEST_REPEATS = 3  # fewer have no quartiles


def run_report(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Show the records of a folder, or a scoreboard of several. Raises DataError without any."""
    if len(options.folders) > 1 or options.record or options.plot:
        return show_scoreboard(options, console)
    records = read_records(options.folders[0], console)
    if options.pictures:
        draw_pictures(records, options.folders[0], console)
        return {}
    rows = []
    described = []
    for name, record in records.items():
        leaves = dict(list_leaves(record["answer"]))
        headline = choose_headline(leaves)
        about = {key: record[key] for key in ("date", "commit")}
        about = {"name": name, **about, "hardware": describe_hardware(record)}
        for path in headline:
            rows.append(about | {"figure": path, "value": format_cell(path, leaves[path])})
        figures = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, dict)}
        described.append(about | {"headline": headline, "figures": figures})
    columns = {"name": "record", "figure": "figure", "value": "value (low to high)"}
    show_rows(columns | {key: key for key in ("date", "commit", "hardware")}, rows, console)
    changes = []
    if options.against:
        console.print()
        changes = compare(records, read_records(options.against, console), console)
    return {"records": described, "changes": changes}


def draw_pictures(records: Mapping[str, Any], folder: Path, console: Console) -> None:
    """Draw the pictures of records again that hold all that their pictures show."""
    for name, record in records.items():
        answer = record["answer"]
        picture = partial(draw_record, name, answer)
        if name.startswith("ladder"):
            title = f"{answer['preset']} on {answer['device']}"
            picture = partial(draw_rungs, answer["rungs"] + list_published(), title)
        if name.startswith("ladder") or name in VIEWS:
            save_picture(picture, folder / f"{name}.png", console)


def compare(
    records: Mapping[str, Any], older: Mapping[str, Any], console: Console
) -> list[dict[str, Any]]:
    """Show every figure that a record shares with the older record of its name.

    outside_noise: whether the quartile ranges are disjoint; None with fewer than three repeats.
    """
    changes = []
    cells = []
    for name in [name for name in records if name in older]:
        machines = {describe_hardware(records[name]), describe_hardware(older[name])}
        if len(machines) > 1:
            console.warn(f"{name}: measured on different machines: {', '.join(machines)}")
        old_leaves = dict(list_leaves(older[name]["answer"]))
        for path, new in list_leaves(records[name]["answer"]):
            old = old_leaves.get(path)
            if not isinstance(new, dict) or not isinstance(old, dict):
                continue
            change = describe_change(name, path, old, new)
            changes.append(change)
            medians = {key: format_cell(path, change[key]) for key in ("old", "new")}
            verdicts = {True: "outside noise", False: "inside noise", None: "too few repeats"}
            cells.append(change | medians | {"verdict": verdicts[change["outside_noise"]]})
    columns = {key: key for key in ("record", "figure", "old", "new")}
    show_rows(columns | {"ratio": "new/old", "verdict": "change"}, cells, console)
    return changes


def describe_change(
    name: str, path: str, old: dict[str, Any], new: dict[str, Any]
) -> dict[str, Any]:
    """Return the medians of two figures, their ratio, and whether they differ beyond noise."""
    is_disjoint = new["low"] > old["high"] or new["high"] < old["low"]
    has_quartiles = min(new["repeats"], old["repeats"]) >= FEWEST_REPEATS
    return {
        "record": name,
        "figure": path,
        "old": old["median"],
        "new": new["median"],
        "ratio": new["median"] / old["median"] if old["median"] else None,
        "outside_noise": is_disjoint if has_quartiles else None,
    }
