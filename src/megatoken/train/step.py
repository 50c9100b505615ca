"""One optimizer step: micro-batches forward and backward, clip, update.

In: state, the global batch. Out: a Flight whose numbers stay on the device until somebody reads them, so that a step
never makes the host wait. The gradient is that of the mean over the whole batch: each micro-batch contributes its sum
over the batch's count, so any split into micro-batches gives the same step.

Numbers that are not finite never reach the weights: the device itself leaves out that update and every later one, and
whoever reads next is told which step it was. Forms of AdamW that cannot do that are checked by the host at every step.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatoken.device import Device
from megatoken.errors import Exit, Fault
from megatoken.model.loss import cross_entropy
from megatoken.parallel.order import HalvesSum
from megatoken.parallel.tensor import gather_unembedding, slice_sequence
from megatoken.train.state import Plan, State

SMALLEST_SCALE = 2.0**-10  # of an fp16 loss: whoever overflows below it is not finite at any scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one step found out: mean loss of the global batch (nats), gradient norm before clipping, its rate."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step that was launched. numbers: loss, gradient norm, whether it or one before it was not finite: on the
    device."""

    step: int
    lr: float
    skipped: bool
    numbers: Tensor


def train_step(state: State, plan: Plan, device: Device, inputs_BT: Tensor, targets_BT: Tensor) -> Report:
    """Train on one global batch, advance `state.step` and wait for the numbers.

    Under fp16 a step whose gradients overflow is skipped and the scale lowered (`skipped`), as the scaler prescribes.
    Raises Fault(NUMERICS) when loss or gradients are not finite otherwise: weights stay as they were.
    """
    return land(state, [launch_step(state, plan, device, inputs_BT, targets_BT)])[0]


def launch_step(state: State, plan: Plan, device: Device, inputs_BT: Tensor, targets_BT: Tensor) -> Flight:
    """As `train_step`, without waiting where the device watches its numbers itself."""
    lr = plan.schedule.lr(state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    loss = accumulate_gradients(state, plan, device, inputs_BT, targets_BT)
    state.scaler.unscale_(state.optimizer)
    if state.scaler.is_enabled() and not state.layout.is_whole:
        for found in state.scaler._found_inf_per_device(state.optimizer).values():
            state.ranks.sum(found)
    parameters = [kept for kept in state.placement.kept.values() if kept.grad is not None]
    norm = state.placement.find_norm(state.ranks)
    skipped = False
    if state.watches_itself:
        state.trouble.logical_or_(~torch.isfinite(loss + norm))
        update_watched(state, plan.clip, norm)
    else:
        skipped = update_checked(state, plan.clip, parameters, loss, norm)
    state.optimizer.zero_grad(set_to_none=True)
    if state.has_masters:
        state.spread_weights()
    state.step += 1
    return Flight(step=state.step, lr=lr, skipped=skipped, numbers=torch.stack([loss, norm, state.trouble.float()]))


def update_watched(state: State, clip: float, norm: Tensor) -> None:
    """Clip and update in one pass over the gradients, unless there was trouble; nothing is read by the host.

    torch's fused AdamW divides gradients by `grad_scale` and leaves everything as it is where `found_inf` is 1.
    """
    optimizer: Any = state.optimizer  # both are attributes that a GradScaler would set
    optimizer.found_inf = state.trouble.float()
    # torch.nn.utils.clip_grad_norm_ multiplies by min(1, clip / (norm + 1e-6)).
    optimizer.grad_scale = ((norm + 1e-6) / clip).clamp(min=1.0) if clip else None
    optimizer.step()


def update_checked(state: State, clip: float, parameters: Sequence[Tensor], loss: Tensor, norm: Tensor) -> bool:
    """Clip and update if all is finite; return whether the scaler skipped it. Raises Fault(NUMERICS) before."""
    if clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    finite = math.isfinite(loss) and math.isfinite(norm)
    if not finite and not (state.scaler.is_enabled() and math.isfinite(loss)):
        raise _not_finite(state.step + 1, float(loss), float(norm))
    state.scaler.step(state.optimizer)
    state.scaler.update()
    if not finite and state.scaler.get_scale() < SMALLEST_SCALE:
        raise _not_finite(state.step + 1, float(loss), float(norm))
    return not finite


def land(state: State, flights: Sequence[Flight]) -> list[Report]:
    """Wait for launched steps, in order, and read all their numbers at once.

    Raises Fault(NUMERICS) naming the first that was not finite; weights and `state.step` are those before it.
    """
    rows = torch.stack([flight.numbers for flight in flights]).tolist()
    reports = []
    for flight, (loss, norm, trouble) in zip(flights, rows, strict=True):
        if trouble:
            state.step = flight.step - 1
            raise _not_finite(flight.step, loss, norm)
        reports.append(Report(step=flight.step, loss=loss, grad_norm=norm, lr=flight.lr, skipped=flight.skipped))
    return reports


def _not_finite(step: int, loss: float, norm: float) -> Fault:
    what = f"loss {loss:g}, gradient norm {norm:g}"
    fix = "its update was left out; lower optim.lr, lengthen optim.warmup, or use machine.precision=bf16 or fp32"
    return Fault(Exit.NUMERICS, what, f"step {step}", fix)


def accumulate_gradients(state: State, plan: Plan, device: Device, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Add the gradient of the batch's mean loss (times the scaler's scale) to every parameter; return that loss.

    The batch is this rank's share of the global one, the mean is over all of it, and so are gradient and loss.
    """
    layout, placement = state.layout, state.placement
    count = state.ranks.sum((slice_sequence(layout, targets_BT) >= 0).sum())
    # In double precision where there is one: the sum of many losses shows neither their order nor the ranks.
    total = torch.zeros((), dtype=device.widest, device=device.place)
    size = plan.micro_batch
    pairs = list(zip(torch.split(inputs_BT, size), torch.split(targets_BT, size), strict=True))
    first = layout.reader * len(pairs)
    halves = HalvesSum(list(placement.kept.values()), len(pairs)) if plan.ordered and layout.is_whole else None
    for index, (inputs, targets) in enumerate(pairs):
        if plan.dropout:
            torch.manual_seed(dropout_seed(plan.seed, state.step, (first + index) * layout.tensor + layout.slice))
        placement.announce(state.model, last=index + 1 == len(pairs))
        if state.graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with nullcontext() if state.has_masters else device.autocast():
            hidden = state.forward(inputs)
            loss_sum, _ = cross_entropy(
                hidden,
                gather_unembedding(state.working.unembedding),
                slice_sequence(layout, targets),
                vocab_size=state.model.shape.vocab_size,
                chunk=plan.loss_chunk,
                lose=state.lose,
            )
        scaled: Tensor = state.scaler.scale(loss_sum / count)
        if state.gradient_sum is not None and halves is None and index + 1 == len(pairs):
            state.gradient_sum.begin()
        scaled.backward()  # type: ignore[no-untyped-call]
        state.collect_gradients()
        if halves is not None:
            halves.take()
        total += loss_sum.detach()
    if halves is not None:
        halves.finish(state.ranks)
    elif state.gradient_sum is not None:
        state.gradient_sum.finish()
    placement.add_shared(state.ranks)
    return (state.ranks.sum(total) / count).float()


def dropout_seed(seed: int, step: int, micro_step: int) -> int:
    """A seed of its own for every forward: 63 bits mixed from the run's seed and the place (odd multipliers)."""
    mixed = seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro_step * 0x94D049BB133111EB
    return (mixed ^ (mixed >> 31)) & (2**63 - 1)
