"""Losses for preferences, in fp32: of pairs of answers, and of single answers (KTO).

Shapes: B pairs, each a chosen and a rejected answer, or B answers.
"""

import torch
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


def kto_loss(
    log_probs_B: Tensor,
    reference_B: Tensor,
    kl_B: Tensor,
    is_good_B: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> tuple[Tensor, Tensor]:
    """Return (losses, margins), both (B,), from summed log-probabilities of rated answers.

    The loss is w (1 - sigmoid(m)), where the margin m is beta (log p - log p_reference - KL) for a
    desirable answer, and its negative for an undesirable one (KTO: model alignment as prospect
    theoretic optimization, Ethayarajh et al. 2024). kl_B: estimate of the KL divergence from the
    reference, at least 0. Only the losses are differentiable.
    """
    signs = torch.where(is_good_B, 1.0, -1.0)
    weights = torch.where(is_good_B, desirable_weight, undesirable_weight)
    margins = signs * beta * (log_probs_B - reference_B - kl_B)
    return weights * (1 - torch.sigmoid(margins)), margins.detach()


def pairwise_loss(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
    """Return (B,) -log of the probability that the chosen answer wins (Bradley and Terry 1952).

    Applied to scores of a reward model, this is its training loss (Ouyang et al. 2022, equation 1).
    """
    return -F.logsigmoid(chosen_B - rejected_B)
