"""Pairs of answers: what is compared, and steps and learning of DPO, KTO and a reward model by other formulas."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatoken.data.dataloader import Batch
from megatoken.model.gpt import GPT
from megatoken.posttrain.answer_scores import AnswerScorer, take_last
from megatoken.posttrain.batches import PreferenceBatch
from megatoken.posttrain.losses import PreferenceLoss, pairwise_loss
from megatoken.posttrain.preferences import EncodedConversation, build_pairs, keep_rated, mismatch
from megatoken.posttrain.settings import ObjectiveConfig
from megatoken.train.state import Loss, TrainState
from megatoken.train.step import train_step
from tests.tiny_model import CPU, TINY_GPT, tiny_config, tiny_state, tiny_step_config

PAIRS = [
    (
        EncodedConversation([7 + i, 20, 30 + i, 3], [False, False, True, True]),
        EncodedConversation([7 + i, 20, 60 + i, 61, 3], [False, False, True, True, True]),
    )
    for i in range(6)
]


def log_prob(model: GPT, row: EncodedConversation) -> torch.Tensor:
    """Of the answer, token by token."""
    tokens = [
        model.logits(torch.tensor([row.ids[:t]]))[0, -1].log_softmax(-1)[row.ids[t]]
        for t in range(1, len(row.ids))
        if row.is_answer[t]
    ]
    return torch.stack(tokens).sum()


def with_reference(batch: Batch, model: GPT) -> PreferenceBatch:
    rows = Batch(batch.inputs_BT.flatten(0, 1), batch.targets_BT.flatten(0, 1))
    log_probs = AnswerScorer(CPU, tiny_step_config(4)).log_probs(model, rows)
    sums = log_probs.sum(1).view(-1, 2)
    return PreferenceBatch(batch.inputs_BT, batch.targets_BT, reference_B2=sums)


def test_pairs_are_two_rows():
    pair = (
        EncodedConversation([7, 8, 3], [False, True, True]),
        EncodedConversation([7, 9, 9, 3], [False, True, True, True]),
    )
    batch = build_pairs([pair], 16)
    assert batch.inputs_BT.tolist() == [[[7, 8, 3, 0], [7, 9, 9, 3]]]
    assert batch.targets_BT.tolist() == [[[8, 3, -1, -1], [9, 9, 3, -1]]]
    last = take_last(torch.arange(8.0).view(2, 4), batch.targets_BT[0])
    assert last.tolist() == [2.0, 7.0]  # where the stop token has been read


def test_the_pairwise_loss_is_the_chance_that_the_worse_wins():
    losses = pairwise_loss(torch.tensor([2.0, 0.0, -1000.0]), torch.tensor([0.0, 2.0, 0.0]))
    assert losses.tolist() == pytest.approx([0.12692801, 2.12692801, 1000.0], abs=1e-6)


ROWS = [row for pair in PAIRS for row in pair]
RATED = [row._replace(is_good=n % 2 == 0) for n, row in enumerate(ROWS)]
MISMATCHED = [mismatch(row, RATED[(n + 3) % len(RATED)], 17) for n, row in enumerate(RATED)]


def rated_batch(model: GPT, reference: GPT) -> tuple[PreferenceBatch, float]:
    """Return a batch of KTO, and its KL estimate before it is clamped, by other formulas."""
    batch = with_reference(build_pairs(list(zip(RATED, MISMATCHED, strict=True)), 16), reference)
    ratios = [(log_prob(model, row) - log_prob(reference, row)).item() for row in MISMATCHED]
    is_good = torch.tensor([row.is_good for row in RATED])
    return keep_rated(replace(batch, is_good_B=is_good), ratios), sum(ratios) / len(ratios)


def test_a_mismatched_answer_follows_another_prompt():
    row, other = PAIRS[0][0], PAIRS[1][1]
    assert mismatch(row, other, 17)[:2] == ([7, 20, 61, 61, 3], [False] * 2 + [True] * 3)
    assert mismatch(row, other, 3).ids == [7, 20, 61]


def open_state(name: Any, **values: float) -> tuple[TrainState, Loss]:
    state = tiny_state(model_config=replace(TINY_GPT, value_head=name == "reward"))
    settings = tiny_config(**{f"objective__{key}": value for key, value in values.items()})
    return state, PreferenceLoss(name, settings.section(ObjectiveConfig))


def assert_step(
    opened: tuple[TrainState, Loss], batch: Batch, loss: torch.Tensor, micro_batch: int
) -> dict[str, float]:
    """Compare a step with the loss and the norm of its gradient; return what is logged."""
    state, objective = opened
    params = list(state.model.parameters())
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    norm = torch.cat([grad.flatten() for grad in grads if grad is not None]).norm().item()
    step_config = replace(tiny_step_config(micro_batch), loss=objective)
    metrics = train_step(state, step_config, CPU, batch)
    assert metrics.loss == pytest.approx(loss.item(), abs=1e-6)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)
    return metrics.values


@pytest.mark.parametrize("micro_batch", [1, 4, 6])
def test_a_step_of_dpo(micro_batch: int):
    opened, reference = open_state("dpo", beta=0.3), GPT(TINY_GPT, seed=3)
    state = opened[0]
    batch = with_reference(build_pairs(PAIRS, 16), reference)
    ratios = [log_prob(state.model, row) - log_prob(reference, row).detach() for row in ROWS]
    rewards = 0.3 * torch.stack(ratios)
    margins = rewards[::2] - rewards[1::2]
    logged = assert_step(opened, batch, (1 + (-margins).exp()).log().mean(), micro_batch)
    assert logged["accuracy"] == pytest.approx((margins > 0).float().mean().item())
    for start, name in enumerate(("reward_chosen", "reward_rejected")):
        assert logged[name] == pytest.approx(rewards[start::2].mean().item(), abs=1e-5)


@pytest.mark.parametrize(("micro_batch", "sign"), [(1, 1), (4, -1), (12, 1)])  # of the KL estimate
def test_a_step_of_kto(micro_batch: int, sign: int):
    opened = open_state("kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    state = opened[0]
    other = GPT(TINY_GPT, seed=3 if sign > 0 else 2)
    batch, kl = rated_batch(state.model, other)
    assert kl * sign > 0.01
    losses = []
    for row in RATED:
        ratio = log_prob(state.model, row) - log_prob(other, row).detach()
        margin = 0.3 * (ratio - max(kl, 0.0))
        weight, signed = (1.5, margin) if row.is_good else (0.5, -margin)
        losses.append(weight * (1 - torch.sigmoid(signed)))
    logged = assert_step(opened, batch, torch.stack(losses).mean(), micro_batch)
    assert logged["kl"] == pytest.approx(max(kl, 0.0), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "first", "last"), [("dpo", 0.69315, 0.5), ("kto", 0.5, 0.45), ("reward", 0.69315, 0.3)]
)
def test_an_objective_learns_in_bf16(name: str, first: float, last: float):
    (state, loss), reference = open_state(name), GPT(TINY_GPT, seed=1)
    batch = with_reference(build_pairs(PAIRS, 16), reference)
    if name == "kto":
        batch, _ = rated_batch(state.model, reference)
    step_config = tiny_step_config(4, optim__lr=3e-3, optim__schedule="constant")
    step_config = replace(step_config, loss=loss)
    bf16 = replace(CPU, precision="bf16")
    begin, *_, end = [train_step(state, step_config, bf16, batch) for _ in range(20)]
    assert begin.loss == pytest.approx(first, abs=1e-2)
    assert end.loss < last
    assert end.values["accuracy"] == 1.0
    # Equal rewards express no preference.
    assert name != "reward" or begin.values["accuracy"] == 0.0
