"""One optimizer step: split, forward, loss, backward, reduce, clip, update.

The gradient is that of the mean loss over the global batch: each micro-batch contributes its summed
loss divided by the number of targets in the global batch, so any split into micro-batches and
processes gives the same step.

Loss and gradient norm stay on the device until `wait_for_steps` reads them, so the host need not
wait for each step. A step is bad if its loss or gradient norm is not finite, if it is a spike to be
skipped (optim/spikes.py), or if the gradient is exactly 0. A bad step leaves the weights unchanged.
torch's fused AdamW and our Muon check this on the device: they skip the bad step's update and all
later ones, until the host reads the losses. With any other optimizer, the host checks every step.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatoken.base.errors import NumericsError
from megatoken.base.system.device import Device
from megatoken.base.system.threads import use_torch_threads
from megatoken.base.system.torch_compat import scaler_found_inf
from megatoken.data.dataloader import Batch
from megatoken.distributed.grad_reduce import PairwiseGradSum, collect_gradients
from megatoken.model.dropout import sequence_keys
from megatoken.optim.optimizer import set_lr, set_momentum
from megatoken.train.state import StepConfig, TrainState

MIN_LOSS_SCALE = 2.0**-10  # fp16 gradients that overflow below it would overflow at any scale
FINITE_FIX = "lower optim.lr, lengthen optim.warmup, set optim.grad_clip, or use bf16 for fp16"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The numbers of one step, read from the device.

    loss: mean over the global batch, in nats. grad_norm: before clipping.
    overflowed: whether fp16 gradients overflowed. The update was then skipped and the loss scale
        lowered, but the step counts.
    bad: whether the step was bad. Its update was then skipped, and it does not count.
    values: other means that the loss computes, by name.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    overflowed: bool
    bad: bool = False
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PendingStep:
    """A step whose numbers have not been read from the device.

    numbers: 1-d tensor of the loss, the gradient norm, a flag, and a value for each of `names`. The
    flag is 1 if this step or an earlier unread one was bad, else 0.
    """

    step: int
    lr: float
    overflowed: bool
    numbers: Tensor
    names: tuple[str, ...] = ()


def train_step(
    state: TrainState, step_config: StepConfig, device: Device, batch: Batch
) -> StepMetrics:
    """Train on this process's share of a global batch, and return the step's metrics.

    Raises NumericsError for a bad step, and then leaves the weights and `state.step` unchanged.
    """
    (metrics,) = wait_for_steps(state, [train_step_async(state, step_config, device, batch)])
    if metrics.bad:
        raise bad_step_error(metrics)
    return metrics


def train_step_async(
    state: TrainState,
    step_config: StepConfig,
    device: Device,
    batch: Batch,
    n_targets: Tensor | None = None,
) -> PendingStep:
    """Take a step without reading its numbers from the device.

    Waits for the device only if the optimizer cannot skip bad updates there.

    n_targets: as in `compute_gradients`; None to sum it here.
    """
    if n_targets is None:
        n_targets = state.comm.sum(step_config.loss.count(state, batch))
    set_lr(state.optimizer, step_config.schedule.lr(state.step))
    set_momentum(state.optimizer, step_config.momentum_of(state.step))
    lr = state.optimizer.param_groups[0]["lr"]  # as applied: a user's optimizer may scale it
    means = compute_gradients(state, step_config, device, batch, n_targets)
    loss = means.pop("loss")
    unscale_gradients(state)
    grad_norm = state.global_grad_norm()
    overflowed = clip_and_update(state, step_config, loss, grad_norm)
    state.zero_grad()
    if not state.compute.update.updates_copies:
        state.refresh_low_precision_copy()
    state.position = replace(state.position, step=state.step + 1)
    return PendingStep(
        step=state.step,
        lr=lr,
        overflowed=overflowed,
        numbers=torch.stack([loss, grad_norm, state.found_bad.float(), *means.values()]),
        names=tuple(means),
    )


def forward_backward(
    state: TrainState, step_config: StepConfig, device: Device, batch: Batch
) -> Tensor:
    """Call `compute_gradients` and return only the loss."""
    n_targets = state.comm.sum(step_config.loss.count(state, batch))
    return compute_gradients(state, step_config, device, batch, n_targets)["loss"]


def compute_gradients(
    state: TrainState, step_config: StepConfig, device: Device, batch: Batch, n_targets: Tensor
) -> dict[str, Tensor]:
    """Compute the gradient of the global batch's mean loss, times the fp16 loss scale.

    The gradient is added to the parameters' `grad`. Returns the mean loss and the loss's other
    means, by name. How gradients are summed over processes depends on the run: replicas reduce them
    in buckets during the last backward, FSDP2 reduces them itself, and deterministic runs add them
    pairwise, in the same order on 1, 2, 4, ... processes.

    batch: this data-parallel rank's sequences. n_targets: the loss's count, summed over all
    processes.
    """
    use_torch_threads(state.compute.threads)  # code in a callback may have changed it
    comm = state.comm
    size = step_config.micro_batch
    if not step_config.deterministic:  # else the size would depend on the number of processes
        row_tokens = batch.inputs_BT.shape[1:].numel()  # the same on all processes
        size = fit_rows(size, len(batch), row_tokens, state.model.config.seq_len)
    micro_batches = batch.split(size)
    if state.compute.cuda_graphs:
        # Once per step, because the graphs' memory holds gradients of micro-batches.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    totals: dict[str, Tensor] = {}
    pairwise = reducer = None
    if step_config.deterministic and state.dims.is_unsharded:
        pairwise = PairwiseGradSum(list(state.sharded.local_params.values()), len(micro_batches))
    else:
        reducer = state.compute.reducer
    # With a single micro-batch, the optimizer may read gradients where autograd left them.
    needs_sum = len(micro_batches) > 1 or pairwise is not None or reducer is not None
    collects = needs_sum or not state.compute.update.updates_copies
    with state.compute_timer:
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            first_row = state.dims.dp_rank * len(batch) + index * size  # in the global batch
            keys_B = None
            if state.model.config.dropout:
                rows = first_row, len(micro_batch), device.torch_device
                keys_B = sequence_keys(step_config.seed, state.step, *rows)
            state.sharded.set_grad_sync(state.model, last=is_last)
            # A low-precision copy of the weights needs no autocast.
            with nullcontext() if state.uses_master_weights else device.autocast():
                sums = step_config.loss.sums(state, micro_batch, keys_B, step_config.loss_chunk)
            if reducer is not None and is_last:
                reducer.begin()
            state.scaler.scale(sums["loss"] / n_targets).backward()  # type: ignore[no-untyped-call]
            if collects:
                collect_gradients(state.grad_pairs())
            if pairwise is not None:
                pairwise.add()
            for name, value in sums.items():  # in fp64, if possible, for any order
                totals[name] = totals.get(name, 0) + value.detach().to(device.widest)
    if pairwise is not None:
        pairwise.finish(comm)
    elif reducer is not None:
        reducer.finish()
    state.sharded.all_reduce_tp_grads(comm)
    return {name: (comm.sum(total) / n_targets).float() for name, total in totals.items()}


def fit_rows(micro_batch: int, rows: int, row_tokens: int, seq_len: int) -> int:
    """Return how many rows of `row_tokens` tokens to put into a micro-batch.

    Doubles or halves `micro_batch` until the rows have as many tokens as possible, but not more
    than `micro_batch` full contexts. Stops doubling when all `rows` rows fit.
    """
    size = micro_batch
    while size * row_tokens > micro_batch * seq_len and size % 2 == 0:
        size //= 2
    while 2 * size * row_tokens <= micro_batch * seq_len and size < rows:
        size *= 2
    return size


def unscale_gradients(state: TrainState) -> None:
    """Divide fp16 gradients by the loss scale.

    If the model is sharded, an overflow on one process makes all processes skip the update.
    """
    state.scaler.unscale_(state.optimizer)
    if state.scaler.is_enabled() and not state.dims.is_unsharded:
        for found_inf in scaler_found_inf(state.scaler, state.optimizer):
            state.comm.sum(found_inf)


def is_bad(state: TrainState, step_config: StepConfig, loss: Tensor, grad_norm: Tensor) -> Tensor:
    """Return a 0-d bool on the device: whether the step is bad, so that its update is skipped."""
    # GradScaler handles overflowed fp16 gradients.
    finite_sum = loss if state.scaler.is_enabled() else loss + grad_norm
    bad = ~torch.isfinite(finite_sum) | ((grad_norm == 0) & (loss > 0))
    if step_config.skip_spikes:
        max_loss, max_grad_norm = state.position.recent.limits()
        bad |= (loss > max_loss) | ((grad_norm > max_grad_norm) & torch.isfinite(grad_norm))
    return bad


def clip_and_update(
    state: TrainState, step_config: StepConfig, loss: Tensor, grad_norm: Tensor
) -> bool:
    """Clip the gradients and update the weights, unless this or an earlier unread step is bad.

    Returns True if fp16 gradients overflowed; the scaler has then skipped the update.
    """
    state.found_bad.logical_or_(is_bad(state, step_config, loss, grad_norm))
    grad_clip = step_config.grad_clip
    if not state.skips_bad_on_device:
        return update_on_host(state, grad_clip, grad_norm)
    # The optimizer divides gradients by `grad_scale` in its update and skips it if `found_inf` is
    # 1. clip_grad_norm_ multiplies by min(1, clip / (norm + 1e-6)).
    grad_scale = ((grad_norm + 1e-6) / grad_clip).clamp(min=1.0) if grad_clip else None
    state.compute.update.step(state.optimizer, state.found_bad.float(), grad_scale)
    return False


def update_on_host(state: TrainState, grad_clip: float, grad_norm: Tensor) -> bool:
    """Wait for the device to read `state.found_bad`; unless it is set, clip and update.

    Returns True if fp16 gradients overflowed; the scaler has then skipped the update. Raises
    NumericsError if they overflow even at the lowest loss scale.
    """
    scaler = state.scaler
    if state.found_bad:
        scaler.update(scaler.get_scale())  # forget these gradients, keep the scale
        return False
    if grad_clip:
        params = [param for param in state.sharded.local_params.values() if param.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(params, grad_clip, grad_norm)
    scaler.step(state.optimizer)
    scaler.update()
    overflowed = scaler.is_enabled() and not math.isfinite(grad_norm)
    if overflowed and scaler.get_scale() < MIN_LOSS_SCALE:
        what = "fp16 gradients overflow at any loss scale"
        raise NumericsError(what, f"step {state.step + 1}", FINITE_FIX)
    return overflowed


def wait_for_steps(state: TrainState, pending: Sequence[PendingStep]) -> list[StepMetrics]:
    """Wait for pending steps, read all their numbers in one transfer, and return them in order.

    The list ends with the first bad step, if any. In that case, weights and `state.step` are as
    before that step, and `found_bad` is cleared so that training can go on. All processes must
    call this after the same step.
    """
    rows = torch.stack([step.numbers for step in pending]).tolist()
    metrics = []
    for step, (loss, grad_norm, bad, *values) in zip(pending, rows, strict=True):
        metrics.append(
            StepMetrics(
                step=step.step,
                loss=loss,
                grad_norm=grad_norm,
                lr=step.lr,
                overflowed=step.overflowed,
                bad=bool(bad),
                values=dict(zip(step.names, values, strict=True)),
            )
        )
        if bad:
            state.position = replace(state.position, step=step.step - 1)
            state.found_bad.zero_()
            break
    return metrics


def bad_step_error(step: StepMetrics, batches: Sequence[int] = ()) -> NumericsError:
    """Return the error to raise for a bad step, which names `batches`."""
    where = f"step {step.step:,}"
    if step.grad_norm == 0:
        fix = "check for frozen or all-zero weights; machine.compile=off rules out the compiler"
        return NumericsError(f"loss {step.loss:g}, but the gradient is 0", where, fix)
    if batches:
        where += f", batches {', '.join(map(str, batches))}"
    what = f"loss {step.loss:g}, gradient norm {step.grad_norm:g}"
    return NumericsError(what, where, FINITE_FIX)
