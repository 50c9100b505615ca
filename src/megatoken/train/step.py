"""One optimizer step: forward and backward for each micro-batch, clip, update.

The gradient is that of the mean loss over the global batch: each micro-batch contributes its summed loss divided by the
number of targets in the global batch, so every split into micro-batches and processes gives the same step.

Loss and gradient norm stay on the device until `wait_for_steps` reads them, so that the host never waits. A step is bad
when its loss or gradient norm is not finite, or is a spike that is to be skipped (train/spikes.py), or when the
gradient is exactly 0 beside a loss: none reached the weights. A bad step leaves the weights as they are: torch's fused
AdamW and Muon skip that update and all later ones on the device; for other optimizers the host decides at every
step.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatoken.data.dataloader import Batch
from megatoken.distributed.grad_reduce import PairwiseGradSum
from megatoken.distributed.tensor_parallel import gather_lm_head, slice_sequence
from megatoken.errors import NumericsError
from megatoken.model.dropout import sequence_keys
from megatoken.model.gpt import separate_conversations
from megatoken.model.loss import cross_entropy
from megatoken.optim.optimizer import set_lr, set_momentum
from megatoken.system.device import Device
from megatoken.system.torch_compat import fused_adamw_step, scaler_found_inf
from megatoken.train.state import StepConfig, TrainState

MIN_LOSS_SCALE = 2.0**-10  # fp16 gradients that overflow below it are not finite at any scale
FINITE_FIX = (
    "lower optim.lr, lengthen optim.warmup, set optim.grad_clip; instead of fp16 use bf16 or fp32"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Mean loss of the global batch (nats), gradient norm before clipping, learning rate.

    overflowed: fp16 gradients overflowed; the update was left out and the loss scale lowered. bad: the update was left
    out and the step does not count. values: means of what else the objective measures.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    overflowed: bool
    bad: bool = False
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step whose numbers are still on the device: (loss, gradient norm, whether this or an earlier step was bad,
    then a number for each of `names`)."""

    step: int
    lr: float
    overflowed: bool
    numbers: Tensor
    names: tuple[str, ...] = ()


def train_step(
    state: TrainState, step_config: StepConfig, device: Device, batch: Batch
) -> StepMetrics:
    """Train on this process's share of one global batch, advance `state.step` and wait for the numbers.

    Under fp16 a step whose gradients overflow is skipped and the loss scale lowered (`overflowed`). Raises
    NumericsError for a bad step; the weights stay as they were.
    """
    (metrics,) = wait_for_steps(state, [train_step_async(state, step_config, device, batch)])
    if metrics.bad:
        raise bad_step_error(metrics.step, metrics.loss, metrics.grad_norm)
    return metrics


def train_step_async(
    state: TrainState, step_config: StepConfig, device: Device, batch: Batch
) -> PendingStep:
    """`train_step` without waiting for the device, where the optimizer can skip bad updates by itself."""
    lr = step_config.schedule.lr(state.step)
    set_lr(state.optimizer, lr)
    set_momentum(state.optimizer, step_config.momentum_of(state.step))
    lr = state.optimizer.param_groups[0]["lr"]  # as it is applied: a user's optimizer may scale it
    means = compute_gradients(state, step_config, device, batch)
    loss = means.pop("loss")
    unscale_gradients(state)
    grad_norm = state.global_grad_norm()
    overflowed = clip_and_update(state, step_config, loss, grad_norm)
    state.optimizer.zero_grad(set_to_none=True)
    if not state.updates_copies:
        state.refresh_low_precision_copy()
    state.step += 1
    numbers = torch.stack([loss, grad_norm, state.found_bad.float(), *means.values()])
    return PendingStep(
        step=state.step, lr=lr, overflowed=overflowed, numbers=numbers, names=tuple(means)
    )


def forward_backward(
    state: TrainState, step_config: StepConfig, device: Device, batch: Batch
) -> Tensor:
    """`compute_gradients`; the loss alone."""
    return compute_gradients(state, step_config, device, batch)["loss"]


def compute_gradients(
    state: TrainState, step_config: StepConfig, device: Device, batch: Batch
) -> dict[str, Tensor]:
    """Add the gradient of the global batch's mean loss (times the fp16 loss scale) to every parameter; return the loss,
    and the means of what else the objective measures.

    batch: this data-parallel rank's sequences. One process adds nothing to what autograd does. Replicas reduce
    gradients in buckets while the last backward computes; FSDP2 reduces them itself; deterministic runs add pairwise,
    in an order that 1, 2, 4, ... processes share.
    """
    comm, dims, size = state.comm, state.dims, count_rows(state, step_config, batch)
    if (
        state.cuda_graphs
    ):  # not at every micro-batch: gradients of those before lie in the memory of the graphs
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    n_targets = comm.sum(count_targets(state, batch))
    # In double precision where the device has it, so that neither order nor ranks show after rounding to fp32.
    totals = {"loss": torch.zeros((), dtype=device.widest, device=device.torch_device)}
    micro_batches = batch.split(size)
    pairwise = reducer = None
    if step_config.deterministic and dims.is_unsharded:
        pairwise = PairwiseGradSum(list(state.sharded.local_params.values()), len(micro_batches))
    else:
        reducer = state.grad_reducer
    # Gradients of a single micro-batch need no sum, so that no copy of them is made for the optimizer.
    keep_in_copies = (
        state.updates_copies and len(micro_batches) == 1 and pairwise is None and reducer is None
    )
    with state.compute_timer:
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            dropout_keys = None
            if state.model.config.dropout:
                first = dims.dp_rank * len(batch) + index * size  # in the global batch
                dropout_keys = sequence_keys(
                    step_config.seed, state.step, first, len(micro_batch), device.torch_device
                )
            state.sharded.set_grad_sync(state.model, last=is_last)
            sums = measure_sums(state, step_config, device, micro_batch, dropout_keys)
            if reducer is not None and is_last:
                reducer.begin()
            state.scaler.scale(sums["loss"] / n_targets).backward()  # type: ignore[no-untyped-call]
            if not keep_in_copies:
                state.collect_gradients()
            if pairwise is not None:
                pairwise.add()
            for name, value in sums.items():
                totals[name] = totals.get(name, 0) + value.detach().to(device.widest)
    if pairwise is not None:
        pairwise.finish(comm)
    elif reducer is not None:
        reducer.finish()
    state.sharded.all_reduce_tp_grads(comm)
    return {name: (comm.sum(total) / n_targets).float() for name, total in totals.items()}


def count_rows(state: TrainState, step_config: StepConfig, batch: Batch) -> int:
    """Rows of a micro-batch, the same on all processes: `fit_rows` for rows of an objective, which differ in length.

    A deterministic run keeps `micro_batch` rows, whatever their length: its sums must not depend on the processes.
    """
    if state.objective is None or step_config.deterministic:
        return step_config.micro_batch
    widest = max(state.comm.gather(batch.inputs_BT[0].numel()))
    return fit_rows(step_config.micro_batch, len(batch), widest, state.model.config.seq_len)


def fit_rows(micro_batch: int, rows: int, row_tokens: int, seq_len: int) -> int:
    """How many of `rows` rows have at most the tokens of `micro_batch` sequences of the context's length: `micro_batch`
    doubled as often as that goes, or halved.
    """
    size = micro_batch
    while size * row_tokens > micro_batch * seq_len and size % 2 == 0:
        size //= 2
    while 2 * size * row_tokens <= micro_batch * seq_len and size < rows:
        size *= 2
    return size


def count_targets(state: TrainState, batch: Batch) -> Tensor:
    """By what the sums of this process's share of a batch are divided, once they are added over all processes."""
    if state.objective is not None:
        return state.objective.count(state, batch)
    return (slice_sequence(state.dims, batch.targets_BT) >= 0).sum()


def measure_sums(
    state: TrainState,
    step_config: StepConfig,
    device: Device,
    batch: Batch,
    dropout_keys_B: Tensor | None,
) -> dict[str, Tensor]:
    """The summed loss of one micro-batch, and what else the objective measures."""
    if state.objective is not None:
        return state.objective.sums(state, step_config, device, batch, dropout_keys_B)
    return {"loss": forward_loss(state, step_config, device, batch, dropout_keys_B)}


def forward_hidden(state: TrainState, batch: Batch, dropout_keys_B: Tensor | None) -> Tensor:
    """Hidden states (B, T, C) of one micro-batch, through the compute model."""
    options: dict[str, Any] = {} if dropout_keys_B is None else {"dropout_keys_B": dropout_keys_B}
    if batch.starts_BT is not None:
        options["tree_mask"] = separate_conversations(batch.starts_BT)
    return state.forward(batch.inputs_BT, **options)


def forward_loss(
    state: TrainState,
    step_config: StepConfig,
    device: Device,
    batch: Batch,
    dropout_keys_B: Tensor | None,
) -> Tensor:
    """The summed cross-entropy (nats) of one micro-batch's targets, through the compute model."""
    with (
        nullcontext() if state.uses_master_weights else device.autocast()
    ):  # a low-precision copy needs no autocast
        hidden = forward_hidden(state, batch, dropout_keys_B)
        loss_sum, _ = cross_entropy(
            hidden,
            gather_lm_head(state.compute_model.lm_head_weight),
            slice_sequence(state.dims, batch.targets_BT),
            vocab_size=state.model.config.vocab_size,
            softcap=state.model.config.logit_softcap,
            chunk=step_config.loss_chunk,
            softmax_cross_entropy=state.cross_entropy_fn,
        )
    return loss_sum


def unscale_gradients(state: TrainState) -> None:
    """Divide fp16 gradients by the loss scale; an overflow on one process makes all of them skip the step."""
    state.scaler.unscale_(state.optimizer)
    if state.scaler.is_enabled() and not state.dims.is_unsharded:
        for found_inf in scaler_found_inf(state.scaler, state.optimizer):
            state.comm.sum(found_inf)


def is_bad(state: TrainState, step_config: StepConfig, loss: Tensor, grad_norm: Tensor) -> Tensor:
    """Whether this step must not reach the weights (bool, on the device); the same on all processes."""
    scaled = state.scaler.is_enabled()  # fp16 gradients that overflow are the scaler's affair
    bad = ~torch.isfinite(loss if scaled else loss + grad_norm) | ((grad_norm == 0) & (loss > 0))
    if step_config.skip_spikes:
        max_loss, max_grad_norm = state.recent.limits()
        bad |= (loss > max_loss) | ((grad_norm > max_grad_norm) & torch.isfinite(grad_norm))
    return bad


def clip_and_update(
    state: TrainState, step_config: StepConfig, loss: Tensor, grad_norm: Tensor
) -> bool:
    """Clip the gradients and update the weights unless this or an earlier step is bad.

    Return whether the fp16 scaler left out the update.
    """
    state.found_bad.logical_or_(is_bad(state, step_config, loss, grad_norm))
    grad_clip = step_config.grad_clip
    if not state.skips_bad_on_device:
        return update_on_host(state, grad_clip, grad_norm)
    # The host reads nothing: the optimizer divides gradients by `grad_scale` (fused AdamW in one pass with the update)
    # and leaves everything as it is where `found_inf` is 1. clip_grad_norm_ multiplies by min(1, clip / (norm + 1e-6)).
    grad_scale = ((grad_norm + 1e-6) / grad_clip).clamp(min=1.0) if grad_clip else None
    fused_adamw_step(state.optimizer, state.found_bad.float(), grad_scale)
    return False


def update_on_host(state: TrainState, grad_clip: float, grad_norm: Tensor) -> bool:
    """Clip and update unless a step is bad; return whether the fp16 scaler left out the update.

    Raises NumericsError, the weights unchanged, for fp16 gradients that overflow at any loss scale.
    """
    scaler = state.scaler
    if state.found_bad:
        scaler.update(scaler.get_scale())  # it forgets these gradients and keeps its scale
        return False
    if grad_clip:
        params = [param for param in state.sharded.local_params.values() if param.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(params, grad_clip, grad_norm)
    scaler.step(state.optimizer)
    scaler.update()
    overflowed = scaler.is_enabled() and not math.isfinite(grad_norm)
    if overflowed and scaler.get_scale() < MIN_LOSS_SCALE:
        raise NumericsError(
            "fp16 gradients overflow at any loss scale", f"step {state.step + 1}", FINITE_FIX
        )
    return overflowed


def wait_for_steps(state: TrainState, pending: Sequence[PendingStep]) -> list[StepMetrics]:
    """Wait for pending steps, in order, and read all their numbers in one transfer.

    The first bad step ends the list: weights and `state.step` are those before it, and the next step trains again. All
    processes must call it after the same step.
    """
    rows = torch.stack([step.numbers for step in pending]).tolist()
    metrics = []
    for step, (loss, grad_norm, bad, *others) in zip(pending, rows, strict=True):
        numbers = {"loss": loss, "grad_norm": grad_norm, "lr": step.lr}
        values = dict(zip(step.names, others, strict=True))
        metrics.append(
            StepMetrics(
                step=step.step, **numbers, overflowed=step.overflowed, bad=bool(bad), values=values
            )
        )
        if bad:
            state.step = step.step - 1
            state.found_bad.zero_()
            break
    return metrics


def bad_step_error(step: int, loss: float, grad_norm: float, where: str = "") -> NumericsError:
    """The error for a bad step, or for several, the last of them with these numbers; where: which, if not `step`."""
    where = where or f"step {step}"
    if grad_norm == 0:
        fix = "check that weights are neither frozen nor all 0; machine.compile=off leaves the compiler out"
        return NumericsError(
            f"loss {loss:g}, but no gradient reached the weights: its norm is 0", where, fix
        )
    return NumericsError(
        f"loss {loss:g}, gradient norm {grad_norm:g}",
        where,
        f"the update was left out; {FINITE_FIX}",
    )
