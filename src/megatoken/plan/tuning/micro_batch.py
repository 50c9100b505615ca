"""Find the fastest micro-batch that fits in memory, by timing the model before the first step.

Only forward and backward run, and their gradients are discarded: weights, optimizer state and
random state do not change.

A sharded model cannot recover from an out-of-memory error in its forward or backward: FSDP2 would
no longer reduce gradients, and other ranks would wait in a collective. So the memory of each size
is predicted from the previous one before it is tried.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from megatoken.base.errors import ConfigError
from megatoken.base.system.device import Device, is_out_of_memory
from megatoken.base.system.malloc import return_freed_memory
from megatoken.base.system.measurement_cache import read_measurements, save_measurement
from megatoken.base.system.timing import time_once
from megatoken.base.system.torch_compat import is_compiler_error
from megatoken.data.dataloader import Batch
from megatoken.plan.tuning.compilation import compile_forward, free_gradients, without_replicas
from megatoken.train.state import StepConfig, TrainState
from megatoken.train.step import forward_backward

RATES = "micro_batches.json"  # file in the measurement cache
MAX_CPU_TOKENS = 8192  # fewer already fill a CPU's caches; on a GPU, memory is the limit
MARGIN = 1.02  # factor by which a smaller size must be faster; a larger one accumulates less often
SMALLER = "lower model.seq_len or the model's size, or set machine.activation_checkpointing=block"
REPEATS = 3  # runs of each size; the first warms up
LONG_SECONDS = 0.5  # after a longer first run, one more is enough on a CPU
MEMORY_SHARE = 0.95  # share of free memory that a sharded model may use, because of fragmentation


def find_rates(
    state: TrainState, step_config: StepConfig, device: Device, batch_seqs: int, mode: str, key: str
) -> dict[int, float]:
    """Return tokens/s by micro-batch size, from the cache if they were measured under this key.

    Only a single process on a CPU uses the cache. There several sizes are often equally fast, so
    without it two identical runs could choose different sizes and round differently. Models that
    differ only in depth share a cache entry.
    """
    if device.type != "cpu" or not state.comm.is_single_process:
        return tune_micro_batch(state, step_config, device, batch_seqs, mode)
    cached = read_measurements(RATES).get(key)
    if cached:
        return {int(size): rate for size, rate in cached.items()}
    rates = tune_micro_batch(state, step_config, device, batch_seqs, mode)
    if len(rates) > 1:
        save_measurement(RATES, key, rates)
    return rates


def tune_micro_batch(
    state: TrainState, step_config: StepConfig, device: Device, batch_seqs: int, mode: str = "off"
) -> dict[int, float]:
    """Time growing micro-batch sizes and return tokens/s by size. All ranks must call it.

    It stops after a size that runs out of memory, or after two sizes in a row that are no faster
    than the best so far. For a sharded model, it stops before a size that is predicted not to fit,
    and an out-of-memory error is not caught. A size that reaches less than half the best rate is
    timed twice, because the machine may have been busy. If there is only one size to try, it is not
    timed and its rate is 0. Raises ConfigError if not even one sequence fits.

    mode: how the run compiles. With `blocks`, each size is timed compiled. Other modes, which would
        compile the full model for each size, are timed uncompiled.
    """
    seq_len = state.model.config.seq_len
    sizes = candidate_sizes(batch_seqs, seq_len, device.type)
    if len(sizes) == 1:
        return {sizes[0]: 0.0}
    is_split = not state.dims.is_unsharded
    rates: dict[int, float] = {}
    n_slower = 0
    bytes_per_seq = 0.0  # of the previous size
    if mode == "blocks":  # a failure is reported when the run compiles for the chosen size
        compile_forward(state, replace(step_config, micro_batch=sizes[0]), device, mode)
    for size in sizes:
        # An upper bound: part of the measured memory does not grow with the size.
        if is_split and state.comm.any(bytes_per_seq * size > MEMORY_SHARE * _free_bytes(device)):
            break
        if rates and mode == "blocks":
            torch.compiler.reset()  # code for every size would reach the compiler's limit
        best = max(rates.values(), default=0.0)
        sized = replace(step_config, micro_batch=size)
        rows = min(2 * size, batch_seqs)
        seconds, bytes_per_seq = _time_on_all(state, sized, device, rows)
        if seconds and rows * seq_len / seconds < best / 2:
            seconds = min(seconds, _time_on_all(state, sized, device, rows)[0] or seconds)
        if not seconds:
            break
        rates[size] = rows * seq_len / seconds
        n_slower = n_slower + 1 if rates[size] < MARGIN * best else 0
        if n_slower == 2:
            break
    if not rates:
        raise ConfigError("one sequence does not fit in memory", str(device.torch_device), SMALLER)
    return_freed_memory()
    return rates


def _time_on_all(
    state: TrainState, step_config: StepConfig, device: Device, rows: int
) -> tuple[float, float]:
    """Time `rows` sequences on all ranks; return rank 0's seconds, and bytes per sequence.

    The seconds are 0 on all ranks if any rank runs out of memory or fails to compile. The bytes are
    measured on this rank.
    """
    seconds = needed = 0.0
    try:
        seconds, needed = _time_forward_backward(without_replicas(state), step_config, device, rows)
    except (RuntimeError, MemoryError) as error:
        # With a sharded model this rank must end, or others would wait for it in a collective.
        if not state.dims.is_unsharded or not (is_out_of_memory(error) or is_compiler_error(error)):
            raise
    free_gradients(state, device)
    if state.comm.any(not seconds):
        seconds = 0.0
    return state.comm.broadcast_from_rank0(seconds), needed / step_config.micro_batch


def _free_bytes(device: Device) -> float:
    """Return the memory that a GPU can still allocate; infinite on other devices."""
    if device.type != "cuda":
        return float("inf")
    return torch.cuda.mem_get_info(device.torch_device)[0]


def _time_forward_backward(
    state: TrainState, step_config: StepConfig, device: Device, rows: int
) -> tuple[float, int]:
    """Return the best time in seconds for `rows` sequences, and the bytes allocated for it.

    The bytes are 0 except on CUDA.

    rows: two micro-batches if the batch is large enough, so that the time includes accumulation.
    """
    config = state.model.config
    # Many different ids, as in text, without drawing from the random state.
    ids = torch.arange(rows * config.seq_len, device=device.torch_device)
    ids = ids.remainder(config.vocab_size).view(rows, -1)

    def run_once() -> None:
        forward_backward(state, step_config, device, Batch(ids, ids))
        state.zero_grad()

    if device.type != "cuda":
        warm = time_once(run_once, device.synchronize)
        repeats = 1 if warm > LONG_SECONDS else REPEATS - 1
        return min(time_once(run_once, device.synchronize) for _ in range(repeats)), 0
    torch.cuda.reset_peak_memory_stats(device.torch_device)
    reserved = torch.cuda.memory_reserved(device.torch_device)
    seconds = min(time_once(run_once, device.synchronize) for _ in range(REPEATS))
    return seconds, torch.cuda.max_memory_reserved(device.torch_device) - reserved


def pick_micro_batch(rates: Mapping[int, float]) -> int:
    """Return the largest size whose rate is within the factor MARGIN of the best one."""
    best = max(rates.values())
    return max(size for size, rate in rates.items() if rate * MARGIN >= best)


def candidate_sizes(batch_seqs: int, seq_len: int, device_type: str) -> list[int]:
    """Return the micro-batch sizes to try, ascending, each at least 1.5 times the previous one.

    Every size divides `batch_seqs`, the number of sequences in a step on this rank.
    """
    largest = batch_seqs if device_type != "cpu" else max(1, MAX_CPU_TOKENS // seq_len)
    sizes: list[int] = []
    for size in range(1, min(batch_seqs, largest) + 1):
        if batch_seqs % size == 0 and (not sizes or size >= 1.5 * sizes[-1]):
            sizes.append(size)
    return sizes
