"""The fastest micro-batch that fits in memory, measured on the model itself before the first step; and compilation.

Both run forward and backward only: gradients are thrown away; weights, optimizer state and random state stay.

A split model (sharded or tensor-parallel) does not survive an exception in its forward or backward: FSDP2 would reduce
no gradient from then on, and the other ranks wait in a collective. So on a split model nothing is tried that may fail:
memory is predicted, and the compiler is tried on a small model of this process alone. A whole model is tried without
its replicas, whose collectives a failure would leave waiting.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import MachineConfig
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm, peer_errors
from megatoken.distributed.env import DistEnv
from megatoken.errors import ConfigError, MegatokenError
from megatoken.model.dropout import sequence_keys
from megatoken.model.gpt import (
    GPT,
    get_activation_checkpointing,
    set_activation_checkpointing,
    set_attention,
)
from megatoken.system.device import Device, is_out_of_memory
from megatoken.system.malloc import return_freed_memory
from megatoken.system.measurement_cache import read_measurements, save_measurement
from megatoken.system.timing import time_once
from megatoken.system.torch_compat import uncompile
from megatoken.train.kernel_autotune import list_requests
from megatoken.train.state import StepConfig, TrainState
from megatoken.train.step import forward_backward

RATES = "micro_batches.json"  # in the cache
MAX_CPU_TOKENS = 8192  # products fill a CPU's caches before that; on a GPU memory decides
MARGIN = 1.02  # a size must be this much faster than a larger one, which accumulates gradients less often
SMALLER = "lower model.seq_len or the model's size, or set machine.activation_checkpointing=block"
REPEATS = 3  # of each size, the first of which warms up
LONG_SECONDS = 0.5  # on a CPU one repeat after the first is enough of what takes longer
MEMORY_SHARE = 0.95  # of the free memory that a split model's next size may be predicted to need: blocks leave gaps
GRADIENT_TOLERANCE = 1e-2  # between norms of the same gradient by one compiled function: some kernels add in any order


def find_rates(
    state: TrainState,
    step_config: StepConfig,
    machine: MachineConfig,
    device: Device,
    batch_seqs: int,
) -> tuple[dict[int, float], bool]:
    """`tune_micro_batch`, on a CPU by one process once for each width of models; whether it was measured before.

    Several sizes are often as fast as one another: measured anew, runs alike would differ in their bits, and in the
    memory that was planned for them.
    """
    if device.type != "cpu" or not state.comm.is_single_process:
        return tune_micro_batch(state, step_config, device, batch_seqs), False
    key = f"{describe_step(state.model.config, machine, device)}; {batch_seqs} sequences"
    kept = read_measurements(RATES).get(key)
    sizes = [
        str(size) for size in candidate_sizes(batch_seqs, state.model.config.seq_len, device.type)
    ]
    if (
        isinstance(kept, dict)
        and kept
        and all(isinstance(kept.get(size), float) for size in sizes[: len(kept)])
    ):
        return {int(size): kept[size] for size in sizes[: len(kept)]}, True
    rates = tune_micro_batch(state, step_config, device, batch_seqs)
    if len(rates) > 1:
        save_measurement(RATES, key, rates)
    return rates, False


def describe_step(model: ModelConfig, machine: MachineConfig, device: Device) -> str:
    """Everything that the speed of forward and backward depends on beside layers and micro-batch."""
    shape = {name: value for name, value in model.architecture().items() if name != "n_layer"}
    threads = f"{torch.get_num_threads()} threads, " if device.type == "cpu" else ""
    others = f"dropout {model.dropout}, recomputed {machine.activation_checkpointing}, chunks {machine.loss_chunk}"
    others += f", deterministic {machine.deterministic}, {list_requests(machine)}"
    return (
        f"{device.name}, {threads}{device.precision}, torch {torch.__version__}; {shape}, {others}"
    )


def tune_micro_batch(
    state: TrainState, step_config: StepConfig, device: Device, batch_seqs: int
) -> dict[int, float]:
    """Tokens/s by micro-batch size; 0 where there is only one candidate. All processes measure together.

    Sizes grow until memory ends, on a split model until it would, or two in a row were no faster. One that is less than
    half as fast as a smaller one is measured a second time: something else computed meanwhile. Raises ConfigError when
    not even one sequence fits; what a split model raises passes.
    """
    seq_len = state.model.config.seq_len
    sizes, is_split = candidate_sizes(batch_seqs, seq_len, device.type), not state.dims.is_unsharded
    if len(sizes) == 1:
        return {sizes[0]: 0.0}
    rates: dict[int, float] = {}
    slower_sizes = 0
    bytes_per_seq = 0.0  # of the size before
    for size in sizes:
        # No size needs more in proportion than a smaller one: each moment's memory is a constant and a part that grows.
        if is_split and state.comm.any(bytes_per_seq * size > MEMORY_SHARE * _free_bytes(device)):
            break
        best = max(rates.values(), default=0.0)
        sized = replace(step_config, micro_batch=size)
        rows = min(2 * size, batch_seqs)
        seconds, bytes_per_seq = _time_on_all(state, sized, device, rows)
        if seconds and rows * seq_len / seconds < best / 2:
            seconds = min(seconds, _time_on_all(state, sized, device, rows)[0] or seconds)
        if not seconds:
            break
        rates[size] = rows * seq_len / seconds
        slower_sizes = slower_sizes + 1 if rates[size] < MARGIN * best else 0
        if slower_sizes == 2:
            break
    if not rates:
        raise ConfigError("one sequence does not fit in memory", str(device.torch_device), SMALLER)
    return_freed_memory()
    return rates


def _time_on_all(
    state: TrainState, step_config: StepConfig, device: Device, rows: int
) -> tuple[float, float]:
    """(seconds of `rows` sequences, bytes that one of a micro-batch needed), the same seconds on all processes; 0
    seconds where one of them has no memory for it.
    """
    seconds = needed = 0.0
    try:
        with _without_replicas(state):
            seconds, needed = _time_forward_backward(state, step_config, device, rows)
    except (RuntimeError, MemoryError) as error:
        if not state.dims.is_unsharded or not is_out_of_memory(
            error
        ):  # other ranks of a split model see this one end
            raise
    _free_gradients(state, device)
    fits = not state.comm.any(not seconds)
    return state.comm.broadcast_from_rank0(
        seconds if fits else 0.0
    ), needed / step_config.micro_batch


@contextmanager
def _without_replicas(state: TrainState) -> Iterator[None]:
    """Context in which a whole model computes as if alone: what fails here leaves no other rank in a collective."""
    comm = state.comm
    if state.dims.is_unsharded:
        state.comm = Comm(DistEnv())
    try:
        yield
    finally:
        state.comm = comm


def _free_bytes(device: Device) -> float:
    """Memory that a GPU could still allocate; infinite elsewhere, where sizes are small."""
    return (
        torch.cuda.mem_get_info(device.torch_device)[0] if device.type == "cuda" else float("inf")
    )


def _time_forward_backward(
    state: TrainState, step_config: StepConfig, device: Device, rows: int
) -> tuple[float, int]:
    """Seconds of `rows` sequences, the best of `REPEATS`, and the bytes that they needed on a GPU beside what is there.

    rows: two micro-batches where a step has several: the second meets the gradients that the first has left.
    """
    config = state.model.config
    # Many different ids, as in text, without drawing from the random state.
    ids = (
        torch.arange(rows * config.seq_len, device=device.torch_device)
        .remainder(config.vocab_size)
        .view(rows, -1)
    )

    def run_once() -> None:
        forward_backward(state, step_config, device, Batch(ids, ids))
        state.optimizer.zero_grad(set_to_none=True)

    if device.type != "cuda":
        warm = time_once(run_once, device.synchronize)
        repeats = 1 if warm > LONG_SECONDS else REPEATS - 1
        return min(time_once(run_once, device.synchronize) for _ in range(repeats)), 0
    torch.cuda.reset_peak_memory_stats(device.torch_device)
    before = torch.cuda.memory_reserved(device.torch_device)
    seconds = min(time_once(run_once, device.synchronize) for _ in range(REPEATS))
    return seconds, torch.cuda.max_memory_reserved(device.torch_device) - before


def pick_micro_batch(rates: Mapping[int, float]) -> int:
    """The largest size that no smaller one beats by `MARGIN`."""
    best = max(rates.values())
    return max(size for size, rate in rates.items() if rate * MARGIN >= best)


def candidate_sizes(batch_seqs: int, seq_len: int, device_type: str) -> list[int]:
    """Divisors of the batch to try, ascending: each at least 1.5 times the one before."""
    largest = batch_seqs if device_type != "cpu" else max(1, MAX_CPU_TOKENS // seq_len)
    sizes: list[int] = []
    for size in range(1, min(batch_seqs, largest) + 1):
        if batch_seqs % size == 0 and (not sizes or size >= 1.5 * sizes[-1]):
            sizes.append(size)
    return sizes


def compile_forward(
    state: TrainState, step_config: StepConfig, device: Device, mode: str = "on"
) -> str:
    """Compile the compute model and run it; on failure leave it uncompiled on all processes and return the reason.

    mode: `on` the whole model, `blocks` one by one (they share what is compiled for the first), `graphs` the model into
    CUDA graphs. A split model is compiled by blocks, once those of a small one have worked. The run costs little: the
    first step would have compiled the same shapes. Raises ConfigError when only the split model fails.
    """
    shape = step_config.micro_batch, state.model.config.seq_len
    ids = torch.zeros(shape, dtype=torch.int64, device=device.torch_device)
    reason = ""
    try:
        with _without_replicas(state):
            if state.dims.is_unsharded:
                _compile_whole(state, step_config, device, ids, mode)
            else:
                _try_small_model(state.model, device, ids)
    except Exception as error:  # a compiler fails in as many ways as there are compilers
        if is_out_of_memory(error):
            raise
        reason = _first_line(error)
    if state.comm.any(bool(reason)):
        state.forward, state.cuda_graphs = state.compute_model, False
        uncompile(state.compute_model)
        reason = f"torch.compile failed, the model runs uncompiled: {reason or 'on another rank'}"
    elif not state.dims.is_unsharded:
        _compile_blocks(state.model)
        try:
            with peer_errors(state.comm.dist_env):
                forward_backward(state, step_config, device, Batch(ids, ids))
        except Exception as error:
            if isinstance(error, MegatokenError) or is_out_of_memory(error):
                raise
            what = f"torch.compile failed on the split model: {_first_line(error)}"
            raise ConfigError(what, f"rank {state.dims.rank}", "set machine.compile=off") from None
    _free_gradients(state, device)
    return reason


def _compile_whole(
    state: TrainState, step_config: StepConfig, device: Device, ids: Tensor, mode: str
) -> None:
    """Compile a model that is not split, and run it. Raises what the compiler raises."""
    if mode != "graphs":
        if mode == "blocks":
            _compile_blocks(state.compute_model)
        else:
            state.forward = torch.compile(state.compute_model)
        forward_backward(state, step_config, device, Batch(ids, ids))
        return
    state.cuda_graphs = True
    state.forward = torch.compile(state.compute_model, mode="reduce-overhead")
    ids = torch.cat(
        [ids, ids]
    )  # two micro-batches: the gradients of the first lie in the memory of the graphs
    norms = []
    for _ in range(3):  # compile, record, replay
        forward_backward(state, step_config, device, Batch(ids, ids))
        norms.append(float(state.sharded.global_grad_norm(state.comm)))
        state.optimizer.zero_grad(set_to_none=True)
    if not all(math.isclose(norm, norms[0], rel_tol=GRADIENT_TOLERANCE) for norm in norms):
        raise RuntimeError(
            f"CUDA graphs change the gradient: its norm was {', '.join(f'{n:.4g}' for n in norms)}"
        )


def _try_small_model(model: GPT, device: Device, ids: Tensor) -> None:
    """Compile and run one block like those of a split model, on this process alone. Raises what the compiler raises."""
    small = GPT(replace(model.config, n_layer=1, vocab_size=1), seed=None).to(
        device.torch_device, device.dtype
    )
    set_attention(small, model.attention_name)
    set_activation_checkpointing(small, get_activation_checkpointing(model))
    _compile_blocks(small)
    with device.autocast():
        keys = sequence_keys(
            0, 0, 0, len(ids), device.torch_device
        )  # leaves the random state alone
        small(ids, dropout_keys_B=keys).sum().backward()


def _compile_blocks(model: GPT) -> None:
    for block in model.blocks:
        block.compile()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _free_gradients(state: TrainState, device: Device) -> None:
    state.compute_model.zero_grad(set_to_none=True)
    state.optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
