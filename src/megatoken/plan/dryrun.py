"""A dry run: one step of one process among thousands, with the real model and the real sharding, and nothing computed.

In: a checked run and a number of processes. Out: what one process holds and sends. Tensors are fake (they have shapes
and storages, no contents), the process group is fake (it answers at once), everything else is what training runs: the
same model, sharding, step and optimizer. Absent: time, and what plan/watch.py cannot see.

Forms of operations are the plain ones; `auto` precision is bf16, `auto` micro-batch one sequence.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatoken.config import Run, nearest_multiples
from megatoken.device import Device
from megatoken.errors import Exit, Fault
from megatoken.model.count import state_bytes
from megatoken.model.gpt import GPT
from megatoken.parallel.layout import check_layout, choose_kind, lay_out
from megatoken.parallel.ranks import Ranks
from megatoken.parallel.topology import Topology
from megatoken.plan.watch import Watch
from megatoken.presets import Shape
from megatoken.train.state import Plan, State, build_plan, build_state
from megatoken.train.step import launch_step

MACHINE = 8  # processes on a machine, for what depends on it
TRACED = 3  # micro-batches: the first, one of those between, the last
SOME_TOKENS = 10**9  # of an epoch, for runs whose length is given in epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes of one process (the first, which has the largest share), and how its step is cut.

    total_bytes is the most at one moment, activation_bytes what of it is neither parameters, gradients nor optimizer
    state: activations, gathered weights, buffers under way. With one micro-batch a step not all gradients live at that
    moment; with more the four sum to the total.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    total_bytes: int
    communication_bytes_per_step: int
    communication: dict[str, int]  # the same by kind of collective
    processes: int
    shard: str  # none, zero1, zero2, zero3 or hybrid
    tensor_parallel: int
    readers: int  # processes, or groups of them, that read different data
    micro_batch: int
    micro_steps: int  # micro-batches a step
    precision: str
    seconds: float  # of this dry run


def dry_run(run: Run, shape: Shape, processes: int, memory_bytes: float) -> Estimate:
    """One step of `run` on `processes`, of which only the first exists.

    memory_bytes: of one, which decides where `machine.shard` is left to auto. Raises Fault(CONFIG) when the batch, the
    heads or the processes do not divide.
    """
    if processes < 1:
        raise Fault(Exit.CONFIG, f"{processes} GPUs", "--gpus", "give one or more")
    began = time.perf_counter()
    with fake_world(processes), FakeTensorMode(), Watch() as watch:
        state, plan, device = build(run, shape, processes, memory_bytes)
        parameters = list(state.placement.kept.values())
        moments = [moment for kept in state.optimizer.state.values() for moment in kept.values()]
        readers = state.layout.readers
        micro_steps = run.batch_seqs // readers // plan.micro_batch
        watch.count_gradients = lambda: count_local([p.grad for p in parameters if p.grad is not None])
        gradient_bytes, sent = trace(state, plan, device, watch, micro_steps)
        parameter_bytes, optimizer_bytes = count_local(parameters), count_local(moments)
    return Estimate(
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        activation_bytes=watch.peak_bytes - parameter_bytes - optimizer_bytes - watch.gradients_at_peak,
        total_bytes=watch.peak_bytes,
        communication_bytes_per_step=sent.total(),
        communication=dict(sent),
        processes=processes,
        shard=state.layout.kind,
        tensor_parallel=state.layout.tensor,
        readers=readers,
        micro_batch=plan.micro_batch,
        micro_steps=micro_steps,
        precision=device.precision,
        seconds=time.perf_counter() - began,
    )


@contextmanager
def fake_world(processes: int) -> Iterator[None]:
    """A process group in which every collective returns at once; none for a single process."""
    if processes == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(run: Run, shape: Shape, processes: int, memory_bytes: float) -> tuple[State, Plan, Device]:
    """What training would build in its first process, on fake tensors."""
    precision = "bf16" if run.machine.precision == "auto" else run.machine.precision
    device = Device(place=torch.device("cpu"), name="fake", precision=precision, peak_flops=0.0, peak_source="")
    size = {"world_size": processes, "local_world_size": min(processes, MACHINE)}
    tensor = run.machine.tensor_parallel
    parameters = state_bytes(shape) // 12
    kind = choose_kind(run.machine.shard, tensor, parameters, precision, int(memory_bytes), **size)
    layout = lay_out(kind, tensor, **size)
    check_layout(layout, shape)
    micro_batch = 1 if run.machine.micro_batch == "auto" else run.machine.micro_batch
    check_batch(run.batch_seqs, layout.readers, micro_batch)
    model = GPT(shape, dropout=run.model.dropout)
    model.to = lambda _: model  # type: ignore[method-assign,assignment]  # it is there; fake tensors refuse to be moved
    state = build_state(model, run, device, layout)
    state.share(Ranks(Topology(world_size=processes)))
    kind = "cpu" if run.machine.device == "cpu" else "cuda"
    return state, build_plan(run, epoch_tokens=SOME_TOKENS, micro_batch=micro_batch, kind=kind), device


def check_batch(batch_seqs: int, readers: int, micro_batch: int) -> None:
    """Raise Fault(CONFIG) unless the batch divides among those who read it, and their share into micro-batches."""
    for divisor, whose in ((readers, "readers"), (readers * micro_batch, "readers and their micro-batches")):
        if batch_seqs % divisor:
            what = f"a batch of {batch_seqs:,} sequences does not divide among {divisor:,} {whose}"
            near = ", ".join(f"{seqs:,}" for seqs in nearest_multiples(batch_seqs, divisor))
            raise Fault(Exit.CONFIG, what, "budget.batch_tokens", f"nearest numbers of sequences: {near}")


def trace(state: State, plan: Plan, device: Device, watch: Watch, micro_steps: int) -> tuple[int, Counter[str]]:
    """Take one step; return bytes of all gradients, and bytes sent by kind of collective.

    At most TRACED micro-batches are run: those between the first and the last send alike.
    """
    at_forward: list[Counter[str]] = []
    gradients: list[int] = []
    forward = state.forward

    def mark_forward(ids: Tensor) -> Tensor:
        at_forward.append(Counter(watch.sent_bytes))
        return forward(ids)

    state.forward = mark_forward
    state.optimizer.register_step_pre_hook(lambda *_: gradients.append(watch.count_gradients()))
    rows = min(micro_steps, TRACED) * plan.micro_batch
    ids = torch.zeros(rows, state.model.shape.seq_len, dtype=torch.int64)
    watch.forget_peak()
    launch_step(state, plan, device, ids, ids)
    sent = watch.sent_bytes
    if micro_steps > TRACED:
        for kind, amount in (at_forward[2] - at_forward[1]).items():
            sent[kind] += amount * (micro_steps - TRACED)
    return gradients[0], sent


def count_local(tensors: Sequence[Tensor]) -> int:
    """Bytes that this process holds of `tensors`; storages that they share count once."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())
