"""`python -m benchmarks batch`: tokens/s, MFU and peak memory of a training step by micro-batch
size.

The micro-batch size doubles until memory runs out. All sizes are timed in interleaved rounds.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.arguments import SPEED
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console, format_memory
from megatoken.base.errors import ConfigError
from megatoken.base.markdown_table import show_rows
from megatoken.base.system.device import Device, open_device
from megatoken.base.system.machine import free_memory_bytes
from megatoken.base.system.metrics_log import Row
from megatoken.base.system.timing import Timing, time_calls
from megatoken.distributed.memory import estimate_memory
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.model.flops import count_parameters, describe_mfu, flops_per_token
from megatoken.model.memory import FP32, LOSS_CHUNK
from megatoken.plan.tuning.peak import with_peak
from megatoken.study.bench.workload import (
    Workload,
    build_workload,
    describe_peak,
    describe_seconds,
    format_peak,
)

SHARE = 0.8  # share of the free memory that a benchmark may use
LONGEST_SECONDS = 20.0  # per size; sizes that take longer get fewer repeats, at least 3
LARGEST_CPU_TOKENS = 8192  # larger matmuls are not faster, and a step would take a minute
MOST_SEQS = 1 << 14
COLUMNS = {
    "name": "step",
    "parameters": "parameters",
    "seq_len": "context",
    "batch_tokens": "tokens",
    "flops_per_token": "FLOPs/token",
    "seconds_per_token": "time/token",
    **SPEED,
}


def run_batch(options: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Measure micro-batches of 1, 2, 4, ... sequences; yield the result for the record.

    Raises ConfigError if a single sequence does not fit in memory.
    """
    device = with_peak(open_device(MachineConfig(device=options.device)))
    preset = PRESETS[options.preset]
    config = replace(preset, seq_len=options.seq_len or preset.seq_len)
    fitting = MOST_SEQS if device.type == "cuda" else max(1, LARGEST_CPU_TOKENS // config.seq_len)
    largest = options.largest or fitting
    needed = estimate_step_bytes(config, config.seq_len)
    if needed > find_allowed_bytes(device):
        what = f"one sequence needs about {format_memory(needed)}"
        raise ConfigError(what, "--seq-len", "use a smaller one, or a smaller preset")
    machine = MachineConfig(device=str(device.torch_device), compile="off")
    workload = build_workload(config, machine, batch_seqs=1, micro_batch=1)
    rows, ended = measure(workload, device, largest, options.repeats, console)
    if not rows:
        raise ConfigError(ended, "--seq-len", "use a smaller one, or a smaller preset")
    console.print(f"{options.preset} at {config.seq_len}, {format_peak(device)}; ended at {ended}")
    show_rows(COLUMNS, rows, console)
    yield {
        **describe_peak(device),
        "preset": options.preset,
        "seq_len": config.seq_len,
        "rows": rows,
        "ended": ended,
    }


def measure(
    workload: Workload, device: Device, largest: int, repeats: int, console: Console
) -> tuple[list[Row], str]:
    """Time steps on 1, 2, 4, ... sequences, at most `largest`.

    Return a row for each size, and the reason why no larger size was measured.
    """
    config = workload.state.model.config
    calls: dict[str, Callable[[], object]] = {}
    memory: list[dict[str, int | None]] = []
    ended = f"--largest {largest}"
    for power in range(largest.bit_length()):
        seqs = 1 << power
        console.step(f"micro-batch {seqs}: first step")
        needed = estimate_step_bytes(config, seqs * config.seq_len)
        if needed > find_allowed_bytes(device):
            ended = f"micro-batch {seqs}, which needs about {format_memory(needed)}"
            break
        device.reset_peak_memory()
        idle_bytes = device.peak_memory_bytes()
        step = resize(workload, seqs).step
        try:
            step()
            device.synchronize()
        except torch.OutOfMemoryError:
            ended = f"out of memory at micro-batch {seqs}"
            break
        calls[str(seqs)] = step
        peak = device.peak_memory_bytes()
        extra = peak - idle_bytes if device.type == "cuda" else None
        memory.append({"peak_memory_bytes": peak, "extra_memory_bytes": extra})
    longest = LONGEST_SECONDS * len(calls)
    timings = {}
    if calls:
        timings = time_calls(
            calls, repeats=repeats, longest=longest, synchronize=device.synchronize
        )
    console.close()
    rows = [
        describe_size(workload, device, int(seqs), timing) | memory_use
        for (seqs, timing), memory_use in zip(timings.items(), memory, strict=True)
    ]
    return rows, ended


def describe_size(workload: Workload, device: Device, seqs: int, timing: Timing) -> Row:
    """Build the record's row for one micro-batch size."""
    config = workload.state.model.config
    tokens = seqs * config.seq_len
    return {
        "name": f"micro-batch {seqs}",
        "sweep": "batch",
        "n_layer": config.n_layer,
        "d_model": config.d_model,
        "seq_len": config.seq_len,
        "micro_batch": seqs,
        "batch_tokens": tokens,
        "parameters": count_parameters(config),
        "flops_per_token": flops_per_token(config, causal=False),
        "flops_per_token_causal": flops_per_token(config, causal=True),
        "seconds": describe_seconds(timing),
        "tokens_per_second": timing.rate(tokens),
        "best": tokens / timing.best,
        "skipped": None,
        **describe_mfu(tokens / timing.median, config, device.peak_flops),
        "seconds_per_token": timing.median / tokens,
    }


def resize(workload: Workload, micro_batch: int) -> Workload:
    """Return a workload with `micro_batch` sequences per batch, in one micro-batch."""
    tokens = micro_batch * workload.state.model.config.seq_len
    step_config = replace(workload.step_config, batch_tokens=tokens, micro_batch=micro_batch)
    return replace(workload, step_config=step_config)


def find_allowed_bytes(device: Device) -> float:
    """Return how much memory a benchmark may use without swapping; infinity on CUDA."""
    return math.inf if device.type == "cuda" else SHARE * (free_memory_bytes() or math.inf)


def estimate_step_bytes(model_config: ModelConfig, tokens: int) -> float:
    """Return a high estimate of the peak memory of an fp32 step with a micro-batch of `tokens`.

    It includes the attention weights, which fused attention does not store.
    """
    memory = estimate_memory(
        model_config,
        ParallelDims(),
        precision="fp32",
        micro_batch=tokens // model_config.seq_len,
        accumulates=True,
        loss_chunk=LOSS_CHUNK["cpu"],
    )
    weights = model_config.n_layer * tokens * model_config.n_head * model_config.seq_len / 2
    return memory.total_bytes + FP32 * weights
