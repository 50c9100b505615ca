"""Pairs of answers: what is compared, DPO's first step by other formulas, and a reward model that learns an order."""

import math
from dataclasses import replace

import pytest
import torch

from megatoken.config.objective_config import ObjectiveConfig
from megatoken.data.dataloader import Batch
from megatoken.model.gpt import GPT
from megatoken.objectives.answer_scores import AnswerScorer, take_last
from megatoken.objectives.batches import PreferenceBatch
from megatoken.objectives.objective import build_objective
from megatoken.objectives.preferences import Row, build_pairs, keep_rated, mismatch
from megatoken.system.device import Device
from megatoken.train.step import train_step
from tests.tiny_model import CPU, TINY_GPT, tiny_state, tiny_step_config

PAIRS = [
    (
        Row([7 + i, 20, 30 + i, 3], [False, False, True, True]),
        Row([7 + i, 20, 60 + i, 61, 3], [False] * 2 + [True] * 3),
    )
    for i in range(6)
]


def log_prob(model: GPT, row: Row) -> torch.Tensor:
    """Of the answer, token by token."""
    total = torch.zeros(())
    for t in range(1, len(row.ids)):
        if row.is_answer[t]:
            total = (
                total + model.logits(torch.tensor([row.ids[:t]]))[0, -1].log_softmax(-1)[row.ids[t]]
            )
    return total


def with_reference(batch: Batch, model: GPT) -> Batch:
    rows = Batch(batch.inputs_BT.flatten(0, 1), batch.targets_BT.flatten(0, 1))
    log_probs = AnswerScorer(device=CPU, micro_batch=4, loss_chunk=64).log_probs(model, rows)
    return PreferenceBatch(
        batch.inputs_BT, batch.targets_BT, reference_B2=log_probs.sum(1).view(-1, 2)
    )


def test_pairs_are_two_rows():
    batch = build_pairs(
        [(Row([7, 8, 3], [False, True, True]), Row([7, 9, 9, 3], [False, True, True, True]))], 16
    )
    assert batch.inputs_BT.tolist() == [[[7, 8, 3, 0], [7, 9, 9, 3]]]
    assert batch.targets_BT.tolist() == [[[8, 3, -1, -1], [9, 9, 3, -1]]]
    values = torch.arange(8.0).view(2, 4)
    assert take_last(values, batch.targets_BT[0]).tolist() == [
        2.0,
        7.0,
    ]  # where the stop token has been read


@pytest.mark.parametrize("micro_batch", [1, 4, 6])
def test_the_first_step_of_dpo(micro_batch: int):
    """Loss ln 2; the gradient is -beta / 2 that of the difference of both log-probabilities, averaged over pairs."""
    state, step_config = tiny_state(), tiny_step_config(micro_batch)
    state.objective = build_objective(ObjectiveConfig(name="dpo", beta=0.3), 64)
    batch = with_reference(build_pairs(PAIRS, 16), state.model)
    differences = torch.stack(
        [log_prob(state.model, chosen) - log_prob(state.model, bad) for chosen, bad in PAIRS]
    )
    (-0.15 * differences.mean()).backward()
    expected = torch.cat([param.grad.flatten() for param in state.model.parameters()]).norm().item()
    state.model.zero_grad()
    metrics = train_step(state, step_config, CPU, batch)
    assert metrics.loss == pytest.approx(math.log(2), abs=1e-6)
    assert metrics.grad_norm == pytest.approx(expected, rel=1e-4)
    assert metrics.values["reward_chosen"] == pytest.approx(0, abs=1e-6)


def test_dpo_prefers_the_chosen(device: Device):
    state = tiny_state()
    state.objective = build_objective(ObjectiveConfig(name="dpo"), 64)
    batch = with_reference(build_pairs(PAIRS, 16), state.model)
    step_config = tiny_step_config(2, optim__lr=3e-3, optim__schedule="constant")
    for _ in range(20):
        metrics = train_step(state, step_config, device, batch)
    assert metrics.loss < 0.5
    assert metrics.values["accuracy"] == 1.0
    assert metrics.values["reward_chosen"] > metrics.values["reward_rejected"] + 0.5


RATED = [
    row._replace(is_good=good)
    for pair in PAIRS
    for row, good in zip(pair, (True, False), strict=True)
]
MISMATCHED = [mismatch(row, RATED[(n + 3) % len(RATED)], 17) for n, row in enumerate(RATED)]


def rated_batch(model: GPT, reference: GPT) -> tuple[PreferenceBatch, float]:
    """Return a batch of KTO, and its KL estimate before it is clamped, by other formulas."""
    pairs = list(zip(RATED, MISMATCHED, strict=True))
    batch = with_reference(build_pairs(pairs, 16), reference)
    differences = [
        log_prob(model, row).item() - log_prob(reference, row).item() for row in MISMATCHED
    ]
    kl = sum(differences) / len(differences)
    is_good = torch.tensor([row.is_good for row in RATED])
    return keep_rated(replace(batch, is_good_B=is_good), differences), kl


def test_a_mismatched_answer_follows_another_prompt():
    row, other = PAIRS[0][0], PAIRS[1][1]
    found = mismatch(row, other, 17)
    assert found.ids == [7, 20, 61, 61, 3]
    assert found.is_answer == [False, False, True, True, True]
    assert mismatch(row, other, 3).ids == [7, 20, 61]


@pytest.mark.parametrize("micro_batch", [1, 4, 12])
@pytest.mark.parametrize("sign", [1, -1])  # of the KL estimate
def test_a_step_of_kto(micro_batch: int, sign: int):
    state, step_config = tiny_state(), tiny_step_config(micro_batch)
    config = ObjectiveConfig(name="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    state.objective = build_objective(config, 64)
    other = GPT(TINY_GPT, seed=3 if sign > 0 else 2)
    batch, kl = rated_batch(state.model, other)
    assert kl * sign > 0.01
    losses = []
    for row in RATED:
        ratio = log_prob(state.model, row) - log_prob(other, row).detach()
        margin = 0.3 * (ratio - max(kl, 0.0))
        value = torch.sigmoid(margin if row.is_good else -margin)
        losses.append((1.5 if row.is_good else 0.5) * (1 - value))
    loss = torch.stack(losses).mean()
    loss.backward()
    expected = torch.cat([param.grad.flatten() for param in state.model.parameters()]).norm().item()
    state.model.zero_grad()
    metrics = train_step(state, step_config, CPU, batch)
    assert metrics.loss == pytest.approx(loss.item(), abs=1e-6)
    assert metrics.grad_norm == pytest.approx(expected, rel=1e-4)
    assert metrics.values["kl"] == pytest.approx(max(kl, 0.0), abs=1e-6)


def test_kto_separates_good_and_bad_answers(device: Device):
    state = tiny_state()
    reference = GPT(TINY_GPT, seed=1)
    state.objective = build_objective(ObjectiveConfig(name="kto"), 64)
    step_config = tiny_step_config(4, optim__lr=3e-3, optim__schedule="constant")
    batch, _ = rated_batch(state.model, reference)
    for _ in range(20):
        metrics = train_step(state, step_config, device, batch)
    gains = [(log_prob(state.model, row) - log_prob(reference, row)).item() for row in RATED]
    assert metrics.loss < 0.45  # 0.5 at first
    assert metrics.values["accuracy"] == 1.0
    assert min(gains[::2]) > 0 > max(gains[1::2])


def test_a_reward_model_learns_the_order(device: Device):
    state = tiny_state(model_config=replace(TINY_GPT, value_head=True))
    state.objective = build_objective(ObjectiveConfig(name="reward"), 64)
    pairs = build_pairs(PAIRS, 16)
    batch = PreferenceBatch(pairs.inputs_BT, pairs.targets_BT)
    losses = []
    accuracies = []
    for _ in range(20):
        metrics = train_step(
            state, tiny_step_config(4, optim__lr=3e-3, optim__schedule="constant"), device, batch
        )
        losses.append(metrics.loss)
        accuracies.append(metrics.values["accuracy"])
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # the head starts at 0
    assert losses[-1] < 0.3
    assert accuracies[0] == 0.0  # equal rewards are no preference
    assert accuracies[-1] == 1.0
