"""Scoreboard: the speeds in records of one name from several machines, with ratios and bars.

A ratio says how many times as fast a row is as the first row of its figure, also for times. The
ratios of one machine's ladder are its speedups, which compare steps of the same rounds. The times
in a list measure different work, so each is compared only with the same entry of other machines.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.records import MOST_HEADLINES, describe_hardware, list_leaves, read_records
from benchmarks.sweep import AXES
from megatoken.base.console import Console
from megatoken.base.errors import DataError
from megatoken.base.markdown_table import format_cell, show_rows
from megatoken.base.pictures import load_pyplot, save_figure
from megatoken.study.bench.ladder import list_published
from megatoken.study.bench.report import save_picture

NO_SPEED = ("gain", "ratio", "speedup", "bytes", "share", "mfu")  # in a figure's last key
SETTINGS = ("preset", "n_layer", "d_model", "vocab_size", "seq_len", "batch_seqs")
LABELS = AXES | {"rate": AXES["tokens_per_second"]}  # by the last key of a figure's path
PUBLISHED = "published"
LOG_RANGE = 30.0  # a panel with a larger range has a logarithmic axis


def show_scoreboard(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Show the best speeds that records of one name share, or all speeds of `options.record`.

    Raises DataError if there is nothing to show.
    """
    folders = {folder: read_records(folder, console) for folder in options.folders}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for records in folders.values() for name in records):
        results = {
            f"{describe_hardware(records[name])} ({folder.name})": records[name]["answer"]
            for folder, records in folders.items()
            if name in records
        }
        if name != (options.record or name) or len(results) < (1 if options.record else 2):
            continue
        warn_of_settings(name, results, console)
        for row in list_speeds(results, every=bool(options.record)):
            rows.append({"record": name, **row})
        if name == options.record == "ladder" and is_published(results):
            rows += [describe_published(row) for row in list_published()]
    if not rows:
        fix = "--record NAME shows all speeds of one record"
        raise DataError("no speeds to compare", ", ".join(map(str, folders)), fix)
    columns = {key: key for key in ("record", "figure", "machine", "value", "ratio")}
    cells = [row | {"value": format_cell(row["figure"], row["value"])} for row in rows]
    show_rows(columns, cells, console)
    if options.plot:
        save_picture(partial(draw, rows), options.plot, console)
    keys = ("record", "figure", "machine", "value", "ratio")
    return {"scoreboard": [{key: row[key] for key in keys} for row in rows]}


def is_published(results: Mapping[str, Any]) -> bool:
    """Return whether people have published ladders of the model that was measured."""
    return all(result.get("preset") == "gpt2-124m" for result in results.values())


def describe_published(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a published rung as a row of the scoreboard."""
    value = dict.fromkeys(("median", "low", "high"), row["rate"]) | {"repeats": 1}
    figure = f"rungs[{row['name']}].rate"
    ratio = row["speedup"]
    return {
        "record": "ladder",
        "figure": figure,
        "machine": PUBLISHED,
        "value": value,
        "ratio": ratio,
    }


def name_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the labels of the figures' rows, shortened to the first word if that is unique."""
    names = [", ".join(re.findall(r"\[(.*?)\]", row["figure"])) for row in rows]
    short = [re.split(r",(?! |\d{3} )", name)[0] for name in names]
    return short if len({*short}) == len({*names}) else names


def list_speeds(results: Mapping[str, Any], *, every: bool) -> Iterator[dict[str, Any]]:
    """Yield the figures of one record, grouped by path: all of them, or each machine's best."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for machine, result in results.items():
        best: dict[str, dict[str, Any]] = {}
        leaves = dict(list_leaves(result))
        for path, figure in leaves.items():
            key = path.rpartition(".")[2]
            if not isinstance(figure, dict) or not figure["median"]:
                continue
            if any(word in key for word in NO_SPEED):
                continue
            is_time = "seconds" in key  # a rate has "second"
            if is_time and "[" in path and not every:  # the shortest belongs to the least work
                continue
            kind = path if is_time else re.sub(r"\[.*?\]", "[]", path)
            speed = 1 / figure["median"] if is_time else figure["median"]
            row = {"figure": path, "machine": machine, "value": figure, "speed": speed}
            row["speedup"] = leaves.get(f"{path.rpartition('.')[0]}.speedup")
            if every:
                kinds.setdefault(kind, []).append(row)
            elif kind not in best or speed > best[kind]["speed"]:
                best[kind] = row
        for kind, row in best.items():
            kinds.setdefault(kind, []).append(row)
    shared = [rows for rows in kinds.values() if every or len(rows) > 1]
    for rows in shared if every else shared[:MOST_HEADLINES]:
        for row in rows:
            speedup = row["speedup"] if len(results) == 1 else None
            yield row | {"ratio": speedup or row["speed"] / rows[0]["speed"]}


def warn_of_settings(name: str, results: Mapping[str, Any], console: Console) -> None:
    """Warn if the results measured different models or batches."""
    for key in SETTINGS:
        values = {machine: result.get(key) for machine, result in results.items()}
        if len(set(map(str, values.values()))) > 1:
            listed = ", ".join(f"{value} on {machine}" for machine, value in values.items())
            console.warn(f"{name}: {key} is {listed}")


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw a panel of bars for each group of figures, with a color per machine and the ratios."""
    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["record"], re.sub(r"\[.*?\]", "", row["figure"])), []).append(row)
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    colors = {machine: f"C{index % 10}" for index, machine in enumerate(machines)}
    colors |= {PUBLISHED: "0.8"} if PUBLISHED in machines else {}
    inches = [0.9 + 0.3 * len(panel) for panel in panels.values()]
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(11, sum(inches)), height_ratios=inches, squeeze=False,
                                   layout="constrained")  # fmt: skip
    for axis, ((record, kind), panel) in zip(axes.flat, panels.items(), strict=True):
        items = [name or row["machine"] for row, name in zip(panel, name_rows(panel), strict=True)]
        medians = [row["value"]["median"] for row in panel]
        bars = axis.barh(
            range(len(panel)), medians, color=[colors[row["machine"]] for row in panel]
        )
        texts = [format_cell(kind, row["value"]["median"]) for row in panel]
        if any(row["ratio"] != 1 for row in panel):
            texts = [
                f"{text}, {format_cell('ratio', row['ratio'])}"
                for text, row in zip(texts, panel, strict=True)
            ]
        axis.bar_label(bars, texts, padding=4, fontsize=8)
        is_wide = max(medians) > LOG_RANGE * min(medians)
        limits = (min(medians) / 2, max(medians) * 8) if is_wide else (0, 1.25 * max(medians))
        label = LABELS.get(kind.rpartition(".")[2], kind.replace("_", " "))
        axis.set(title=record, xlabel=label, xscale="log" if is_wide else "linear", xlim=limits)
        axis.set_yticks(range(len(panel)), items)
        axis.invert_yaxis()
        axis.margins(y=0.01)
        if not is_wide:
            axis.xaxis.set_major_locator(pyplot.MaxNLocator(4))
        axis.xaxis.set_major_formatter(lambda value, _, key=kind: format_cell(key, value))
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    figure.legend(handles, colors, loc="outside upper center", ncols=3, frameon=False)
    return save_figure(figure, path)
