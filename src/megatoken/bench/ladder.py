"""`bench ladder`: the speedup of each optimization on this machine, one switch at a time.

Each rung adds a switch to the last rung that was kept. It runs in a worker process, in rounds that
alternate with rounds of the first rung, the plain step; its speedup is its tokens/s divided by the
plain step's in these rounds. A switch with a smaller speedup than the last kept rung is reported
and left out of later rungs. All rungs train on the same ids from the same weights, so equal losses
show that a switch changes only the speed.
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

from megatoken.bench.report import format_cell, format_rows, save_picture
from megatoken.bench.runner import Worker, count_steps, run_rounds
from megatoken.bench.worker import WorkerSpec
from megatoken.bench.workload import count_seqs, describe_peak, format_peak
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.errors import ConfigError, PeerError
from megatoken.native.selection import NO_LIBRARY, find_library
from megatoken.plots import save_figure
from megatoken.system.atomic_write import storage_errors
from megatoken.system.device import Device, open_device, with_peak
from megatoken.system.machine import cpu_count, find_compiler

BATCH_TOKENS = {"cpu": 1024, "mps": 4096, "cuda": 65536}
# Sequences per micro-batch until the rung that tunes it; explicit attention must fit in memory.
FIRST_SEQS = {"cpu": 1, "mps": 1, "cuda": 8}
LONGEST_SECONDS = 400.0  # for all rounds; slow steps get fewer repeats, at least 3
SLOWER = 0.98  # a rung below this fraction of the last kept speedup is left out of later rungs
PLAIN: dict[str, Any] = {
    "precision": "fp32",
    "tf32": False,
    "compile": "off",
    "master_weights": "off",
    "gemm_backend": "torch",
    "attention": "explicit",
    "adamw": "loop",
    "fused": "off",
    "loss_chunk": 0,
}
COLUMNS = {
    "name": "rung",
    "seconds": "step",
    "rate": "tokens/s",
    "mfu": "MFU",
    "mfu_causal": "MFU causal",
    "peak_memory_bytes": "memory",
    "plain_tokens_per_second": "plain tokens/s",
    "speedup": "speedup",
    "first_step_seconds": "first step",
    "loss": "loss",
    "note": "",
}
FOOTNOTE = "Speedup: tokens/s divided by the plain step's in the same rounds."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One switch of the ladder.

    machine: the machine settings that it changes. fields: other fields of the WorkerSpec that it
    changes. missing: why it cannot run here, or "" if it can.
    """

    name: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""
    note: str = ""

    def apply(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the spec with this switch applied."""
        machine = {**spec.machine, **self.machine}
        return replace(spec, configuration=self.name, machine=machine, **self.fields)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the rungs, save a table and a picture, and return the result for the record.

    Raises ConfigError if a rung is unknown or the batch is not a multiple of the context.
    """
    device = with_peak(open_device(MachineConfig(device=options.device)))
    model_config = PRESETS[options.preset]
    tokens = options.batch_tokens or max(BATCH_TOKENS[device.type], model_config.seq_len)
    seqs = count_seqs(tokens, model_config.seq_len)
    rungs = select_rungs(list_rungs(device, model_config, seqs), options.rungs)
    console.print(f"{options.preset}: {tokens:,} tokens per step, {format_peak(device)}")
    first = WorkerSpec(
        model_config=replace(model_config, vocab_multiple=1),
        batch_seqs=seqs,
        device=str(device.torch_device),
        machine=PLAIN,
        micro_batch=min(seqs, FIRST_SEQS[device.type]),
        prepare_process=False,
    )
    rows = []
    for row in measure_rungs(first, rungs, device, options.repeats, console):
        rows.append(row)
        rate = format_cell("rate", row["rate"]) or f"skipped: {row['skipped']}"
        ending = ", left out" if row["rate"] and not row["kept"] else ""
        console.print(f"{row['name']}, {rate}{ending}")
    save_table(rows, options.out / f"{options.name}.md", console)
    picture = partial(draw, rows, f"{options.preset} on {device.name}")
    save_picture(picture, options.out / f"{options.name}.png", console)
    return {
        "preset": options.preset,
        **describe_peak(device),
        "batch_tokens": tokens,
        "speedup": max((row["speedup"] for row in rows if row["kept"]), default=None),
        "rungs": rows,
    }


NATIVE = {
    "gemm_backend": "native",
    "attention": "native",
    "fused": "on",
    "adamw": "native",
    "compile": "off",
}
TUNED = dict.fromkeys(("gemm_backend", "attention", "master_weights", "fused", "adamw"), "auto")


def list_rungs(device: Device, model_config: ModelConfig, batch_seqs: int) -> list[Rung]:
    """Return all rungs in order, with `missing` set for those that cannot run here.

    The last ones run on 2, 4, 8, ... processes, up to the number of GPUs or cores, with
    `batch_seqs` sequences for each process.
    """
    on_cpu = device.type == "cpu"
    low_precision = device.precision != "fp32"
    only_cpu = "" if on_cpu else "for CPUs"
    no_compiler = on_cpu and not find_compiler()
    is_one_micro_batch = batch_seqs <= FIRST_SEQS[device.type]
    no_library = f"not compiled ({NO_LIBRARY})" if on_cpu and not find_library() else ""
    return [
        Rung(name="plain: fp32, explicit attention, loop AdamW"),
        Rung(
            name="TF32 products",
            machine={"tf32": True},
            missing="" if device.is_ampere else "for NVIDIA GPUs since Ampere",
        ),
        Rung(
            name=f"{device.precision if low_precision else 'bf16'} products",
            machine={"precision": device.precision},
            missing="" if low_precision else f"{device.name} is fastest in fp32",
        ),
        Rung(name="flash attention", machine={"attention": "flash"}),
        Rung(
            name="compile",
            machine={"compile": "on"},
            missing="no C++ compiler found (install g++)" if no_compiler else "",
        ),
        Rung(name="fused AdamW", machine={"adamw": "fused"}),
        Rung(name="padded vocabulary", fields={"model_config": model_config}),
        Rung(
            name="fused loss in chunks",
            machine={"loss_chunk": "auto", "fused": "off" if on_cpu else "auto"},
        ),
        Rung(
            name="kept memory, resting threads", fields={"prepare_process": True}, missing=only_cpu
        ),
        Rung(
            name="native kernels",
            machine=NATIVE | {"master_weights": "on" if low_precision else "off"},
            missing=only_cpu or no_library,
        ),
        Rung(name="kernels tuned here", machine=TUNED | ({"compile": "off"} if on_cpu else {})),
        Rung(
            name="largest micro-batch",
            fields={"micro_batch": 0},
            missing="the batch is one micro-batch (--batch-tokens)" if is_one_micro_batch else "",
        ),
        *list_process_rungs(device, batch_seqs),
    ]


def list_process_rungs(device: Device, batch_seqs: int) -> list[Rung]:
    """Return one rung for each number of data-parallel processes: 2, 4, 8, ..."""
    most = {"cuda": torch.cuda.device_count(), "cpu": cpu_count()}.get(device.type, 1)
    counts = [1 << power for power in range(1, most.bit_length())]
    return [
        Rung(
            name=f"data parallel on {nproc}",
            fields={"nproc": nproc, "batch_seqs": nproc * batch_seqs},
            note=f"{nproc} times the batch, so another loss",
        )
        for nproc in counts
    ]


def select_rungs(rungs: list[Rung], numbers: str) -> list[Rung]:
    """Return the first rung and those with the given numbers, such as "3,5", counted from 1.

    All are returned for "". Raises ConfigError for an unknown number.
    """
    if not numbers:
        return rungs
    words = {"1", *numbers.replace(" ", "").split(",")}
    by_number = {str(number): rung for number, rung in enumerate(rungs, 1)}
    if not words <= by_number.keys():
        names = ", ".join(f"{number} {rung.name}" for number, rung in by_number.items())
        raise ConfigError(f"no such rungs: {numbers}", "--rungs", f"choose from {names}")
    return [rung for number, rung in by_number.items() if number in words]


def measure_rungs(
    first: WorkerSpec, rungs: Sequence[Rung], device: Device, repeats: int, console: Console
) -> Iterator[dict[str, Any]]:
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
                what = f"the first rung failed: {plain.skipped}"
                raise PeerError(what, "bench ladder", "use a smaller preset or --batch-tokens")
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
) -> dict[str, Any]:
    """Build the record's row for a rung.

    The rung is kept unless it failed or is slower than the last one that was kept, whose speedup is
    `last_speedup`. plain_rate: tokens/s of the plain step in the same rounds.
    """
    row = worker.describe(device)
    rate = row["tokens_per_second"]
    speedup = rate["median"] / plain_rate if rate else None
    kept = speedup is not None and speedup >= SLOWER * last_speedup
    note = rung.note
    if speedup and speedup < last_speedup:
        note = "no gain beyond noise" if kept else "slower here: left out of the rungs below"
    return {
        "name": rung.name,
        "tokens_per_second": rate and rate["median"],
        "plain_tokens_per_second": rate and plain_rate,
        "seconds": row["seconds"],
        "speedup": speedup,
        "mfu": row["mfu"],
        "mfu_causal": row["mfu_causal"],
        "peak_memory_bytes": row["peak_memory_bytes"],
        "loss": row["loss"],
        "skipped": row["skipped"],
        "rate": rate,
        "first_step_seconds": row["first_step_seconds"],
        "kept": kept,
        "chosen": worker.chosen,
        "note": note,
    }


def save_table(rows: list[dict[str, Any]], path: Path, console: Console) -> None:
    """Print the table and write it to a Markdown file. Raises StorageError."""
    table = "\n".join(format_rows(COLUMNS, rows))
    with storage_errors(path.parent, fix="choose --out"):
        path.write_text(f"{table}\n\n{FOOTNOTE}\n")
    console.print(f"\n{table}\ntable: {path}")


def draw(rows: list[dict[str, Any]], title: str, pyplot: Any, path: Path) -> Path:
    """Draw bars of each rung's speedup, MFU and peak memory, paler if the rung was left out."""
    rungs = [row for row in rows if not row["skipped"]][::-1]
    size = (15, 1.5 + 0.5 * len(rungs))
    figure, axes = pyplot.subplots(1, 3, layout="constrained", sharey=True, figsize=size)
    for index, key in enumerate(("speedup", "mfu", "peak_memory_bytes")):
        axis = axes[index]
        widths = [row[key] or 0.0 for row in rungs]
        bars = axis.barh([row["name"] for row in rungs], widths, color=f"C{index}")
        axis.bar_label(bars, [format_cell(key, row[key]) for row in rungs], padding=4)
        for bar, row in zip(bars, rungs, strict=True):
            bar.set_alpha(1.0 if row["kept"] else 0.35)
        axis.set(xlabel=COLUMNS[key], xlim=(0, 1.3 * max(widths) or 1.0))
        axis.xaxis.set_major_formatter(lambda value, _, key=key: format_cell(key, value))
        axis.xaxis.set_major_locator(pyplot.MaxNLocator(4))
    figure.suptitle(f"{title} (pale: left out of the rungs below)")
    return save_figure(pyplot, figure, path)
