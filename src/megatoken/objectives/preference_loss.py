"""Losses for preferences between two answers to a prompt, in fp32, one loss per pair.

Shapes: B pairs, each a chosen and a rejected answer.
"""

import torch.nn.functional as F
from torch import Tensor


def dpo_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    *,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (losses, chosen rewards, rejected rewards), all (B,), from summed log-probabilities.

    The loss is -log sigmoid(r_chosen - r_rejected), where r = beta (log p - log p_reference) is the
    implicit reward (Direct preference optimization, Rafailov et al. 2023, equation 7). It is ln 2
    if the model equals its reference. Only the losses are differentiable.
    """
    chosen = beta * (chosen_B - reference_chosen_B)
    rejected = beta * (rejected_B - reference_rejected_B)
    return pairwise_loss(chosen, rejected), chosen.detach(), rejected.detach()


def pairwise_loss(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """Return (B,) -log of the probability that the chosen answer wins (Bradley and Terry 1952).

    Applied to scores of a reward model, this is its training loss (Ouyang et al. 2022, equation 1).
    """
    return -F.logsigmoid(chosen_B - rejected_B)
