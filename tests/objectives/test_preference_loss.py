"""DPO, KTO and the loss of a reward model against their papers' formulas, and trl's figures."""

import math

import pytest
import torch

from megatoken.objectives.preference_loss import dpo_loss, kto_loss, pairwise_loss


def test_dpo_is_equation_7_of_its_paper():
    draws = [
        -5 * torch.rand(16, generator=torch.Generator().manual_seed(seed)).double()
        for seed in range(4)
    ]
    policy_w, policy_l, ref_w, ref_l = (
        each.exp() for each in draws
    )  # as probabilities, as in the paper
    losses, chosen, rejected = dpo_loss(*draws, beta=0.3)
    ratio = (policy_w / ref_w) ** 0.3 / (policy_l / ref_l) ** 0.3
    torch.testing.assert_close(losses, (1 + 1 / ratio).log(), rtol=0, atol=1e-12)
    torch.testing.assert_close(chosen - rejected, ratio.log(), rtol=0, atol=1e-12)


def test_the_gradient_of_dpo_weighs_wrongly_ordered_pairs_more():
    """Beneath equation 7: beta s(r_rejected - r_chosen), up for the chosen, down for the rejected."""
    chosen = torch.tensor([-3.0, -9.0], requires_grad=True)
    rejected = torch.tensor([-9.0, -3.0], requires_grad=True)
    reference = torch.tensor([-6.0, -6.0])
    dpo_loss(chosen, rejected, reference, reference, beta=0.5)[0].sum().backward()
    weights = [0.5 / (1 + math.exp(3)), 0.5 / (1 + math.exp(-3))]
    assert chosen.grad.tolist() == pytest.approx([-w for w in weights], abs=1e-7)
    assert rejected.grad.tolist() == pytest.approx(weights, abs=1e-7)


def test_the_pairwise_loss_is_the_chance_that_the_worse_wins():
    losses = pairwise_loss(torch.tensor([2.0, 0.0, -1000.0]), torch.tensor([0.0, 2.0, 0.0]))
    assert losses.tolist() == pytest.approx([0.12692801, 2.12692801, 1000.0], abs=1e-6)


def test_kto_weighs_both_kinds_of_answers():
    """Its gradient is w beta s (1 - s), up for the desirable and down for the undesirable answer."""
    log_probs = torch.tensor([-3.0, -3.0, -9.0, -9.0], requires_grad=True)
    good = torch.tensor([True, False, True, False])
    losses, margins = kto_loss(
        log_probs,
        torch.full((4,), -6.0),
        torch.full((4,), 1.0),
        good,
        beta=0.5,
        desirable_weight=3.0,
        undesirable_weight=2.0,
    )
    losses.sum().backward()
    expected = [1.0, -1.0, -2.0, 2.0]  # beta (+-3 - 1)
    assert margins.tolist() == expected
    values = [1 / (1 + math.exp(-m)) for m in expected]
    weights = [3.0, 2.0, 3.0, 2.0]
    assert losses.tolist() == pytest.approx(
        [w * (1 - v) for w, v in zip(weights, values, strict=True)]
    )
    gradient = [w * 0.5 * v * (1 - v) for w, v in zip(weights, values, strict=True)]
    assert log_probs.grad.tolist() == pytest.approx(
        [-gradient[0], gradient[1], -gradient[2], gradient[3]]
    )
