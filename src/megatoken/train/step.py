"""One optimizer step: micro-batches forward and backward, clip, update.

In: state, the global batch. Out: a Report whose tensors stay on the device until somebody reads them.
The gradient is that of the mean over the whole batch: each micro-batch contributes its sum over the batch's count,
so any split into micro-batches gives the same step.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megatoken.device import Device
from megatoken.errors import Exit, Fault
from megatoken.model.loss import cross_entropy
from megatoken.train.state import Plan, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one step found out: mean loss of the global batch (nats), gradient norm before clipping, its rate."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool


def train_step(state: State, plan: Plan, device: Device, inputs_BT: Tensor, targets_BT: Tensor) -> Report:
    """Train on one global batch and advance `state.step`.

    Under fp16 a step whose gradients overflow is skipped and the scale lowered (`skipped`), as the scaler prescribes.
    Raises Fault(NUMERICS) before the update when loss or gradients are not finite otherwise: weights stay clean.
    """
    lr = plan.schedule.lr(state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    loss = accumulate_gradients(state, plan, device, inputs_BT, targets_BT)
    state.scaler.unscale_(state.optimizer)
    parameters = [p for p in state.model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=None)
    if plan.clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, plan.clip, norm)
    loss_value, norm_value = float(loss), float(norm)
    finite = math.isfinite(loss_value) and math.isfinite(norm_value)
    if not finite and not (state.scaler.is_enabled() and math.isfinite(loss_value)):
        what = f"loss {loss_value:g}, gradient norm {norm_value:g}"
        fix = "nothing was updated; lower optim.lr, lengthen optim.warmup, or use machine.precision=bf16 or fp32"
        raise Fault(Exit.NUMERICS, what, f"step {state.step}", fix)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    if state.has_masters:
        state.spread_weights()
    state.step += 1
    return Report(step=state.step, loss=loss_value, grad_norm=norm_value, lr=lr, skipped=not finite)


def accumulate_gradients(state: State, plan: Plan, device: Device, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Add the gradient of the batch's mean loss (times the scaler's scale) to every parameter; return that loss."""
    count = (targets_BT >= 0).sum()
    total = torch.zeros((), device=device.place)
    size = plan.micro_batch
    pairs = zip(torch.split(inputs_BT, size), torch.split(targets_BT, size), strict=True)
    for index, (inputs, targets) in enumerate(pairs):
        if plan.dropout:
            torch.manual_seed(dropout_seed(plan.seed, state.step, index))
        with nullcontext() if state.has_masters else device.autocast():
            hidden = state.forward(inputs)
            loss_sum, _ = cross_entropy(
                hidden,
                state.working.unembedding,
                targets,
                vocab_size=state.model.shape.vocab_size,
                chunk=plan.loss_chunk,
            )
        scaled: Tensor = state.scaler.scale(loss_sum / count)
        scaled.backward()  # type: ignore[no-untyped-call]
        if state.has_masters:
            state.collect_gradients()
        total += loss_sum.detach()
    return total / count


def dropout_seed(seed: int, step: int, micro_step: int) -> int:
    """A seed of its own for every forward: 63 bits mixed from the run's seed and the place (odd multipliers)."""
    mixed = seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro_step * 0x94D049BB133111EB
    return (mixed ^ (mixed >> 31)) & (2**63 - 1)
