"""`bench parts`: where the time of one real training step goes, for any model in any precision, by torch.profiler.

Every operation counts for one group by its name, else by that of the operation that calls it; additions, copies and
Python are other. On CUDA the times are of kernels, and what they leave of the step is idle; elsewhere they include the
profiler itself.
"""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from megatoken.bench.report import show_rows
from megatoken.bench.workload import (
    Workload,
    build_workload,
    count_seqs,
    describe_mfu,
    describe_peak,
    describe_seconds,
    format_peak,
)
from megatoken.config.presets import PRESETS
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.model.flops import count_matmul_parameters, flops_per_token
from megatoken.native.library import Library
from megatoken.system.atomic_write import storage_errors
from megatoken.system.device import Device, with_peak
from megatoken.system.timing import Timing, time_once

GROUPS = {  # by the name of an operation, forward or backward; the first that fits
    "matrix products": re.compile(
        r"native::matmul|aten::(linear|matmul|addmm_?|mm|_scaled_mm)$|mkldnn.*linear|Addmm|MmBackward0"
    ),
    "loss": re.compile(r"cross_?entropy|log_softmax|nll_loss", re.IGNORECASE),
    "attention": re.compile(r"attention|aten::baddbmm|aten::bmm|softmax"),
    "norm": re.compile(r"native::norm|layer_?norm|rms_?norm|rsqrt", re.IGNORECASE),
    "activation": re.compile(r"gelu|silu|swiglu", re.IGNORECASE),
    "optimizer": re.compile(r"adam|_foreach_|^Optimizer|native::sum_of_squares", re.IGNORECASE),
}
LONGEST_SECONDS = 120.0  # for all repeats; there are fewer, but three, where a step takes long


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Profile a preset's step. Raises ConfigError for a batch that is not whole sequences."""
    model_config = PRESETS[options.preset]
    model_config = replace(
        model_config, seq_len=options.seq_len or min(model_config.seq_len, options.batch_tokens)
    )
    seqs = count_seqs(options.batch_tokens, model_config.seq_len)
    machine = MachineConfig(device=options.device, precision=options.precision)
    workload = build_workload(model_config, machine, batch_seqs=seqs, micro_batch=seqs)
    device = with_peak(workload.device)
    console.print(
        f"a step of {options.preset}, {seqs} x {model_config.seq_len} tokens, {format_peak(device)}"
    )
    trace = options.out / "trace.json" if options.trace else None
    answer = measure(workload, device, options.repeats, console, trace)
    show_parts(answer, device, console)
    sizes = {
        "preset": options.preset,
        "seq_len": model_config.seq_len,
        "batch_tokens": options.batch_tokens,
    }
    return {**describe_peak(device), **sizes, "forms": str(workload.choice), **answer}


def measure(
    workload: Workload, device: Device, repeats: int, console: Console, trace: Path | None = None
) -> dict[str, Any]:
    """Profile steps and time steps without the profiler in turn; return the parts and the whole as a record has them.

    trace: file for a Chrome trace of the last profiled step.
    """
    config, tokens = workload.model_config, workload.step_config.batch_tokens
    seconds: list[float] = []
    profiles: list[dict[str, float]] = []
    workload.step()
    once = time_once(workload.step, device.synchronize)
    for number in range(min(repeats, max(3, int(LONGEST_SECONDS / (3 * once))))):
        console.step(f"round {number + 1}")
        seconds.append(time_once(workload.step, device.synchronize))
        profiles.append(sum_groups(profile_step(workload, trace), on_cuda=device.type == "cuda"))
    console.close()
    timing = Timing(tuple(seconds))
    products = 6 * count_matmul_parameters(config) * tokens
    flops = {
        "matrix products": products,
        "attention": flops_per_token(config, causal=True) * tokens - products,
    }
    parts: list[dict[str, Any]] = []
    for name in [*GROUPS, "other"]:
        part = Timing(tuple(groups[name] for groups in profiles))
        rate = flops[name] / part.median if name in flops and part.median else None
        share = rate / device.peak_flops if rate and device.peak_flops else None
        row = {
            "name": name,
            "seconds": describe_seconds(part),
            "share": part.median / timing.median,
        }
        parts.append(
            {**row, "flops": flops.get(name), "flops_per_second": rate, "share_of_peak": share}
        )
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
        **describe_mfu(tokens / timing.median, config, device),
    }


def profile_step(workload: Workload, trace: Path | None = None) -> list[Any]:
    """torch's FunctionEvents on the host during one step. Raises StorageError for a trace not written."""
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if workload.device.type == "cuda" else []),
    ]
    with record_native_kernels(), profile(activities=activities) as profiler:
        with record_function("step"):  # what no operation takes is Python's
            workload.step()
        workload.device.synchronize()
    if trace:
        with storage_errors(trace.parent, what="cannot write trace", fix="choose --out"):
            trace.write_bytes(
                b""
            )  # the profiler does not report a folder that cannot be written to
            profiler.export_chrome_trace(str(trace))
    return [event for event in profiler.events() if event.device_type.name == "CPU"]


@contextmanager
def record_native_kernels() -> Iterator[None]:
    """Show our own kernels for CPUs, which torch knows nothing of, to the profiler as `native::NAME`."""
    call = Library.call

    def recorded(library: Library, name: str, *arguments: object) -> float:
        with record_function(f"native::{name}"):
            return call(library, name, *arguments)

    Library.call = recorded  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Library.call = call  # type: ignore[method-assign]


def find_group(event: Any) -> str:
    """The group of an operation: that of its own name, else of the operation that calls it."""
    while event is not None:
        for group, names in GROUPS.items():
            if names.search(event.name):
                return group
        event = event.cpu_parent
    return "other"


def sum_groups(events: list[Any], *, on_cuda: bool) -> dict[str, float]:
    """Seconds of each group: the time of every event, without its children's, counts for one."""
    seconds = dict.fromkeys([*GROUPS, "other"], 0.0)
    for event in events:
        seconds[find_group(event)] += 1e-6 * (
            event.self_device_time_total if on_cuda else event.self_cpu_time_total
        )
    return seconds


def show_parts(answer: dict[str, Any], device: Device, console: Console) -> None:
    """Print the budget as a Markdown table."""
    whole = answer["step_seconds"]["median"]
    rest = "idle" if device.type == "cuda" else "step without profiler - parts"
    sums = {
        "sum of parts": answer["parts_seconds"],
        rest: answer["overhead_seconds"],
        "whole step": whole,
    }
    rows = [
        *answer["parts"],
        *({"name": name, "seconds": s, "share": s / whole} for name, s in sums.items()),
    ]
    rows[-1]["share_of_peak"] = answer["mfu_causal"]
    heads = {
        "name": "part",
        "seconds": "time (low to high)",
        "share": "share of step",
        "flops_per_second": "FLOP/s",
    }
    show_rows(heads | {"share_of_peak": "share of peak"}, rows, console)
    speed, limit = answer["tokens_per_second"]["median"], answer["floor_tokens_per_second"]
    ideal = (
        f"; {limit:,.0f} if products and attention ran at the peak and the rest took no time"
        if limit
        else ""
    )
    console.print(f"{speed:,.0f} tokens/s{ideal}")
