"""The losses that a training step can minimize instead of the targets' cross-entropy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatoken.base.config.objective_config import ObjectiveConfig
from megatoken.data.dataloader import Batch
from megatoken.model.gpt import GPT
from megatoken.posttrain.answer_scores import answer_log_probs, take_last
from megatoken.posttrain.batches import PreferenceBatch, RolloutBatch
from megatoken.posttrain.policy_loss import clipped_loss, clipped_value_loss, kl_k3
from megatoken.posttrain.preference_loss import dpo_loss, kto_loss, pairwise_loss

Forward = Callable[[Batch, Tensor | None], Tensor]  # rows, dropout keys (B,) -> hidden (B, T, C)


class Objective(Protocol):
    """A loss that is summed over micro-batches and divided by a count over the global batch."""

    def count(self, batch: Batch) -> Tensor:
        """Return what this process's batch adds to the divisor."""

    def sums(
        self, model: GPT, forward: Forward, batch: Batch, dropout_keys_B: Tensor | None
    ) -> dict[str, Tensor]:
        """Return sums over a micro-batch, as scalars: `loss`, with gradient, and values to log."""


def build_objective(config: ObjectiveConfig, loss_chunk: int) -> Objective | None:
    """Return the objective of a config, or None if it is the cross-entropy (model/loss.py)."""
    if config.name in ("grpo", "ppo"):
        return PolicyObjective(config, loss_chunk)
    if config.name in ("dpo", "reward", "kto"):
        return PreferenceObjective(config, loss_chunk)
    return None


@dataclass(frozen=True)
class PolicyObjective:
    """GRPO and PPO: the clipped policy loss, with a KL penalty (GRPO) or a value loss (PPO)."""

    config: ObjectiveConfig
    loss_chunk: int

    def count(self, batch: Batch) -> Tensor:
        return (batch.targets_BT >= 0).sum()

    def sums(
        self, model: GPT, forward: Forward, batch: Batch, dropout_keys_B: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the sums of `loss` and clip_share and, if they are used, of kl and value_loss."""
        assert isinstance(batch, RolloutBatch)
        config = self.config
        if config.name == "grpo" and batch.reference_BT is None:
            # An answer with an advantage of 0 adds 0 to the loss and to every gradient.
            rows = torch.nonzero(batch.advantages_BT.any(1))[:, 0]
            if not len(rows):
                rows = rows.new_zeros(1)  # all ranks of a sharded model must run a forward
            batch = batch.take(rows)
            dropout_keys_B = None if dropout_keys_B is None else dropout_keys_B[rows]
        hidden_BTC = forward(batch, dropout_keys_B)
        log_probs_BT = answer_log_probs(
            model, hidden_BTC, batch, loss_chunk=self.loss_chunk, temperature=config.temperature
        )
        mask = batch.targets_BT >= 0
        losses, is_clipped = clipped_loss(
            log_probs_BT, batch.log_probs_BT, batch.advantages_BT, clip=config.clip
        )
        sums = {"clip_share": (is_clipped & mask).sum()}
        if batch.reference_BT is not None:
            kl = kl_k3(log_probs_BT, batch.reference_BT)
            sums["kl"] = (kl * mask).sum().detach()
            if config.name == "grpo":  # PPO's is part of the rewards
                losses = losses + config.kl * kl
        if config.name == "ppo":
            assert batch.values_BT is not None
            assert batch.returns_BT is not None
            errors = clipped_value_loss(
                model.values(hidden_BTC), batch.values_BT, batch.returns_BT, clip=config.value_clip
            )
            sums["value_loss"] = (errors * mask).sum().detach()
            losses = losses + config.value_weight * errors
        return {"loss": (losses * mask).sum(), **sums}


@dataclass(frozen=True)
class PreferenceObjective:
    """DPO and reward models: the pairwise loss of two answers. KTO: the loss of rated answers."""

    config: ObjectiveConfig
    loss_chunk: int

    def count(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch), device=batch.inputs_BT.device)

    def sums(
        self, model: GPT, forward: Forward, batch: Batch, dropout_keys_B: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the sums of `loss`, accuracy and, for pairs, reward_chosen and reward_rejected.

        For KTO, return those of `loss`, accuracy (answers with a positive margin) and kl.
        """
        assert isinstance(batch, PreferenceBatch)
        if dropout_keys_B is not None:
            dropout_keys_B = dropout_keys_B.repeat_interleave(  # the same masks for both answers
                batch.inputs_BT.shape[1]
            )
        rows = Batch(batch.inputs_BT.flatten(0, 1), batch.targets_BT.flatten(0, 1))
        hidden_BTC = forward(rows, dropout_keys_B)
        if self.config.name == "reward":
            scores = take_last(model.values(hidden_BTC), rows.targets_BT)
            chosen, rejected = scores.view(-1, 2).unbind(1)
            losses = pairwise_loss(chosen, rejected)
        else:
            log_probs = answer_log_probs(model, hidden_BTC, rows, loss_chunk=self.loss_chunk).sum(1)
            if self.config.name == "kto":
                return self._sum_kto(log_probs, batch)
            assert batch.reference_B2 is not None
            chosen, rejected = log_probs.view(-1, 2).unbind(1)
            losses, chosen, rejected = dpo_loss(
                chosen, rejected, *batch.reference_B2.unbind(1), beta=self.config.beta
            )
        return {
            "loss": losses.sum(),
            "accuracy": (chosen > rejected).sum().detach(),
            "reward_chosen": chosen.sum().detach(),
            "reward_rejected": rejected.sum().detach(),
        }

    def _sum_kto(self, log_probs_B: Tensor, batch: PreferenceBatch) -> dict[str, Tensor]:
        assert batch.reference_B2 is not None
        assert batch.is_good_B is not None
        assert batch.kl_B is not None
        losses, margins = kto_loss(
            log_probs_B,
            batch.reference_B2[:, 0],
            batch.kl_B,
            batch.is_good_B,
            beta=self.config.beta,
            desirable_weight=self.config.desirable_weight,
            undesirable_weight=self.config.undesirable_weight,
        )
        return {"loss": losses.sum(), "accuracy": (margins > 0).sum(), "kl": batch.kl_B.sum()}
