"""Reinforcement from rewards of sampled answers: advantages, the clipped objective, KL, values. All in fp32.

Sources: PPO, Schulman et al. 2017; GAE, Schulman et al. 2016; GRPO, Shao et al. 2024 (DeepSeekMath); mean over the
tokens of a batch, Yu et al. 2025 (DAPO); the KL estimator k3, Schulman 2020 (joschu.net/blog/kl-approx.html).

Shapes: P prompts, G answers to each; B answers, T tokens. Masks are 1 at an answer's tokens.
"""

import torch
from torch import Tensor

STD_OFFSET = 1e-4
VARIANCE_OFFSET = 1e-8


def group_advantages(rewards_PG: Tensor) -> Tensor:
    """Each answer's reward relative to its group: less the mean, divided by the standard deviation (PG).

    Exactly 0 in a group without a difference: an optimizer that divides by the gradient's size would enlarge rounding.
    """
    deviation = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return (
        deviation
        / (rewards_PG.std(1, keepdim=True) + STD_OFFSET)
        * has_difference(rewards_PG)[:, None]
    )


def has_difference(rewards_PG: Tensor) -> Tensor:
    """Whether the answers of a group got different rewards (P, bool); without, the group teaches nothing."""
    return rewards_PG.amax(1) > rewards_PG.amin(1)


def clipped_loss(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """(loss, whether the ratio was clipped) of each token, BT each: -min(r A, clamp(r, 1 - clip, 1 + clip) A).

    r is the ratio of a token's probability to that with which it was sampled. A clipped token has no gradient.
    """
    ratio = (log_probs_BT - old_log_probs_BT).exp()
    free, clamped = ratio * advantages_BT, ratio.clamp(1 - clip, 1 + clip) * advantages_BT
    return -torch.minimum(free, clamped), (clamped < free).detach()


def kl_k3(log_probs_BT: Tensor, reference_BT: Tensor) -> Tensor:
    """An unbiased estimate, never negative, of KL(model || reference) at each sampled token (BT)."""
    difference = reference_BT - log_probs_BT
    return torch.expm1(difference) - difference


def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), BT each, 0 outside of the mask: generalized advantage estimation.

    values: of the state in which a token is chosen. The answer's last token ends the episode. The tokens of an answer
    lie in a row.
    """
    advantages, following = torch.zeros_like(rewards_BT), torch.zeros_like(rewards_BT[:, 0])
    next_value = following
    for t in reversed(range(rewards_BT.shape[1])):
        inside = mask_BT[:, t]
        error = rewards_BT[:, t] + gamma * next_value - values_BT[:, t]
        following = (error + gamma * lam * following) * inside
        next_value = values_BT[:, t] * inside
        advantages[:, t] = following
    return advantages, (advantages + values_BT) * mask_BT


def moments(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(sum, sum of squares, number) of the masked values, in double precision: what ranks add before `whiten`."""
    values = values_BT.double() * mask_BT
    return torch.stack([values.sum(), values.square().sum(), mask_BT.double().sum()])


def whiten(values_BT: Tensor, mask_BT: Tensor, sums: Tensor) -> Tensor:
    """The masked values with mean 0 and variance 1, unbiased, over all values behind `sums`, of `moments`; else 0."""
    total, squares, count = sums.unbind()
    mean = total / count
    variance = (squares / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)
    return ((values_BT - mean) * (variance + VARIANCE_OFFSET).rsqrt()).to(values_BT.dtype) * mask_BT


def clipped_value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, *, clip: float
) -> Tensor:
    """Half the squared error of each value (BT), the larger of that of the value and of it within `clip` of the old."""
    near = torch.maximum(torch.minimum(values_BT, old_values_BT + clip), old_values_BT - clip)
    return 0.5 * torch.maximum((values_BT - returns_BT).square(), (near - returns_BT).square())
