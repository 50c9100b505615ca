"""`bench report` of several folders: speeds of one record on several machines, with ratios, bars and a picture.

A ratio is of speeds: how many times as fast as the first row of the same figure, also where the figure is a time. Times
of a list's rows are of different work: each is compared with itself on other machines alone.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatoken.bench.report import (
    MOST_HEADLINES,
    describe_hardware,
    format_cell,
    format_rows,
    list_leaves,
    read_records,
    save_picture,
    show_rows,
)
from megatoken.bench.sweep import AXES
from megatoken.console import Console
from megatoken.errors import ConfigError, DataError
from megatoken.plots import save_figure

NO_SPEED = (
    "gain",
    "ratio",
    "speedup",
    "bytes",
    "share",
    "mfu",
)  # in the last key of a figure's path
SETTINGS = (
    "preset",
    "n_layer",
    "d_model",
    "vocab_size",
    "seq_len",
    "batch_seqs",
)  # that must be equal in a comparison
LABELS = AXES | {"rate": AXES["tokens_per_second"]}  # by the last key of a figure's path
BAR = 30  # characters
LOG_RANGE = 30.0  # bars of a picture that differ more have a logarithmic axis


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Show the speeds that records of one name share in several folders: of each folder the best, or with `record` all
    of that one. Raises ConfigError beside --against, DataError when there is nothing to show."""
    if options.against:
        fix = "give the two folders alone for a scoreboard, or one folder and --against for what changed"
        raise ConfigError("--against has no effect on a scoreboard", "--against", fix)
    folders, record = (
        {folder: read_records(folder, console) for folder in options.folders},
        options.record,
    )
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for records in folders.values() for name in records):
        places = [folder for folder, records in folders.items() if name in records]
        if name != (record or name) or len(places) < (1 if record else 2):
            continue
        machines = [describe_hardware(folders[folder][name]) for folder in places]
        if len({*machines}) < len(places):
            machines = [
                f"{machine} ({folder.name})"
                for machine, folder in zip(machines, places, strict=True)
            ]
        answers = {
            machine: folders[folder][name]["answer"]
            for machine, folder in zip(machines, places, strict=True)
        }
        _warn_of_settings(name, answers, console)
        rows += [{"record": name, **row} for row in list_speeds(answers, every=bool(record))]
    if not rows:
        what = (
            f"no speeds in a record '{record}'"
            if record
            else "no record is in two of these folders"
        )
        fix = "--record NAME shows all speeds of one; megatoken bench NAME --out FOLDER measures"
        raise DataError(what, ", ".join(map(str, folders)), fix)
    heads = {key: key for key in ("record", "figure", "machine", "value", "ratio")}
    cells = [row | {"value": format_cell(row["figure"], row["value"])} for row in rows]
    kinds = {re.sub(r"\[.*?\]", "[]", row["figure"]) for row in rows}
    if record and len(kinds) == 1 and "[" in rows[0]["figure"]:
        cells = [row | {"figure": name} for row, name in zip(cells, name_rows(rows), strict=True)]
        heads["figure"] = kinds.pop()
    for key in ("machine", "record") if record else ():  # the same in every row
        if len({row[key] for row in rows}) == 1:
            console.print(f"{heads.pop(key)}: {rows[0][key]}")
    if all(row["ratio"] == 1 for row in rows):  # nothing to compare
        del heads["ratio"]
    room = (
        console.rich.width - len(format_rows(heads, cells)[0]) - len("  |")
        if console.is_live
        else BAR
    )
    bars = [row | {"bar": "#" * max(1, round(row["share"] * min(room, BAR)))} for row in cells]
    show_rows(heads | ({"bar": ""} if room >= BAR // 3 and "ratio" in heads else {}), bars, console)
    if options.plot:
        save_picture(partial(draw, rows), options.plot, console)
    return {
        "scoreboard": [{key: value for key, value in row.items() if key != "share"} for row in rows]
    }


def name_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the lists of figures call their rows: the first word where that tells them apart."""
    names = [", ".join(re.findall(r"\[(.*?)\]", row["figure"])) for row in rows]
    short = [re.split(r",(?! )", name)[0] for name in names]
    return short if len({*short}) == len({*names}) else names


def list_speeds(answers: Mapping[str, Any], *, every: bool) -> Iterator[dict[str, Any]]:
    """Rows of the figures of one record by machine, those of a kind together: each machine's best, or every one."""
    kinds: dict[str, list[tuple[str, str, float, Any]]] = {}
    for machine, answer in answers.items():
        best: dict[str, tuple[str, str, float, Any]] = {}
        for path, leaf in list_leaves(answer):
            key = path.rpartition(".")[2]
            is_time = "seconds" in key  # a rate has the singular
            if (
                not isinstance(leaf, dict)
                or not leaf["median"]
                or any(word in key for word in NO_SPEED)
            ):
                continue
            if is_time and "[" in path and not every:  # the shortest is of the smallest work
                continue
            speed = 1 / leaf["median"] if is_time else leaf["median"]
            kind, entry = (
                path if is_time else re.sub(r"\[.*?\]", "[]", path),
                (machine, path, speed, leaf),
            )
            if every:
                kinds.setdefault(kind, []).append(entry)
            elif kind not in best or speed > best[kind][2]:
                best[kind] = entry
        for kind, entry in best.items():
            kinds.setdefault(kind, []).append(entry)
    shared = [entries for entries in kinds.values() if every or len(entries) > 1]
    for entries in shared if every else shared[:MOST_HEADLINES]:
        fastest, first = max(speed for _, _, speed, _ in entries), entries[0][2]
        for machine, path, speed, leaf in entries:
            row = {"figure": path, "machine": machine, "value": leaf}
            yield row | {"ratio": speed / first, "share": speed / fastest}


def _warn_of_settings(name: str, answers: Mapping[str, Any], console: Console) -> None:
    """Warn of settings in which the answers differ: their figures are of other work."""
    for key in SETTINGS:
        values = {
            machine: answer.get(key)
            for machine, answer in answers.items()
            if isinstance(answer, dict)
        }
        if len(set(map(str, values.values()))) > 1:
            console.warn(
                f"{name}: {key} is {', '.join(f'{value} on {machine}' for machine, value in values.items())}"
            )


def draw(rows: Sequence[Mapping[str, Any]], pyplot: Any, path: Path) -> Path:
    """A panel of bars for each kind of figure, a color for each machine, the ratio beside each bar."""
    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["record"], re.sub(r"\[.*?\]", "", row["figure"])), []).append(row)
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    inches = [0.9 + 0.3 * len(panel) for panel in panels.values()]
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(11, sum(inches)), height_ratios=inches, squeeze=False,
                                   layout="constrained")  # fmt: skip
    for axis, ((record, kind), panel) in zip(axes.flat, panels.items(), strict=True):
        items = [name or row["machine"] for row, name in zip(panel, name_rows(panel), strict=True)]
        medians = [row["value"]["median"] for row in panel]
        bars = axis.barh(
            range(len(panel)),
            medians,
            color=[f"C{machines.index(row['machine']) % 10}" for row in panel],
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
        axis.xaxis.set_major_formatter(lambda value, _, key=kind: format_cell(key, value))
    handles = [
        pyplot.Rectangle((0, 0), 1, 1, color=f"C{index % 10}") for index in range(len(machines))
    ]
    figure.legend(handles, machines, loc="outside upper center", ncols=3, frameon=False)
    return save_figure(pyplot, figure, path)
