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
from megatoken.objectives.preferences import Row, build_pairs
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
