"""The losses of preferences and of sampled completions, in fp32."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.data.dataloader import Batch
from megatoken.model.gpt import GPT
from megatoken.posttrain.answer_scores import answer_log_probs, take_last
from megatoken.posttrain.batches import PreferenceBatch, RolloutBatch
from megatoken.posttrain.policy_loss import clipped_loss, clipped_value_loss, kl_k3
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
            # A completion with an advantage of 0 adds 0 to the loss and to every gradient.
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
    """DPO and reward models: `pairwise_loss` of two answers. KTO: a loss of rated answers.

    DPO's score of an answer is its implicit reward, beta (log p - log p_reference) (Direct
    preference optimization, Rafailov et al. 2023, equation 7). The loss is ln 2 if the model equals
    its reference. KTO's loss is w (1 - sigmoid(m)); the margin m is beta (log p - log p_reference -
    KL) for a desirable answer, and its negative for an undesirable one (KTO: model alignment as
    prospect theoretic optimization, Ethayarajh et al. 2024).
    """

    name: str
    config: ObjectiveConfig

    def count(self, state: TrainState, batch: Batch) -> Tensor:
        return torch.full((), len(batch), device=batch.inputs_BT.device)

    def sums(
        self, state: TrainState, batch: Batch, dropout_keys_B: Tensor | None, loss_chunk: int
    ) -> dict[str, Tensor]:
        if dropout_keys_B is not None:  # the same masks for both answers
            dropout_keys_B = dropout_keys_B.repeat_interleave(batch.inputs_BT.shape[1])
        hidden_BTC = state.hidden(flatten_pairs(batch), dropout_keys_B)
        return self.sums_of(state.compute.model, hidden_BTC, batch, loss_chunk)

    def sums_of(
        self, model: GPT, hidden_BTC: Tensor, batch: Batch, loss_chunk: int
    ) -> dict[str, Tensor]:
        """Return the sums of `loss`, accuracy and, for pairs, reward_chosen and reward_rejected.

        For KTO, return those of `loss`, accuracy (answers with a positive margin) and kl.

        hidden_BTC: the model's hidden states of the flattened `batch`.
        """
        assert isinstance(batch, PreferenceBatch)
        rows = flatten_pairs(batch)
        if self.name == "reward":
            scores_B = take_last(predict_values(model, hidden_BTC), rows.targets_BT)
        else:
            log_probs_B = answer_log_probs(model, hidden_BTC, rows, loss_chunk=loss_chunk).sum(1)
            if self.name == "kto":
                return self._sum_kto(log_probs_B, batch)
            assert batch.reference_B2 is not None
            scores_B = self.config.beta * (log_probs_B - batch.reference_B2.flatten())
        chosen_B, rejected_B = scores_B.view(-1, 2).unbind(1)
        return {
            "loss": pairwise_loss(chosen_B, rejected_B).sum(),
            "accuracy": (chosen_B > rejected_B).sum().detach(),
            "reward_chosen": chosen_B.sum().detach(),
            "reward_rejected": rejected_B.sum().detach(),
        }

    def _sum_kto(self, log_probs_B: Tensor, batch: PreferenceBatch) -> dict[str, Tensor]:
        is_good_B, kl_B, reference_B2 = batch.is_good_B, batch.kl_B, batch.reference_B2
        assert is_good_B is not None
        assert kl_B is not None
        assert reference_B2 is not None
        config = self.config
        signs = torch.where(is_good_B, 1.0, -1.0)
        weights = torch.where(is_good_B, config.desirable_weight, config.undesirable_weight)
        margins = signs * config.beta * (log_probs_B - reference_B2[:, 0] - kl_B)
        losses = weights * (1 - torch.sigmoid(margins))
        return {"loss": losses.sum(), "accuracy": (margins > 0).sum(), "kl": kl_B.sum()}


def pairwise_loss(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """Return (B,) -log of the probability that the chosen answer wins (Bradley and Terry 1952).

    Applied to scores of a reward model, this is its training loss (Ouyang et al. 2022, equation 1).
    """
    return -F.logsigmoid(chosen_B - rejected_B)


def flatten_pairs(batch: Batch) -> Batch:
    """Return the rows of pairs (B, 2, T) as (2B, T)."""
    return Batch(batch.inputs_BT.flatten(0, 1), batch.targets_BT.flatten(0, 1))
