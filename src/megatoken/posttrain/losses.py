"""The losses of preferences and of sampled answers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatoken.data.dataloader import Batch
from megatoken.model.gpt import GPT
from megatoken.posttrain.answer_scores import answer_log_probs, take_last
from megatoken.posttrain.batches import PreferenceBatch, RolloutBatch
from megatoken.posttrain.policy_loss import clipped_loss, clipped_value_loss, kl_k3
from megatoken.posttrain.preference_loss import dpo_loss, kto_loss, pairwise_loss
from megatoken.posttrain.settings import ObjectiveConfig
from megatoken.posttrain.value_head import predict_values
from megatoken.train.state import TrainState


@dataclass(frozen=True)
class PolicyLoss:
    """GRPO and PPO: the clipped policy loss, with a KL penalty (GRPO) or a value loss (PPO)."""

    name: str
    config: ObjectiveConfig

    def count(self, state: TrainState, batch: Batch) -> Tensor:
        return (batch.targets_BT >= 0).sum()

    def sums(
        self, state: TrainState, batch: Batch, dropout_keys_B: Tensor | None, loss_chunk: int
    ) -> dict[str, Tensor]:
        """Return the sums of `loss` and clip_share and, if they are used, of kl and value_loss."""
        assert isinstance(batch, RolloutBatch)
        config = self.config
        if self.name == "grpo" and batch.reference_BT is None:
            # An answer with an advantage of 0 adds 0 to the loss and to every gradient.
            rows = torch.nonzero(batch.advantages_BT.any(1))[:, 0]
            if not len(rows):
                rows = rows.new_zeros(1)  # all ranks of a sharded model must run a forward
            batch = batch.take(rows)
            dropout_keys_B = None if dropout_keys_B is None else dropout_keys_B[rows]
        model = state.compute.model
        hidden_BTC = state.hidden(batch, dropout_keys_B)
        log_probs_BT = answer_log_probs(
            model, hidden_BTC, batch, loss_chunk=loss_chunk, temperature=config.temperature
        )
        mask = batch.targets_BT >= 0
        losses, is_clipped = clipped_loss(
            log_probs_BT, batch.log_probs_BT, batch.advantages_BT, clip=config.clip
        )
        sums = {"clip_share": (is_clipped & mask).sum()}
        if batch.reference_BT is not None:
            kl = kl_k3(log_probs_BT, batch.reference_BT)
            sums["kl"] = (kl * mask).sum().detach()
            if self.name == "grpo":  # PPO's is part of the rewards
                losses = losses + config.kl * kl
        if self.name == "ppo":
            assert batch.values_BT is not None
            assert batch.returns_BT is not None
            errors = clipped_value_loss(
                predict_values(model, hidden_BTC),
                batch.values_BT,
                batch.returns_BT,
                clip=config.value_clip,
            )
            sums["value_loss"] = (errors * mask).sum().detach()
            losses = losses + config.value_weight * errors
        return {"loss": (losses * mask).sum(), **sums}


@dataclass(frozen=True)
class PreferenceLoss:
    """DPO and reward models: the pairwise loss of two answers. KTO: the loss of rated answers."""

    name: str
    config: ObjectiveConfig

    def count(self, state: TrainState, batch: Batch) -> Tensor:
        return torch.tensor(len(batch), device=batch.inputs_BT.device)

    def sums(
        self, state: TrainState, batch: Batch, dropout_keys_B: Tensor | None, loss_chunk: int
    ) -> dict[str, Tensor]:
        if dropout_keys_B is not None:
            dropout_keys_B = dropout_keys_B.repeat_interleave(  # the same masks for both answers
                batch.inputs_BT.shape[1]
            )
        rows = flatten_pairs(batch)
        hidden_BTC = state.hidden(rows, dropout_keys_B)
        return self.sums_of(state.compute.model, hidden_BTC, rows, batch, loss_chunk)

    def sums_of(
        self, model: GPT, hidden_BTC: Tensor, rows: Batch, batch: Batch, loss_chunk: int
    ) -> dict[str, Tensor]:
        """Return the sums of `loss`, accuracy and, for pairs, reward_chosen and reward_rejected.

        For KTO, return those of `loss`, accuracy (answers with a positive margin) and kl.

        hidden_BTC: the model's hidden states of `rows`, the flattened `batch`.
        """
        assert isinstance(batch, PreferenceBatch)
        if self.name == "reward":
            scores = take_last(predict_values(model, hidden_BTC), rows.targets_BT)
            chosen, rejected = scores.view(-1, 2).unbind(1)
            losses = pairwise_loss(chosen, rejected)
        else:
            log_probs = answer_log_probs(model, hidden_BTC, rows, loss_chunk=loss_chunk).sum(1)
            if self.name == "kto":
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


def flatten_pairs(batch: Batch) -> Batch:
    """Return the rows of pairs (B, 2, T) as (2B, T)."""
    return Batch(batch.inputs_BT.flatten(0, 1), batch.targets_BT.flatten(0, 1))
