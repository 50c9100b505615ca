"""bench batch: tokens/s, MFU and peak memory of a training step over its micro-batch, until memory ends.

In: a preset. Out: rows of 1, 2, 4 .. sequences, each the only micro-batch of a real step, why there are no more, and
batch.png. Memory is read while the sizes are tried in ascending order, since the most that was ever resident in a
process only grows (on CUDA it is counted anew for each size); then the sizes take turns. Absent: accumulation.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatoken.bench.memory import SHARE, estimate_step_bytes, find_free_bytes, forget_peak
from megatoken.bench.report import show_table
from megatoken.bench.workload import Workload, build_workload
from megatoken.config import Machine
from megatoken.console import Console, format_quantity
from megatoken.device import Device, with_peak
from megatoken.errors import Exit, Fault
from megatoken.model.count import flops_per_token
from megatoken.plot import load_pyplot, save_figure
from megatoken.presets import PRESETS, Shape
from megatoken.timing import Timing, time_calls

LARGEST_CPU_TOKENS = 8192  # of a micro-batch: beyond it products stop getting faster, and a step takes a minute
LONGEST_SECONDS = 240.0  # for the repeats of all sizes; there are fewer, but three, where a step takes long


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure a preset. Raises Fault(CONFIG) when not even one sequence fits."""
    shape = PRESETS[options.preset]
    shape = replace(shape, seq_len=options.seq_len or shape.seq_len)
    machine = Machine(device=options.device)
    workload = build_workload(shape, machine, batch_seqs=1, micro_batch=1)
    device = with_peak(workload.device)
    on_gpu = device.place.type == "cuda"
    largest = options.largest or (None if on_gpu else max(1, LARGEST_CPU_TOKENS // shape.seq_len))
    console.say(f"a step of {options.preset} at {shape.seq_len} tokens a sequence, {device.precision} on {device.name}")
    if not on_gpu:
        console.say("sizes are tried in ascending order: the peak of resident memory only grows within a process")
    rows, ended = measure(workload, device, largest, SHARE * find_free_bytes(device), options.repeats, console)
    show_rows(rows, device, console)
    console.say(f"end: {ended}")
    try:
        title = f"{options.preset} at {shape.seq_len}, {device.precision} on {device.name}"
        console.say(f"picture: {draw(rows, title, options.out / 'batch.png')}")
    except Fault as fault:
        console.say(f"not drawn: {fault}")
    return {
        "device": device.name,
        "precision": device.precision,
        "preset": options.preset,
        "seq_len": shape.seq_len,
        "peak_flops": device.peak_flops,
        "peak_source": device.peak_source,
        "rows": rows,
        "ended": ended,
    }


def measure(
    workload: Workload, device: Device, largest: int | None, allowed: float, repeats: int, console: Console
) -> tuple[list[dict[str, Any]], str]:
    """(a row of each size that ran, why there is none beyond). largest: sequences; None for as many as fit.

    allowed: bytes, held to where the system would swap rather than refuse. Raises Fault(CONFIG) if nothing fits.
    """
    memory, ended = try_sizes(workload, device, largest, allowed, console)
    if not memory:
        raise Fault(Exit.CONFIG, f"one sequence does not fit: {ended}", "--seq-len", "give less, or a smaller --preset")
    timings = time_calls(
        {str(size): resize(workload, size).step for size in memory},
        repeats=repeats,
        longest=LONGEST_SECONDS,
        fewest=3,
        synchronize=device.synchronize,
    )
    rows = []
    for size, peak_bytes in memory.items():
        tokens = size * workload.shape.seq_len
        speed = describe_speed(timings[str(size)], workload.shape, device, tokens)
        rows.append({"micro_batch": size, "batch_tokens": tokens, **speed, "peak_memory_bytes": peak_bytes})
    return rows, ended


def try_sizes(
    workload: Workload, device: Device, largest: int | None, allowed: float, console: Console
) -> tuple[dict[int, int], str]:
    """({micro-batch: peak bytes of its step}, why the next was not tried or failed)."""
    peaks: dict[int, int] = {}
    size = 1
    while largest is None or size <= largest:
        tokens = size * workload.shape.seq_len
        needed = estimate_step_bytes(workload.shape, tokens, chunk=workload.plan.loss_chunk)
        if device.place.type != "cuda" and needed > allowed:
            need, free = format_quantity(needed, "B"), format_quantity(allowed / SHARE, "B")
            return peaks, f"micro-batch {size} would hold about {need}, more than {SHARE:.0%} of the {free} free"
        peak = try_step(resize(workload, size), device)
        if peak is None:
            return peaks, f"micro-batch {size} ran out of memory"
        peaks[size] = peak
        console.say(f"micro-batch {size}: peak {format_quantity(peak, 'B')}")
        size *= 2
    return peaks, f"--largest {largest}"


def try_step(workload: Workload, device: Device) -> int | None:
    """Peak bytes of one step, None where memory ended; then its gradients are gone."""
    forget_peak(device)
    try:
        workload.step()
        device.synchronize()
        return device.peak_memory_bytes()
    except torch.OutOfMemoryError:
        pass
    workload.state.optimizer.zero_grad(set_to_none=True)
    forget_peak(device)
    return None


def resize(workload: Workload, micro_batch: int) -> Workload:
    """The same model fed batches of exactly one micro-batch."""
    plan = replace(workload.plan, batch_tokens=micro_batch * workload.shape.seq_len, micro_batch=micro_batch)
    return replace(workload, plan=plan)


def describe_seconds(timing: Timing) -> dict[str, Any]:
    """Seconds as a record says them: median, quartiles (low, high) and the number of repeats."""
    low, high = timing.quartiles
    return {"median": timing.median, "low": low, "high": high, "repeats": len(timing.seconds)}


def describe_speed(timing: Timing, shape: Shape, device: Device, tokens: int) -> dict[str, Any]:
    """Tokens/s and MFU in both readings (model/count.py), null without a peak, as records say them."""
    rate = timing.rate(tokens)
    shares: dict[str, float | None] = {}
    for key, causal in (("mfu", False), ("mfu_causal", True)):
        used = rate["median"] * flops_per_token(shape, causal=causal)
        shares[key] = used / device.peak_flops if device.peak_flops else None
    return {"tokens_per_second": rate, **shares}


def show_rows(rows: list[dict[str, Any]], device: Device, console: Console) -> None:
    """The rows as a Markdown table."""
    kind = "allocated" if device.place.type == "cuda" else "resident"
    console.say(f"MFU against {format_quantity(device.peak_flops, 'FLOP/s')} ({device.peak_source})")
    heads = ("micro-batch", "tokens", "tokens/s", "low to high", "MFU", "MFU causal", f"peak memory ({kind})")
    show_table(heads, [(str(row["micro_batch"]), *format_speed(row)) for row in rows], console)


def format_speed(row: dict[str, Any]) -> tuple[str, ...]:
    """Cells: tokens of a step, tokens/s and their spread, MFU in both readings, peak memory."""
    rate = row["tokens_per_second"]
    shares = ["unknown" if row[key] is None else f"{row[key]:.1%}" for key in ("mfu", "mfu_causal")]
    spread = f"{rate['low']:,.0f} to {rate['high']:,.0f}"
    memory = format_quantity(row["peak_memory_bytes"], "B")
    return f"{row['batch_tokens']:,}", f"{rate['median']:,.0f}", spread, *shares, memory


def draw(rows: list[dict[str, Any]], title: str, target: Path) -> Path:
    """Picture of tokens/s and memory over the micro-batch.

    Raises Fault(CONFIG) without matplotlib, Fault(STORAGE) when it cannot be written.
    """
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    sizes = [row["micro_batch"] for row in rows]
    rates = {key: [row["tokens_per_second"][key] for row in rows] for key in ("low", "median", "high")}
    left.plot(sizes, rates["median"], "o-")
    left.fill_between(sizes, rates["low"], rates["high"], alpha=0.2, lw=0)
    left.set(title=title, ylabel="tokens/s", ylim=(0, None))
    right.plot(sizes, [row["peak_memory_bytes"] / 1e9 for row in rows], "o-", color="C1")
    right.set(title="peak memory", ylabel="GB", ylim=(0, None))
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("micro-batch (sequences)")
        axis.xaxis.set_major_formatter(pyplot.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(alpha=0.25)
    return save_figure(pyplot, figure, target)
