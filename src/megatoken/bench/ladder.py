"""`bench ladder`: every speed-up on this machine, one switch at a time, from plain PyTorch to what a run would use.

A rung is a worker process that takes turns with the rung it is built on, so its gain is a ratio of the same minutes;
its speed-up is the ratio of its tokens/s to those of the first rung. A switch that makes the step slower here is shown
and left out of the rungs above it. Losses after the same ids from the same weights show that only the speed changed.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatoken.bench.report import format_cell, format_rows, save_picture
from megatoken.bench.runner import Worker, count_steps, run_rounds
from megatoken.bench.spec import OURS, WorkerSpec
from megatoken.bench.workload import count_seqs, describe_peak, describe_seconds, format_peak
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.errors import ConfigError, PeerError
from megatoken.native.library import NO_LIBRARY, find_library
from megatoken.plots import save_figure
from megatoken.system.atomic_write import storage_errors
from megatoken.system.device import Device, open_device, with_peak
from megatoken.system.machine import cpu_count, find_compiler
from megatoken.system.timing import Timing

BATCH_TOKENS = {"cpu": 1024, "mps": 4096, "cuda": 65536}
FIRST_SEQS = {
    "cpu": 1,
    "mps": 1,
    "cuda": 8,
}  # micro-batch of all rungs but the last; explicit attention must fit
LONGEST_SECONDS = (
    400.0  # for the rounds of all rungs; there are fewer, but three, where a step takes long
)
SLOWER = 0.98  # a rung below this share of the one before is left out
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
}
COLUMNS |= {
    "peak_memory_bytes": "memory",
    "gain": "gain",
    "speedup": "speed-up",
    "first_step_seconds": "first step",
}
COLUMNS |= {"loss": "loss", "note": ""}
FOOTNOTE = "A gain is the ratio to the rung below in the same rounds; a speed-up is that of tokens/s to the first rung's."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One switch. machine, fields: what it changes of a `WorkerSpec`; missing: why this hardware lacks it, or "";
    note: what else it changes."""

    name: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""
    note: str = ""

    def apply(self, spec: WorkerSpec) -> WorkerSpec:
        """The spec with this switch turned."""
        machine = {**spec.machine, **self.machine}
        return replace(spec, configuration=self.name, machine=machine, **self.fields)


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure all rungs. Raises ConfigError for a batch that is no multiple of the context or an unknown rung."""
    device = with_peak(open_device(MachineConfig(device=options.device)))
    model_config = PRESETS[options.preset]
    tokens = options.batch_tokens or max(BATCH_TOKENS[device.type], model_config.seq_len)
    seqs = count_seqs(tokens, model_config.seq_len)
    rungs = choose_rungs(list_rungs(device, model_config, seqs), options.rungs)
    console.print(f"{options.preset}: {tokens:,} tokens a step, {format_peak(device)}")
    first = WorkerSpec(
        name=OURS,
        model_config=replace(model_config, vocab_multiple=1),
        batch_seqs=seqs,
        device=str(device.torch_device),
        machine=PLAIN,
        micro_batch=min(seqs, FIRST_SEQS[device.type]),
        prepared=False,
    )
    rows = []
    for row in measure_rungs(first, rungs, device, options.repeats, console):
        rows.append(row)
        rate = format_cell("rate", row["rate"]) or f"skipped: {row['skipped']}"
        console.print(
            ", ".join(
                [row["name"], rate, *(["left out"] if row["rate"] and not row["kept"] else [])]
            )
        )
    table = "\n".join(format_rows(COLUMNS, rows))
    with storage_errors(options.out, fix="choose --out"):
        (options.out / f"{options.name}.md").write_text(f"{table}\n\n{FOOTNOTE}\n")
    console.print(f"\n{table}\ntable: {options.out / options.name}.md")
    picture = partial(draw, rows, f"{options.preset} on {device.name}")
    save_picture(picture, options.out / f"{options.name}.png", console)
    speedup = max((row["speedup"] for row in rows if row["kept"]), default=None)
    about = {
        "preset": options.preset,
        **describe_peak(device),
        "batch_tokens": tokens,
        "speedup": speedup,
    }
    return {**about, "rungs": rows}


def list_rungs(device: Device, model_config: ModelConfig, batch_seqs: int) -> list[Rung]:
    """Every rung in order; `missing` is set on those that this hardware lacks. The last ones are 2, 4, 8 .. processes,
    as many as there are GPUs or cores, each with the batch that one process had."""
    on_cpu, low = device.type == "cpu", device.precision != "fp32"
    compiler = "" if not on_cpu or find_compiler() else "no C++ compiler found (install g++)"
    whole = (
        ""
        if batch_seqs > FIRST_SEQS[device.type]
        else "the batch is one micro-batch already (--batch-tokens)"
    )
    native = {
        "gemm_backend": "native",
        "attention": "native",
        "fused": "on",
        "adamw": "native",
        "compile": "off",
    }
    native |= {"master_weights": "on" if low else "off"}
    missing = (
        ""
        if on_cpu and find_library()
        else f"not compiled ({NO_LIBRARY})"
        if on_cpu
        else "for CPUs"
    )
    tuned = {
        "gemm_backend": "auto",
        "attention": "auto",
        "master_weights": "auto",
        "fused": "auto",
        "adamw": "auto",
    }
    most = {"cuda": torch.cuda.device_count(), "cpu": cpu_count()}.get(device.type, 1)
    return [
        Rung(name="plain: fp32, explicit attention, loop AdamW"),
        Rung(
            name="TF32 products",
            machine={"tf32": True},
            missing="" if device.is_ampere else "for NVIDIA GPUs since Ampere",
        ),
        Rung(
            name=f"{device.precision if low else 'bf16'} products",
            machine={"precision": device.precision},
            missing="" if low else f"{device.name} is fastest in fp32",
        ),
        Rung(name="flash attention", machine={"attention": "flash"}),
        Rung(name="compile", machine={"compile": "on"}, missing=compiler),
        Rung(name="fused AdamW", machine={"adamw": "fused"}),
        Rung(name="padded vocabulary", fields={"model_config": model_config}),
        Rung(
            name="fused loss in chunks",
            machine={"loss_chunk": "auto", "fused": "off" if on_cpu else "auto"},
        ),
        Rung(
            name="kept memory, resting threads",
            fields={"prepared": True},
            missing="" if on_cpu else "for CPUs",
        ),
        Rung(name="native kernels", machine=native, missing=missing),
        Rung(name="kernels tuned here", machine=tuned | ({"compile": "off"} if on_cpu else {})),
        Rung(name="largest micro-batch", fields={"micro_batch": 0}, missing=whole),
        *(
            Rung(
                name=f"data parallel on {count}",
                fields={"nproc": count, "batch_seqs": count * batch_seqs},
                note=f"{count} batches a step, so another loss",
            )
            for count in (1 << power for power in range(1, most.bit_length()))
        ),
    ]


def choose_rungs(rungs: list[Rung], numbers: str) -> list[Rung]:
    """The rungs whose numbers, counted from 1, are named; the first always. Empty: all."""
    if not numbers:
        return rungs
    words = numbers.replace(" ", "").split(",")
    chosen = [rung for number, rung in enumerate(rungs, 1) if number == 1 or str(number) in words]
    if len(chosen) < len({"1", *words}):
        known = ", ".join(f"{number} {rung.name}" for number, rung in enumerate(rungs, 1))
        raise ConfigError(f"no such rungs: {numbers}", "--rungs", f"give numbers of: {known}")
    return chosen


def measure_rungs(
    first: WorkerSpec, rungs: list[Rung], device: Device, repeats: int, console: Console
) -> Iterator[dict[str, Any]]:
    """Measure rung by rung, each against the newest that was kept; yield a record's row for each.

    Raises PeerError when the first cannot run, or the one that others are measured against is lost.
    """
    below: Worker | None = None
    spec, plain, steps = first, 0.0, 1
    with ExitStack() as stack:
        stack.callback(console.close)
        for rung in rungs:
            above = Worker(spec=rung.apply(spec), skipped=rung.missing)
            stack.callback(above.close)
            console.step(f"{rung.name}: first steps")
            seconds = None if rung.missing else above.warm_up()
            if below is None and seconds:
                steps = count_steps(seconds)
                repeats = min(
                    repeats, max(3, int(LONGEST_SECONDS / (2 * len(rungs) * steps * seconds)))
                )
            if seconds:
                run_rounds(below, above, repeats, steps, console)
            lost = above.skipped if below is None else below.skipped
            if lost:
                what = f"the rung that others are measured against is lost: {lost}"
                raise PeerError(what, "bench ladder", "give a smaller preset or --batch-tokens")
            larger = above.spec.batch_seqs / spec.batch_seqs  # times as many tokens a step
            row = describe_rung(
                rung, above, [larger * ratio for ratio in above.ratios], plain, device
            )
            yield row
            if row["kept"]:
                below, above, spec, plain = (
                    above,
                    below or above,
                    above.spec,
                    plain or row["tokens_per_second"],
                )
            if above is not below:
                above.close()


def describe_rung(
    rung: Rung, worker: Worker, ratios: list[float], plain: float, device: Device
) -> dict[str, Any]:
    """A record's row. ratios: to the rung below, round by round; plain: tokens/s of the first rung, 0 for itself.

    A rung is kept unless it was slower than the one below.
    """
    row, note = worker.describe(device), rung.note
    rate, gain = (
        row["tokens_per_second"],
        describe_seconds(Timing(tuple(ratios))) if ratios else None,
    )
    factor = gain["median"] if gain else 1.0
    kept = not worker.skipped and factor >= SLOWER
    if rate and factor < 1.0:
        note = "no gain beyond the noise" if kept else "slower here: left out of the rungs below"
    return {
        "name": rung.name,
        "tokens_per_second": rate and rate["median"],
        "seconds": row["seconds"],
        "speedup": rate["median"] / (plain or rate["median"]) if rate else None,
        **{key: row[key] for key in ("mfu", "mfu_causal", "peak_memory_bytes", "loss", "skipped")},
        "rate": rate,
        "gain": gain,
        "first_step_seconds": row["first_step_seconds"],
        "kept": kept,
        "chosen": worker.chosen,
        "note": note,
    }


def draw(rows: list[dict[str, Any]], title: str, pyplot: Any, path: Path) -> Path:
    """Bars for each rung: speed-up, MFU, peak memory; pale where a rung was left out."""
    rungs = [row for row in rows if not row["skipped"]][::-1]
    keys = ("speedup", "mfu", "peak_memory_bytes")
    figure, axes = pyplot.subplots(
        1, 3, layout="constrained", sharey=True, figsize=(15, 1.5 + 0.5 * len(rungs))
    )
    for index, (axis, key) in enumerate(zip(axes, keys, strict=True)):
        widths = [row[key] or 0.0 for row in rungs]
        bars = axis.barh([row["name"] for row in rungs], widths, color=f"C{index}")
        axis.bar_label(bars, [format_cell(key, row[key]) for row in rungs], padding=4)
        for bar, row in zip(bars, rungs, strict=True):
            bar.set_alpha(1.0 if row["kept"] else 0.35)
        axis.set(xlabel=COLUMNS[key], xlim=(0, 1.3 * max(widths) or 1.0))
        axis.xaxis.set_major_formatter(
            pyplot.FuncFormatter(lambda value, _, key=key: format_cell(key, value))
        )
        axis.xaxis.set_major_locator(pyplot.MaxNLocator(4))
    figure.suptitle(f"{title} (pale: left out of the rungs below)")
    return save_figure(pyplot, figure, path)
