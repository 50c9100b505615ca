"""`bench ladder`: the speedup of each optimization on this machine, one switch at a time.

`bench processes`: the speedup of data parallelism, measured in the same way.

Each rung adds a switch to the last rung that was kept. It runs in a worker process, in rounds that
alternate with rounds of the first rung, the plain step; its speedup is its tokens/s divided by the
plain step's in these rounds. A switch with a smaller speedup than the last kept rung is reported
and left out of later rungs. All rungs train on the same ids from the same weights, so equal losses
show that a switch changes only the speed. The last rungs train on more tokens per step, so their
losses differ.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, PeerError
from megatoken.base.markdown_table import format_cell, format_rows
from megatoken.base.pictures import draw, format_tick, line, panel
from megatoken.base.published import LADDER, SOURCES
from megatoken.base.system.atomic_write import storage_errors
from megatoken.base.system.device import Device, open_device
from megatoken.base.system.machine import cpu_count, find_compiler
from megatoken.base.system.metrics_log import Row
from megatoken.base.system.table import read_table
from megatoken.model.native.selection import NO_LIBRARY, find_library
from megatoken.plan.tuning.peak import with_peak
from megatoken.study.bench.report import save_picture
from megatoken.study.bench.runner import Worker, count_steps, run_rounds
from megatoken.study.bench.worker import WorkerSpec
from megatoken.study.bench.workload import count_seqs, describe_peak, format_peak

BATCH_TOKENS = {"cpu": 4096, "mps": 4096, "cuda": 65536}  # per process, in the last rungs
LONGEST_SECONDS = 400.0  # for all rounds; slow steps get fewer repeats, at least 3
SLOWER = 0.98  # a rung below this fraction of the last kept speedup is left out of later rungs
TABLE = read_table(__file__)
PLAIN: dict[str, Any] = TABLE["plain"]
COLUMNS = {
    "name": "rung",
    "batch_tokens": "tokens",
    "seconds": "step",
    "rate": "tokens/s",
    "mfu": "MFU",
    "mfu_causal": "MFU causal",
    "peak_memory_bytes": "memory",
    "plain_tokens_per_second": "plain tokens/s",
    "speedup": "speedup",
    "share_of_linear": "of linear",
    "first_step_seconds": "first step",
    "loss": "loss",
    "note": "",
}
FOOTNOTE = "Speedup: tokens/s divided by the first row's in the same rounds."
SCALINGS = {"strong (one batch divided)": "below", "weak (one batch each)": "above"}  # notes
GROUPS = {  # names and colors of rungs by `kept`
    True: ("measured", "C0"),
    False: ("left out of the rungs below", "C1"),
    None: ("published", "0.6"),
}


@dataclass(frozen=True)
class Rung:
    """One switch of the ladder.

    machine: the machine settings that it changes. fields: other fields of the WorkerSpec that it
    changes. missing: why it cannot run here, or "" if it can. linear: ideal speedup of
    a scaling measurement; None for an optimization.
    """

    name: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""
    linear: float | None = None
    note: str = ""

    def apply(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the spec with this switch applied."""
        machine = {**spec.machine, **self.machine}
        return replace(spec, configuration=self.name, machine=machine, **self.fields)


def run(options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Measure the rungs; after each, yield the result for the record. Save a table and a picture.

    Raises ConfigError if a rung is unknown or the batch is not a multiple of the context.
    """
    device = with_peak(open_device(MachineConfig(device=options.device)))
    config = PRESETS[options.preset]
    seqs = count_seqs(
        options.batch_tokens or max(BATCH_TOKENS[device.type], config.seq_len), config.seq_len
    )
    first = WorkerSpec(model_config=config, batch_seqs=seqs, device=str(device.torch_device))
    if options.bench == "processes":  # on a CPU, even one process uses only its share of the cores
        threads = max(1, cpu_count() // list_counts(device)[-1])
        first = replace(first, machine={"threads": threads})
        rungs = list_scalings(device, seqs)
        draw_picture = draw_scaling
    else:
        first = replace(
            first,
            model_config=replace(config, vocab_multiple=1),
            batch_seqs=1,
            machine=PLAIN,
            micro_batch=1,
            prepare_process=False,
        )
        rungs = select_rungs(list_rungs(device, config, seqs), options.rungs)
        draw_picture = draw_rungs
    console.print(f"{options.preset}: {format_peak(device)}")
    rows: list[Row] = []
    for row in measure_rungs(first, rungs, device, options.repeats, console):
        rows.append(row)
        yield {
            "preset": options.preset,
            **describe_peak(device),
            "batch_tokens": first.batch_tokens,
            "speedup": max((row["speedup"] for row in rows if row["kept"]), default=None),
            "rungs": rows,
        }
        rate = format_cell("rate", row["rate"]) or f"skipped: {row['skipped']}"
        console.print(f"{row['name']}, {rate}  {row['note']}")
    shown = rows
    if (options.bench, options.preset) == ("ladder", "gpt2-124m"):
        shown = rows + list_published()
    table = "\n".join(format_rows(COLUMNS, shown))
    path = options.out / f"{options.name}.md"
    with storage_errors(options.out, fix="choose --out"):
        path.write_text(f"{table}\n\n{FOOTNOTE}\n")
    console.print(f"\n{table}\n{FOOTNOTE}\ntable: {path}")
    picture = partial(draw_picture, shown, f"{options.preset} on {device.name}")
    save_picture(picture, options.out / f"{options.name}.png", console)


def list_rungs(device: Device, model_config: ModelConfig, batch_seqs: int) -> list[Rung]:
    """Return all rungs in order, with `missing` set for those that cannot run here.

    The last ones train on `batch_seqs` sequences per step instead of one, then on that many for
    each of 2, 4, 8, ... processes, up to the number of GPUs or cores.
    """
    on_cpu = device.type == "cpu"
    is_low = device.precision != "fp32"
    only_cpu = "" if on_cpu else "for CPUs"
    no_compiler = on_cpu and not find_compiler()
    no_library = f"not compiled ({NO_LIBRARY})" if on_cpu and not find_library() else ""
    missing = {
        "ampere": "" if device.is_ampere else "for NVIDIA GPUs since Ampere",
        "low_precision": "" if is_low else f"{device.name} is fastest in fp32",
        "compiler": "no C++ compiler found (install g++)" if no_compiler else "",
        "cpu": only_cpu,
        "library": only_cpu or no_library,
    }
    values = {
        "PRECISION": device.precision if is_low else "fp32",
        "MASTERS": "on" if is_low else "off",
        "FUSED": "off" if on_cpu else "auto",
        "PADDED": model_config,
    }
    rungs = []
    for row in TABLE["rungs"]:
        machine, fields = (
            {key: values.get(value, value) for key, value in row.get(name, {}).items()}
            for name in ("machine", "fields")
        )
        if on_cpu and "cpu_compile" in row:
            machine["compile"] = row["cpu_compile"]
        name = row["name"].replace("PRECISION", device.precision if is_low else "bf16")
        rungs.append(Rung(name, machine, fields, missing.get(row.get("needs"), "")))
    for nproc in list_counts(device):
        seqs = nproc * batch_seqs
        tokens = f"{batch_seqs * model_config.seq_len:,} tokens per step"
        rungs.append(
            Rung(
                tokens if nproc == 1 else f"data parallel on {nproc}",
                fields={"nproc": nproc, "batch_seqs": seqs, "micro_batch": 0},
                missing="the batch is one sequence (--batch-tokens)" if seqs == 1 else "",
                note=f"{seqs} times the batch, so another loss",
            )
        )
    return rungs


def list_scalings(device: Device, batch_seqs: int) -> list[Rung]:
    """Return one process, then rungs that divide a batch among processes or give it to each."""
    rungs = [
        Rung(
            name=f"{nproc} {scaling}" if nproc > 1 else "1",
            fields={"nproc": nproc, "batch_seqs": seqs},
            missing=f"{seqs} sequences" if seqs % nproc else "",
            linear=nproc,
        )
        for nproc in list_counts(device)
        for scaling, seqs in zip(SCALINGS, (batch_seqs, nproc * batch_seqs), strict=True)
    ]
    return rungs[1:]


def list_counts(device: Device) -> list[int]:
    """Return 1, 2, 4, ... up to the number of GPUs or cores."""
    most = {"cuda": torch.cuda.device_count(), "cpu": cpu_count()}.get(device.type, 1)
    return [1 << power for power in range(most.bit_length())]


def select_rungs(rungs: list[Rung], numbers: str) -> list[Rung]:
    """Return the first rung and those with the given numbers, such as "3,5", counted from 1.

    All are returned for "". Raises ConfigError for an unknown number.
    """
    if not numbers:
        return rungs
    chosen = {"1", *numbers.replace(" ", "").split(",")}
    by_number = {str(number): rung for number, rung in enumerate(rungs, 1)}
    if not chosen <= by_number.keys():
        names = ", ".join(f"{number} {rung.name}" for number, rung in by_number.items())
        raise ConfigError(f"no such rungs: {numbers}", "--rungs", f"choose from {names}")
    return [rung for number, rung in by_number.items() if number in chosen]


def measure_rungs(
    first: WorkerSpec, rungs: Sequence[Rung], device: Device, repeats: int, console: Console
) -> Iterator[Row]:
    """Measure each rung against the first one; yield its row of the record.

    Raises PeerError if the first rung fails.
    """
    plain: Worker | None = None
    spec = first
    speedup = 0.0  # of the last rung that was kept
    steps = 1
    with ExitStack() as stack:
        stack.callback(console.close)
        for rung in rungs:
            worker = Worker(spec=rung.apply(spec), skipped=rung.missing)
            stack.callback(worker.close)
            console.step(f"{rung.name}: first steps")
            seconds = None if rung.missing else worker.warm_up()
            if plain is None and seconds:
                steps = count_steps(seconds)
                fitting = int(LONGEST_SECONDS / (2 * len(rungs) * steps * seconds))
                repeats = min(repeats, max(3, fitting))
            if seconds:
                run_rounds(plain, worker, repeats, steps, console)
            plain = plain or worker
            if plain.skipped:
                what = f"the first step failed: {plain.skipped}"
                raise PeerError(what, "bench", "use a smaller preset or --batch-tokens")
            plain_rate = plain.spec.batch_tokens / median(plain.seconds[-repeats:])
            row = describe_rung(rung, worker, plain_rate, speedup, device)
            yield row
            if row["kept"]:
                spec = worker.spec
                speedup = row["speedup"]
            if worker is not plain:
                worker.close()


def describe_rung(
    rung: Rung, worker: Worker, plain_rate: float, last_speedup: float, device: Device
) -> Row:
    """Build the record's row for a rung.

    The rung is kept unless it failed or is slower than the last one that was kept, whose speedup is
    `last_speedup`. plain_rate: tokens/s of the plain step in the same rounds.
    """
    row = worker.describe(device)
    rate = row["tokens_per_second"]
    speedup = rate["median"] / plain_rate if rate else None
    limit = 0.0 if rung.linear else last_speedup
    kept = speedup is not None and speedup >= SLOWER * limit
    note = rung.note
    if speedup and speedup < limit:
        note = "no gain beyond noise" if kept else "slower here: left out of the rungs below"
    same = ("seconds", "mfu", "mfu_causal", "peak_memory_bytes", "loss", "first_step_seconds")
    return {
        "name": rung.name,
        "tokens_per_second": rate and rate["median"],
        "plain_tokens_per_second": rate and plain_rate,
        **{key: row[key] for key in (*same, "chosen", "skipped")},
        "speedup": speedup,
        "share_of_linear": rung.linear and speedup and speedup / rung.linear,
        "rate": rate,
        "kept": kept,
        "note": note,
        "nproc": worker.spec.nproc,
        "batch_tokens": worker.spec.batch_tokens,
    }


def list_published() -> list[Row]:
    """Return a row for each published rung of GPT-2 124M."""
    plain: dict[str, float] = {}
    return [
        {
            "name": f"{rung.device}, {rung.source}: {rung.name}",
            "tokens_per_second": rung.rate,
            "rate": rung.rate,
            "batch_tokens": rung.batch_tokens,
            "seconds": rung.batch_tokens / rung.rate,
            "peak_memory_bytes": rung.memory_mib and rung.memory_mib * 2**20,
            "speedup": rung.rate / plain.setdefault(rung.device, rung.rate),
            "note": SOURCES[rung.source],
        }
        for rung in LADDER
    ]


def draw_rungs(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Draw tokens/s, MFU and peak memory of our own and of published rungs; return the path."""
    rungs = [row for row in rows if not row.get("skipped")]
    names = [row["name"] for row in rungs]
    sources = [row["note"] for row in rungs if "kept" not in row]
    panels = []
    for key, label in (
        ("tokens_per_second", "tokens/s"),
        ("mfu", "MFU"),
        ("peak_memory_bytes", "memory"),
    ):
        is_rate = key == "tokens_per_second"
        lines = []
        for kept, (group, color) in GROUPS.items():
            points = [
                (index, row)
                for index, row in enumerate(rungs)
                if row.get("kept") is kept and row.get(key)
            ]
            notes = [
                format_cell(key, row[key]) + is_rate * f", {format_cell('speedup', row['speedup'])}"
                for _, row in points
            ]
            x, y = [row[key] for _, row in points], [index for index, _ in points]
            legend = group if is_rate and points else ""
            lines.append(
                line(x, y, legend, fmt="o", color=color, notes=notes, note_position="right")
            )
        tick = format_tick if is_rate else lambda value, _, key=key: format_cell(key, value)
        scale = "log" if sources and is_rate else "linear"
        axes: dict[str, Any] = {
            "xlabel": label,
            "xscale": scale,
            "xmargin": 0.5,
            "formats": (tick,),
            "outside": "",
        }
        panels.append(panel(*lines, names=names if is_rate else [""] * len(names), **axes))
    note = "\n".join(dict.fromkeys(sources))
    heights = [3 + 0.3 * len(rungs)]
    return draw([panels], path, heights=heights, title=title, note=note)


def draw_scaling(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Plot the speedup by number of processes next to linear scaling."""
    counts = [row["nproc"] for row in rows]
    lines = [line([0, max(counts)], [0, max(counts)], "linear", ls="--", color="gray")]
    for scaling, note_position in SCALINGS.items():
        points = [row for row in rows if row["rate"] and row["name"].endswith(("1", scaling))]
        notes = [
            f"{row['tokens_per_second']:,.0f}\n{format_cell('mfu', row['mfu'])}" for row in points
        ]
        x, y = [row["nproc"] for row in points], [row["speedup"] for row in points]
        lines.append(line(x, y, scaling, fmt="o-", notes=notes, note_position=note_position))
    ends: dict[str, Any] = {"xlim": (0, None), "ylim": (0, None), "xmargin": 0.15, "ymargin": 0.15}
    ylabel = "speedup (at each point: tokens/s and MFU)"
    shown = panel(*lines, title=title, xlabel="processes", ylabel=ylabel, xticks=counts, **ends)
    return draw([[shown]], path)
