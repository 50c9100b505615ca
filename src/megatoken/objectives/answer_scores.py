"""Log-probabilities of answers, and the losses of GRPO, PPO, DPO and reward models over them.

A row of a batch is a prompt with an answer, whose tokens are the targets; the inputs hold its last token, too. A pair
of preferences is two rows, (B, 2, T). `Batch.values` holds what was measured before the step, in the shape of the
targets or (B, 2).
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from megatoken.config.schema import ObjectiveConfig
from megatoken.data.dataloader import Batch
from megatoken.model.gpt import GPT
from megatoken.model.loss import token_log_probs
from megatoken.objectives.policy_loss import clipped_loss, clipped_value_loss, kl_k3
from megatoken.objectives.preference_loss import dpo_loss, pairwise_loss
from megatoken.system.device import Device
from megatoken.train.state import Objective, StepConfig, TrainState
from megatoken.train.step import fit_rows, forward_hidden

KEPT_LOGITS = (
    1 << 24
)  # of a micro-batch; where there are more, the backward computes them again, chunk by chunk


def build_objective(config: ObjectiveConfig) -> Objective | None:
    """What a step minimizes; None for the cross-entropy of the targets."""
    if config.name in ("grpo", "ppo"):
        return Objective(count=_count_tokens, sums=partial(_policy_sums, config))
    if config.name in ("dpo", "reward"):
        return Objective(count=_count_pairs, sums=partial(_preference_sums, config))
    return None


def _count_tokens(state: TrainState, batch: Batch) -> Tensor:
    return (batch.targets_BT >= 0).sum()


def _count_pairs(state: TrainState, batch: Batch) -> Tensor:
    return torch.tensor(len(batch), device=batch.inputs_BT.device)


def _policy_sums(
    config: ObjectiveConfig,
    state: TrainState,
    step_config: StepConfig,
    device: Device,
    batch: Batch,
    dropout_keys_B: Tensor | None,
) -> dict[str, Tensor]:
    """GRPO's and PPO's loss of a micro-batch, the KL from the reference, and how many tokens were clipped."""
    if config.name == "grpo" and "reference" not in batch.values:
        # An answer with an advantage of 0 adds 0 to the loss and to every gradient.
        rows = torch.nonzero(batch.values["advantages"].any(1))[:, 0]
        rows = (
            rows if len(rows) else rows.new_zeros(1)
        )  # one at least: ranks of a split model compute together
        batch = batch.take(rows)
        dropout_keys_B = None if dropout_keys_B is None else dropout_keys_B[rows]
    model = state.compute_model
    with nullcontext() if state.uses_master_weights else device.autocast():
        hidden = forward_hidden(state, batch, dropout_keys_B)
        log_probs = _log_probs(model, hidden, batch, step_config, config.temperature)
        values = model.values(hidden) if config.name == "ppo" else log_probs
    given, mask = batch.values, batch.targets_BT >= 0
    losses, clipped = clipped_loss(
        log_probs, given["log_probs"], given["advantages"], clip=config.clip
    )
    sums = {"clip_share": (clipped & mask).sum()}
    if "reference" in given:
        kl = kl_k3(log_probs, given["reference"])
        sums["kl"] = (kl * mask).sum().detach()
        if config.name == "grpo":  # PPO's is part of the rewards
            losses = losses + config.kl * kl
    if config.name == "ppo":
        errors = clipped_value_loss(
            values, given["values"], given["returns"], clip=config.value_clip
        )
        sums["value_loss"] = (errors * mask).sum().detach()
        losses = losses + config.value_weight * errors
    return {"loss": (losses * mask).sum(), **sums}


def _preference_sums(
    config: ObjectiveConfig,
    state: TrainState,
    step_config: StepConfig,
    device: Device,
    batch: Batch,
    dropout_keys_B: Tensor | None,
) -> dict[str, Tensor]:
    """The loss of DPO or of a reward model over a micro-batch of pairs, both rewards, and how many are in order."""
    shape = batch.targets_BT.shape[:2]
    keys = (
        None if dropout_keys_B is None else dropout_keys_B.repeat_interleave(2)
    )  # the same masks for both
    rows = Batch(batch.inputs_BT.flatten(0, 1), batch.targets_BT.flatten(0, 1))
    model = state.compute_model
    with nullcontext() if state.uses_master_weights else device.autocast():
        hidden = forward_hidden(state, rows, keys)
        if config.name == "dpo":
            scores = _log_probs(model, hidden, rows, step_config).sum(1)
        else:
            scores = take_last(model.values(hidden), rows.targets_BT)
    chosen, rejected = scores.view(shape).unbind(1)
    if config.name == "dpo":
        losses, chosen, rejected = dpo_loss(
            chosen, rejected, *batch.values["reference"].unbind(1), beta=config.beta
        )
    else:
        losses = pairwise_loss(chosen, rejected)
    sums = {
        "accuracy": (chosen > rejected).sum(),
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
    }
    return {"loss": losses.sum(), **{name: value.detach() for name, value in sums.items()}}


def take_last(values_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """The value (B,) of each row where its last target has been read, if the context has room for that."""
    places = torch.arange(targets_BT.shape[1], device=targets_BT.device)
    ends = torch.where(targets_BT >= 0, places, -1).amax(1) + 1
    return values_BT.gather(1, ends.clamp(max=targets_BT.shape[1] - 1)[:, None])[:, 0]


@torch.no_grad()
def measure_answers(
    model: GPT,
    step_config: StepConfig,
    device: Device,
    batch: Batch,
    *,
    temperature: float = 1.0,
    values: bool = False,
) -> Tensor:
    """Log-probabilities of the rows' targets, or values, (B, T), in micro-batches, without dropout.

    model: whole, its weights in fp32 or in the device's precision. temperature: of the distribution.
    """
    was_training = model.training
    model.eval()
    parts = []
    try:
        row_tokens = batch.inputs_BT.shape[1]
        for part in batch.split(
            fit_rows(step_config.micro_batch, len(batch), row_tokens, model.config.seq_len)
        ):
            with nullcontext() if model.tokens.weight.dtype == device.dtype else device.autocast():
                hidden = model(part.inputs_BT)
                score = (
                    model.values(hidden)
                    if values
                    else _log_probs(model, hidden, part, step_config, temperature)
                )
                parts.append(score)
    finally:
        model.train(was_training)
    return torch.cat(parts)


def _log_probs(
    model: GPT, hidden_BTC: Tensor, batch: Batch, step_config: StepConfig, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities (B, T) of the targets, differentiable."""
    config, targets = model.config, batch.targets_BT
    kept = targets.numel() * config.padded_vocab_size <= KEPT_LOGITS
    return token_log_probs(
        hidden_BTC,
        model.lm_head_weight,
        targets,
        vocab_size=config.vocab_size,
        softcap=config.logit_softcap,
        temperature=temperature,
        chunk=0 if kept else step_config.loss_chunk,
    )
