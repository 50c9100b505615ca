"""Advantages, the clipped objective, KL and values of GRPO and PPO, in fp32.

Sources: PPO, Schulman et al. 2017; GAE, Schulman et al. 2016; GRPO, Shao et al. 2024
(DeepSeekMath); mean over the tokens of a batch, Yu et al. 2025 (DAPO); the KL estimator k3,
Schulman 2020 (joschu.net/blog/kl-approx.html).

Shapes: P prompts, G completions of each; B completions, T tokens. Masks are 1 at their tokens.
"""

import torch
from torch import Tensor

STD_OFFSET = 1e-4
VARIANCE_OFFSET = 1e-8


def group_advantages(rewards_PG: Tensor) -> Tensor:
    """Normalize rewards (P, G) within each group: subtract the mean, divide by the deviation.

    If a group's rewards are equal, its advantages are exactly 0; adaptive optimizers would amplify
    rounding errors.
    """
    deviation = rewards_PG - rewards_PG.mean(1, keepdim=True)
    normalized = deviation / (rewards_PG.std(1, keepdim=True) + STD_OFFSET)
    return normalized * has_difference(rewards_PG)[:, None]


def has_difference(rewards_PG: Tensor) -> Tensor:
    """Return (P,): whether a group's rewards differ. If they are equal, they give no gradient."""
    return rewards_PG.amax(1) > rewards_PG.amin(1)


def clipped_loss(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """Return (B, T) losses -min(r A, clamp(r, 1 - clip, 1 + clip) A), and which are clipped.

    A is the advantage, and r the ratio of a token's probability to its probability when it was
    sampled. Clipped tokens have no gradient.
    """
    ratio = (log_probs_BT - old_log_probs_BT).exp()
    free = ratio * advantages_BT
    clamped = ratio.clamp(1 - clip, 1 + clip) * advantages_BT
    return -torch.minimum(free, clamped), (clamped < free).detach()


def kl_k3(log_probs_BT: Tensor, reference_BT: Tensor) -> Tensor:
    """Return an unbiased estimate >= 0 of KL(model || reference) per sampled token (B, T)."""
    difference = reference_BT - log_probs_BT
    return torch.expm1(difference) - difference


def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimates and returns, both (B, T) and 0 outside the mask.

    values_BT: the value of the state from which each token is chosen. The tokens of a completion
    must be contiguous; the last one ends the episode.
    """
    advantages = torch.zeros_like(rewards_BT)
    following = torch.zeros_like(rewards_BT[:, 0])
    next_value = following
    for t in reversed(range(rewards_BT.shape[1])):
        inside = mask_BT[:, t]
        error = rewards_BT[:, t] + gamma * next_value - values_BT[:, t]
        following = (error + gamma * lam * following) * inside
        next_value = values_BT[:, t] * inside
        advantages[:, t] = following
    return advantages, (advantages + values_BT) * mask_BT


def moments(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return [sum, sum of squares, count] of the masked values in fp64, to be summed over ranks."""
    values = values_BT.double() * mask_BT
    return torch.stack([values.sum(), values.square().sum(), mask_BT.double().sum()])


def whiten(values_BT: Tensor, mask_BT: Tensor, sums: Tensor) -> Tensor:
    """Normalize the masked values to mean 0 and variance 1.

    sums: what `moments` returns, summed over all ranks.
    """
    total, squares, count = sums.unbind()
    mean = total / count
    variance = (squares / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)
    return ((values_BT - mean) * (variance + VARIANCE_OFFSET).rsqrt()).to(values_BT.dtype) * mask_BT


def clipped_value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, *, clip: float
) -> Tensor:
    """Return half the larger of two squared errors (B, T): the value's and the clipped value's.

    The clipped value differs from the old value by at most `clip`.
    """
    near = torch.maximum(torch.minimum(values_BT, old_values_BT + clip), old_values_BT - clip)
    return 0.5 * torch.maximum((values_BT - returns_BT).square(), (near - returns_BT).square())
