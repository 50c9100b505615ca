"""bench parts: where the time of one training step goes, part by part, and how little it could be.

In: a preset and a batch. Out: a Markdown table for docs/numbers.md, and every part's seconds beside its floor: matrix
products and attention by their FLOPs at the fastest product this device does, everything else by the bytes it cannot
avoid (dissect.py says which) at the speed of a copy, or a change in place, that moves as many: what fits the caches is
judged by what does too. What the step takes beyond its parts is the overhead: fresh memory, cold caches, Python.
Parts run uncompiled and from warm caches, the step as it is; the step draws its ids, the loader's time is listed.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatoken.bench.batch import describe_seconds
from megatoken.bench.dissect import Part, list_parts, read_kernels
from megatoken.bench.loader import write_shards
from megatoken.bench.memory import LARGEST_COPY, choose_copy, list_copies, read_speeds
from megatoken.bench.report import show_table
from megatoken.bench.workload import Workload, build_workload
from megatoken.config import Machine
from megatoken.console import Console, format_quantity
from megatoken.device import Device, with_peak
from megatoken.errors import Exit, Fault
from megatoken.presets import PRESETS
from megatoken.timing import Timing, time_calls

STEP = "whole step"
SHARD_TOKENS = 1 << 20
LONGEST_SECONDS = 120.0  # for all rounds; there are fewer, but three, where a step takes long


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure a preset's step. Raises Fault(CONFIG) for a batch that is not whole sequences."""
    shape = PRESETS[options.preset]
    shape = replace(shape, seq_len=options.seq_len or min(shape.seq_len, options.batch_tokens))
    seqs, rest = divmod(options.batch_tokens, shape.seq_len)
    if rest or not seqs:
        what = f"{options.batch_tokens} tokens are not whole sequences of {shape.seq_len}"
        raise Fault(Exit.CONFIG, what, "--batch-tokens", f"give a multiple of {shape.seq_len}, or another --seq-len")
    workload = build_workload(shape, Machine(device=options.device), batch_seqs=seqs, micro_batch=seqs)
    forms = f"{read_kernels(workload)}, {'masters' if workload.state.has_masters else 'one set of weights'}"
    device = with_peak(workload.device)
    console.say(f"one step of {options.preset}, {seqs} x {shape.seq_len} tokens, {device.precision} on {device.name}")
    console.say(f"forms: {forms}")
    answer = measure(workload, device, options.repeats, console)
    if options.trace:
        console.say(f"trace: {write_trace(workload, options.out / 'trace.json')} (open it at ui.perfetto.dev)")
    return {
        "device": device.name,
        "precision": device.precision,
        "preset": options.preset,
        "seq_len": shape.seq_len,
        "batch_tokens": options.batch_tokens,
        "forms": forms,
        "peak_flops": device.peak_flops,
        "peak_source": device.peak_source,
        **answer,
    }


def measure(
    workload: Workload, device: Device, repeats: int, console: Console, *, largest_copy: int = 0
) -> dict[str, Any]:
    """Time all parts and the whole step in turns, print the budget. largest_copy: bytes; 0 for beyond the caches."""
    with tempfile.TemporaryDirectory() as name:
        write_shards(Path(name), 1, max(SHARD_TOKENS, 4 * workload.plan.batch_tokens))
        parts = list(list_parts(workload, Path(name)))
        largest = largest_copy or LARGEST_COPY[device.place.type]
        sizes = {choose_copy(part.moved_bytes, largest) for part in parts if part.moved_bytes}
        calls = {part.name: part.call for part in parts} | list_copies(device, sizes | {largest})
        console.say(f"{len(parts)} parts, the whole step and {len(calls) - len(parts)} copies take turns")
        timings = time_calls(
            calls | {STEP: workload.step},
            repeats=repeats,
            longest=LONGEST_SECONDS,
            fewest=3,
            synchronize=device.synchronize,
            tell=console.step,
        )
        console.close()
    speeds = read_speeds(timings, sizes | {largest})
    said = ", ".join(
        f"{format_quantity(speed, 'B/s')} at {format_quantity(size, 'B')}" for size, speed in speeds.items()
    )
    console.say(f"memory, read and written: {said}")
    rows = [_describe(part, timings, device, speeds) for part in parts]
    step, tokens = timings[STEP], workload.plan.batch_tokens
    total, floor = (sum(row["calls"] * seconds(row) for row in rows) for seconds in (_median, _floor))
    show_budget(rows, step, tokens, console)
    return {
        "bandwidth": speeds[largest],
        "bandwidth_by_bytes": {str(size): speed for size, speed in speeds.items()},
        "parts": rows,
        "parts_seconds": total,
        "floor_seconds": floor,
        "overhead_seconds": step.median - total,
        "step_seconds": describe_seconds(step),
        "floor_tokens_per_second": tokens / floor,
        "tokens_per_second": step.rate(tokens),
    }


def _describe(part: Part, timings: dict[str, Timing], device: Device, speeds: dict[int, float]) -> dict[str, Any]:
    """A part as a record says it: seconds and floor of one call."""
    if part.flops:
        floor = part.flops / device.peak_flops
    else:
        floor = part.moved_bytes / speeds[choose_copy(part.moved_bytes, max(speeds))]
    timing = subtract(timings[part.name], [timings[name] for name in part.less])
    return {
        "name": part.name,
        "group": part.group,
        "calls": part.calls,
        "flops": part.flops,
        "moved_bytes": part.moved_bytes,
        "seconds": describe_seconds(timing),
        "floor_seconds": floor,
        "bound": part.bound,
    }


def subtract(whole: Timing, contained: Sequence[Timing]) -> Timing:
    """What is left of each round; nothing where noise made the contained parts longer than the whole."""
    rounds = zip(whole.seconds, *(timing.seconds for timing in contained), strict=True)
    return Timing(tuple(max(0.0, first - sum(others)) for first, *others in rounds))


def _median(row: dict[str, Any]) -> float:
    return float(row["seconds"]["median"])


def _floor(row: dict[str, Any]) -> float:
    return float(row["floor_seconds"])


def show_budget(rows: list[dict[str, Any]], step: Timing, tokens: int, console: Console) -> None:
    """Print every part, then each group and the whole, as two Markdown tables; times of all calls, in ms."""
    total, floor = (sum(row["calls"] * seconds(row) for row in rows) for seconds in (_median, _floor))
    cells = []
    for row in rows:
        spread = " to ".join(f"{1e3 * row['calls'] * row['seconds'][key]:.4g}" for key in ("low", "high"))
        took, least = (row["calls"] * seconds(row) for seconds in (_median, _floor))
        known = (row["name"], str(row["calls"]), *_format_times(took, least, step.median), spread, row["bound"])
        cells.append(known)
    heads = ("ms", "share of step", "floor ms", "times floor")
    console.say()
    show_table(("part", "calls", *heads, "low to high", "floor by"), cells, console)
    sums = []
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        took, least = (sum(row["calls"] * seconds(row) for row in mine) for seconds in (_median, _floor))
        sums.append((group, *_format_times(took, least, step.median)))
    sums.append(("sum of parts", *_format_times(total, floor, step.median)))
    sums.append(("overhead", *_format_times(step.median - total, 0.0, step.median)))
    sums.append((STEP, *_format_times(step.median, floor, step.median)))
    console.say()
    show_table(("group", *heads), sums, console)
    console.say()
    console.say(f"{tokens / step.median:,.0f} tokens/s; {tokens / floor:,.0f} tokens/s if every part were at its floor")


def _format_times(took: float, least: float, step: float) -> tuple[str, str, str, str]:
    times = f"{took / least:.3g}" if least else ""
    return f"{1e3 * took:.4g}", f"{took / step:.1%}", f"{1e3 * least:.4g}" if least else "", times


def write_trace(workload: Workload, target: Path) -> Path:
    """Profile one step into a Chrome trace. Raises Fault(STORAGE) when it cannot be written."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if workload.device.place.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    workload.step()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        workload.step()
        workload.device.synchronize()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"")  # the profiler itself says nothing of a folder that cannot be written to
        profile.export_chrome_trace(str(target))
    except OSError as wrong:
        raise Fault(Exit.STORAGE, f"cannot write trace: {wrong.strerror}", str(target), "choose --out") from None
    return target
