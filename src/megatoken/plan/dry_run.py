"""Trace a training step of one process among many on fake tensors: memory and communication.

The model, sharding, step and optimizer are those of training, but the kernels are the default ones,
not those that a run would select. `auto` means bf16 for the precision, one sequence for the
micro-batch, and no sharding.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatoken.base.config.schema import Config
from megatoken.base.console import format_count, format_memory
from megatoken.base.errors import ConfigError
from megatoken.base.system.device import Device
from megatoken.base.system.torch_compat import FakeStore, FakeTensorMode
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm, ignore_view_warning
from megatoken.distributed.env import DistEnv
from megatoken.distributed.memory import USABLE, holds_low_precision
from megatoken.distributed.parallel_dims import build_dims, check_dims
from megatoken.model.gpt import GPT, Norm, set_activation_checkpointing
from megatoken.model.kernels.block import torch_norm
from megatoken.model.kernels.cross_entropy import OutputLayer
from megatoken.plan.memory_tracker import MemoryTracker
from megatoken.train.state import StepConfig, TrainState, build_state, build_step_config
from megatoken.train.step import train_step_async

PROCESSES_PER_MACHINE = 8
TRACED = 3  # micro-batches: the first, one in the middle, the last
EPOCH_TOKENS = 10**9  # for runs whose length is in epochs


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory of the first process, which has the largest share, and the layout of the step.

    total_bytes is the peak. activation_bytes is the part of the peak that is not parameters,
    gradients or optimizer state: activations, gathered weights and communication buffers. The four
    parts add up to the total if a step has several micro-batches. If it has only one, not all
    gradients exist at the peak, and the parts add up to more.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    total_bytes: int
    communication_bytes_per_step: int
    communication: dict[str, int]  # by collective
    processes: int
    shard: str  # none, zero1, zero2, zero3 or hybrid
    tensor_parallel: int
    readers: int  # data-parallel ranks
    micro_batch: int
    micro_steps: int  # micro-batches per step
    precision: str
    seconds: float  # of this dry run


def dry_run(config: Config, processes: int) -> Estimate:
    """Estimate one step on `processes` processes. Only the first is simulated.

    Raises ConfigError if the batch, the heads or the processes do not divide evenly.
    """
    start = time.perf_counter()
    with fake_process_group(processes), FakeTensorMode(), MemoryTracker() as tracker:
        state, step_config, device = build(config, processes)
        params = list(state.sharded.local_params.values())
        moments = [
            moment for moments in state.optimizer.state.values() for moment in moments.values()
        ]
        micro_steps = config.batch_seqs // state.dims.dp_size // step_config.micro_batch
        tracker.count_gradients = lambda: count_local_bytes(
            [param.grad for param in params if param.grad is not None]
        )
        sent = trace_step(state, step_config, device, tracker, micro_steps)
        parameter_bytes = count_local_bytes(params)
        optimizer_bytes = count_local_bytes(moments)
    state_bytes = parameter_bytes + optimizer_bytes + tracker.gradients_at_peak
    return Estimate(
        parameter_bytes=parameter_bytes,
        gradient_bytes=count_local_bytes(list(state.sharded.updated.values())),
        optimizer_bytes=optimizer_bytes,
        activation_bytes=tracker.peak_bytes - state_bytes,
        total_bytes=tracker.peak_bytes,
        communication_bytes_per_step=sent.total(),
        communication=dict(sent),
        processes=processes,
        shard=state.dims.sharding,
        tensor_parallel=state.dims.tp_size,
        readers=state.dims.dp_size,
        micro_batch=step_config.micro_batch,
        micro_steps=micro_steps,
        precision=device.precision,
        seconds=time.perf_counter() - start,
    )


@contextmanager
def fake_process_group(processes: int) -> Iterator[None]:
    """Open a process group whose collectives do nothing; none is needed for one process."""
    if processes > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        with ignore_view_warning():
            yield
    finally:
        if processes > 1:
            dist.destroy_process_group()


def build(config: Config, processes: int) -> tuple[TrainState, StepConfig, Device]:
    """Return the state, step settings and device of the first process, with fake tensors."""
    machine = config.machine
    precision = "bf16" if machine.precision == "auto" else machine.precision
    device = Device(
        torch_device=torch.device("cpu"),
        name="fake",
        precision=precision,
        peak_flops=0.0,
        peak_source="",
    )
    dist_env = DistEnv(world_size=processes, local_world_size=min(processes, PROCESSES_PER_MACHINE))
    sharding = "none" if machine.sharding == "auto" else machine.sharding
    dims = build_dims(sharding, machine.tensor_parallel, dist_env)
    check_dims(dims, config.model)
    micro_batch = 1 if machine.micro_batch == "auto" else machine.micro_batch
    seqs = config.batch_seqs // dims.dp_size
    if seqs % micro_batch:
        what = f"{seqs:,} sequences per rank do not divide into micro-batches of {micro_batch}"
        raise ConfigError(what, "machine.micro_batch", "use auto")
    comm = Comm(dist_env)
    state = build_state(GPT(config.model, seed=None), config, device, dims, comm=comm)
    is_low = holds_low_precision(machine, dims, precision)
    if machine.device != "cpu":
        if is_low:
            use_low_precision(state, device.dtype)
        # Like CUDA's kernel, save only the input.
        fused_norm = partial(checkpoint, torch_norm, use_reentrant=False)
        for part in state.compute.model.modules():
            if isinstance(part, Norm) and part.rms:
                part.kernels = replace(part.kernels, norm=fused_norm)
    state.scaler = torch.amp.GradScaler(enabled=False)  # it would read whether gradients overflow
    state.start_grad_reduction()
    step_config = build_step_config(
        config,
        epoch_tokens=EPOCH_TOKENS,
        micro_batch=micro_batch,
        device_type="cpu" if machine.device == "cpu" else "cuda",
        is_fused=is_low,
    )
    return state, step_config, device


class InPlaceLayer(OutputLayer):
    """An output layer whose softmax allocates only the losses, like a GPU's kernel."""

    softmax = staticmethod(lambda logits_NV, *_, **__: logits_NV[:, 0].float())


def use_low_precision(state: TrainState, dtype: torch.dtype) -> None:
    """Give the state master weights and the in-place loss of a GPU, without values."""
    torch.set_default_dtype(dtype)  # a fake model cannot be converted
    low = GPT(state.model.config, seed=None)
    torch.set_default_dtype(torch.float32)
    set_activation_checkpointing(low, state.model.activation_checkpointing)
    state.enable_master_weights(low)
    state.compute = replace(state.compute, output_layer=InPlaceLayer)


def trace_step(
    state: TrainState,
    step_config: StepConfig,
    device: Device,
    tracker: MemoryTracker,
    micro_steps: int,
) -> Counter[str]:
    """Run a step of at most TRACED micro-batches; return the bytes sent, by collective.

    The bytes are extrapolated to `micro_steps` micro-batches.
    """
    sent_before_forward: list[Counter[str]] = []
    forward = state.compute.forward

    def record_and_forward(ids: Tensor, **options: Tensor) -> Tensor:
        sent_before_forward.append(Counter(tracker.sent_bytes))
        return forward(ids, **options)

    state.compute = replace(state.compute, forward=record_and_forward)
    rows = min(micro_steps, TRACED) * step_config.micro_batch
    ids = torch.zeros(rows, state.model.config.seq_len, dtype=torch.int64)
    tracker.reset_peak()
    train_step_async(state, step_config, device, Batch(ids, ids))
    sent = tracker.sent_bytes
    if micro_steps > TRACED:  # micro-batches between the first and the last send the same
        for collective, size in (sent_before_forward[2] - sent_before_forward[1]).items():
            sent[collective] += size * (micro_steps - TRACED)
    return sent


def count_local_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the total bytes of the tensors' local storages, counting shared ones once."""
    sizes = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        sizes[id(storage)] = storage.nbytes()
    return sum(sizes.values())


def describe_estimate(estimate: Estimate) -> list[tuple[str, str]]:
    """Format an estimate as (name, value) rows: layout, step, memory by use, peak, communication.

    Uses of memory are sorted, largest first.
    """
    parts = {
        "parameters": estimate.parameter_bytes,
        "gradients": estimate.gradient_bytes,
        "optimizer": estimate.optimizer_bytes,
        "activations": estimate.activation_bytes,
    }
    step = format_count(estimate.micro_steps, "micro-batch", "micro-batches")
    step += f" of {estimate.micro_batch} on each of {estimate.readers:,} data-parallel ranks"
    rows = [
        ("layout", f"sharding {estimate.shard}, tensor parallel {estimate.tensor_parallel}"),
        ("step", f"{step}, {estimate.precision}"),
    ]
    for name, size in sorted(parts.items(), key=lambda part: -part[1]):
        share = size / estimate.total_bytes
        rows.append((name, f"{format_memory(size):>9} {share:5.0%}"))
    sent = f"{format_memory(estimate.communication_bytes_per_step):>9} per step"
    by_collective = [
        f"{name} {format_memory(size)}" for name, size in estimate.communication.items()
    ]
    if by_collective:
        sent += f": {', '.join(by_collective)} (rings)"
    peak = f"{format_memory(estimate.total_bytes):>9} allocated at once"
    return [*rows, ("peak", peak), ("sent", sent)]


def check_fit(estimate: Estimate, gpu: str, memory_bytes: float) -> tuple[bool, str]:
    """Return whether the step fits, and a line that says so, with advice if it does not."""
    usable = USABLE * memory_bytes
    share = f"{estimate.total_bytes / usable:.0%} of {format_memory(usable)} usable on {gpu}"
    if estimate.total_bytes <= usable:
        return True, f"fits: {share}"
    advice = f"--gpus {2 * estimate.processes} halves the state"
    if estimate.tensor_parallel < PROCESSES_PER_MACHINE:
        advice = f"--tp {2 * estimate.tensor_parallel} halves every layer"
    return False, f"does not fit: {share}; {advice}, or leave the layout to the plan"
