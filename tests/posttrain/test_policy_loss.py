"""Advantages, the clipped objective, KL and values against formulas written out token by token from the papers."""

import statistics

import pytest
import torch

from megatoken.posttrain.policy_loss import (
    clipped_loss,
    clipped_value_loss,
    gae,
    group_advantages,
    has_difference,
    kl_k3,
    moments,
    whiten,
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_group_advantages_are_standard_scores_and_0_without_a_difference():
    rewards = draw(5, 8)
    for row, found in zip(rewards.tolist(), group_advantages(rewards).tolist(), strict=True):
        mean, deviation = statistics.mean(row), statistics.stdev(row)
        assert found == pytest.approx([(r - mean) / (deviation + 1e-4) for r in row], abs=1e-12)
    equal = torch.full((1, 3), 0.1, dtype=torch.float64)  # whose mean is rounded
    assert group_advantages(equal).tolist() == [[0.0, 0.0, 0.0]]
    assert (has_difference(rewards).all(), has_difference(equal).any()) == (True, False)


def test_the_clipped_objective_is_figure_1_of_ppo():
    """A good token is clipped above a ratio of 1 + clip, a bad one below 1 - clip."""
    ratios = torch.tensor([1.0, 1.5, 0.5, 0.5, 1.5])
    advantages = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0])
    old = torch.full((5,), -1.0)
    new = (old + ratios.log()).requires_grad_()
    losses, was_clipped = clipped_loss(new, old, advantages, clip=0.2)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-2.0, -2.4, -1.0, 1.6, 3.0], abs=1e-6)
    assert was_clipped.tolist() == [False, True, False, True, False]
    assert new.grad.tolist() == pytest.approx([-2.0, 0.0, -1.0, 0.0, 3.0], abs=1e-6)


def test_k3_is_unbiased_and_never_negative():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    estimates = kl_k3(p.log(), q.log())
    assert estimates.min() >= 0
    assert (p * estimates).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


def test_gae_is_the_weighted_sum_of_temporal_differences():
    """Equation 16 of Schulman et al. 2016, each advantage by its own sum; answers of 6, 3 and 1 tokens."""
    rewards, values, lengths, gamma, lam = draw(3, 6), draw(3, 6, seed=1), [6, 3, 1], 0.9, 0.7
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).double()
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row, n in enumerate(lengths):
        r, v = rewards[row].tolist(), [*values[row, :n].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        expected = [sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]
        assert advantages[row].tolist() == pytest.approx(expected + [0.0] * (6 - n), abs=1e-12)
    torch.testing.assert_close(returns, (advantages + values) * mask)


def test_whitening_does_not_depend_on_the_split():
    values, mask = draw(4, 6).float(), (draw(4, 6, seed=1) > 0).float()
    sums = moments(values[:1], mask[:1]) + moments(values[1:], mask[1:])
    torch.testing.assert_close(sums, moments(values, mask))
    assert whiten(values, mask, sums)[mask == 0].abs().max() == 0


def test_values_are_clipped_where_that_costs_more():
    values, returns = torch.tensor([[1.0, 1.0, -1.0], [2.0, 0.5, 0.0]]).unsqueeze(1)
    values.requires_grad_()
    losses = clipped_value_loss(values, torch.zeros(1, 3), returns, clip=0.2)
    # 1 is within 0.2 of 0 as 0.2; against 2 that is the larger error, against 0.5 the value's own is.
    assert losses[0].tolist() == pytest.approx([0.5 * 1.8**2, 0.5 * 0.5**2, 0.5])
    losses.sum().backward()
    assert values.grad[0].tolist() == pytest.approx([0.0, 0.5, -1.0])
