"""`bench parts`: where the time of a training step goes, measured by torch.profiler.

An operation belongs to the group that its name matches, or else to the group of its caller.
Additions, copies and Python code are "other", and the times include the profiler's overhead.

On CUDA, the step is compiled as in training, and its kernels are grouped by their names. Inductor
fuses several operations into a kernel, which counts for the first group that its name matches: norm
with its residual addition, activation with its bias gradient. The rest of the step is idle time.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from megatoken.base.config.load import resolve_preset
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.console import Console
from megatoken.base.markdown_table import show_rows
from megatoken.base.system.atomic_write import storage_errors
from megatoken.base.system.device import Device
from megatoken.base.system.metrics_log import Row
from megatoken.base.system.table import read_table
from megatoken.base.system.timing import Timing, time_once
from megatoken.model.flops import count_matmul_parameters, describe_mfu, flops_per_token
from megatoken.model.native.library import Library
from megatoken.plan.tuning.peak import with_peak
from megatoken.study.bench.workload import (
    Workload,
    build_workload,
    count_seqs,
    describe_peak,
    describe_seconds,
    format_peak,
)

# Patterns of names by group: of operations, and of CUDA kernels; the first match counts.
GROUPS, KERNELS = read_table(__file__).values()
SHOWN_KERNELS = 12
LONGEST_SECONDS = 120.0  # for all repeats; slow steps get fewer, at least 3


def run(options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Profile a training step of a preset; yield the result for the record.

    Raises ConfigError if the batch is not a multiple of the context.
    """
    settings = [f"machine.device={options.device}", f"machine.precision={options.precision}"]
    config = resolve_preset(options.preset, [*settings, *options.overrides]).config
    seq_len = options.seq_len or min(config.model.seq_len, options.batch_tokens)
    seqs = count_seqs(options.batch_tokens, seq_len)
    machine = config.machine
    micro_batch = seqs if machine.micro_batch == "auto" else machine.micro_batch
    workload = build_workload(
        replace(config.model, seq_len=seq_len), machine, batch_seqs=seqs, micro_batch=micro_batch
    )
    device = with_peak(workload.device)
    console.print(f"a step of {options.preset}, {seqs} x {seq_len} tokens, {format_peak(device)}")
    trace = options.out / "trace.json" if options.trace else None
    result = measure(workload, device, options.repeats, console, trace)
    show_parts(result, device, console)
    yield {
        **describe_peak(device),
        "preset": options.preset,
        "seq_len": seq_len,
        "batch_tokens": options.batch_tokens,
        "micro_batch": micro_batch,
        "settings": options.overrides,
        "forms": str(workload.tuning.choice),
        "compile": workload.tuning.note or workload.tuning.compile,
        **result,
    }


def measure(
    workload: Workload, device: Device, repeats: int, console: Console, trace: Path | None = None
) -> Row:
    """Run steps without and with the profiler in turn; return the groups and totals for the record.

    trace: file for a Chrome trace of the last profiled step.
    """
    seconds: list[float] = []
    profiles: list[dict[str, float]] = []
    workload.step()
    once = time_once(workload.step, device.synchronize)
    for number in range(min(repeats, max(3, int(LONGEST_SECONDS / (3 * once))))):
        console.step(f"round {number + 1}")
        seconds.append(time_once(workload.step, device.synchronize))
        events = profile_step(workload, trace)
        profiles.append(sum_groups(events, on_cuda=device.type == "cuda"))
    console.close()
    model, tokens = workload.state.model.config, workload.step_config.batch_tokens
    return summarize(model, tokens, Timing(tuple(seconds)), profiles, events, device)


def summarize(
    config: ModelConfig,
    tokens: int,
    timing: Timing,
    profiles: Sequence[dict[str, float]],
    events: list[Any],
    device: Device,
) -> Row:
    """Return the groups and totals of steps.

    tokens: of a step. timing: of steps. profiles: of each profiled step, the seconds in each group.
    events: of the last profiled step.
    """
    products = 6 * count_matmul_parameters(config) * tokens
    attention = flops_per_token(config, causal=True) * tokens - products
    flops = {"matrix products": products, "attention": attention}
    parts: list[Row] = []
    for name in profiles[0]:
        part = Timing(tuple(groups[name] for groups in profiles))
        parts.append(describe_part(name, part, timing.median, flops.get(name), device))
    total = sum(part["seconds"]["median"] for part in parts)
    floor = sum(flops.values()) / device.peak_flops if device.peak_flops else None
    return {
        "parts": parts,
        "parts_seconds": total,
        "overhead_seconds": timing.median - total,
        "step_seconds": describe_seconds(timing),
        "floor_seconds": floor,
        "floor_tokens_per_second": tokens / floor if floor else None,
        "tokens_per_second": timing.rate(tokens),
        **describe_mfu(tokens / timing.median, config, device.peak_flops),
        **(describe_kernels(events) if device.type == "cuda" else {}),
    }


def describe_kernels(events: list[Any]) -> Row:
    """Return the launches of a step, and the kernels that take most of its time."""
    seconds: Counter[str] = Counter()
    for event in events:
        seconds[event.name] += 1e-6 * event.self_device_time_total
    calls = Counter(event.name for event in events)
    rows = [
        {"name": name, "calls": calls[name], "seconds": total}
        for name, total in seconds.most_common(SHOWN_KERNELS)
    ]
    return {"launches": len(events), "kernels": rows}


def describe_part(
    name: str, part: Timing, step_seconds: float, flops: int | None, device: Device
) -> Row:
    """Build a group's row: time, share of the step and, if `flops` is given, speed."""
    rate = flops / part.median if flops and part.median else None
    return {
        "name": name,
        "seconds": describe_seconds(part),
        "share": part.median / step_seconds,
        "flops": flops,
        "flops_per_second": rate,
        "share_of_peak": rate / device.peak_flops if rate and device.peak_flops else None,
    }


def profile_step(workload: Workload, trace: Path | None = None) -> list[Any]:
    """Profile one step; return torch's FunctionEvents, on CUDA only its kernels and copies.

    trace: file for a Chrome trace. Raises StorageError if it cannot be written.
    """
    with profile_kernels(workload.device) as profiler:
        with record_function("step"):  # time in it that is in no operation is spent in Python
            workload.step()
        workload.device.synchronize()
    if trace:
        write_trace(profiler, trace)
    return list_events(profiler, workload.device)


@contextmanager
def profile_kernels(device: Device, *, memory: bool = False) -> Iterator[profile]:
    """Profile what runs inside the context. memory: whether to record allocations."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with record_native_kernels(), profile(activities=activities, profile_memory=memory) as profiler:
        yield profiler


def write_trace(profiler: profile, trace: Path) -> None:
    """Write a Chrome trace. Raises StorageError if it cannot be written."""
    with storage_errors(trace.parent, what="cannot write trace", fix="choose --out"):
        trace.write_bytes(b"")  # the profiler does not report write errors
        profiler.export_chrome_trace(str(trace))


def list_events(profiler: profile, device: Device) -> list[Any]:
    """Return torch's FunctionEvents, on CUDA only its kernels and copies."""
    events: list[Any] = profiler.events()  # type: ignore[no-untyped-call]
    if device.type == "cuda":  # annotations contain the kernels of their block
        return [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    return [event for event in events if event.device_type.name == "CPU"]


@contextmanager
def record_native_kernels() -> Iterator[None]:
    """Show calls of native CPU kernels to the profiler as `native::NAME`."""
    call = Library.call

    def recorded(library: Library, name: str, *arguments: object) -> float:
        with record_function(f"native::{name}"):
            return call(library, name, *arguments)

    Library.call = recorded  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Library.call = call  # type: ignore[method-assign]


def find_group(event: Any, groups: dict[str, str] = GROUPS) -> str:
    """Return the group that an event's name matches, or else its closest caller's group."""
    while event is not None:
        for group, names in groups.items():
            if re.search(names, event.name):
                return group
        event = event.cpu_parent
    return "other"


def sum_groups(events: list[Any], *, on_cuda: bool) -> dict[str, float]:
    """Return the seconds in each group, summed over its events without their children."""
    groups = KERNELS if on_cuda else GROUPS
    seconds = dict.fromkeys([*groups, "other"], 0.0)
    for event in events:
        micros = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        seconds[find_group(event, groups)] += 1e-6 * micros
    return seconds


def show_parts(result: Row, device: Device, console: Console) -> None:
    """Print the seconds of each group of operations as a Markdown table, then tokens/s."""
    step_seconds = result["step_seconds"]["median"]
    remainder = "idle" if device.type == "cuda" else "rest of the step"
    totals = {
        "sum of parts": result["parts_seconds"],
        remainder: result["overhead_seconds"],
        "full step": step_seconds,
    }
    rows = list(result["parts"])
    for name, seconds in totals.items():
        rows.append({"name": name, "seconds": seconds, "share": seconds / step_seconds})
    rows[-1]["share_of_peak"] = result["mfu_causal"]
    columns = {
        "name": "part",
        "seconds": "time (low to high)",
        "share": "share of step",
        "flops_per_second": "FLOP/s",
        "share_of_peak": "share of peak",
    }
    show_rows(columns, rows, console)
    columns = {"name": "kernel", "calls": "calls", "seconds": "time"}
    show_rows(columns, result.get("kernels", []), console)
    line = f"{result['tokens_per_second']['median']:,.0f} tokens/s"
    if result["floor_tokens_per_second"]:
        line += (
            f"; {result['floor_tokens_per_second']:,.0f} with only products and attention, at peak"
        )
    console.print(line)
