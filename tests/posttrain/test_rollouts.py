"""Sampled batches: what is trained, that nothing depends on the split, and the losses' gradients by other formulas."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.console import Console
from megatoken.base.system.device import Device
from megatoken.base.system.metrics_log import MetricsLogger
from megatoken.data.dataloader import Batch
from megatoken.distributed.preemption import PreemptionHandler
from megatoken.inference.batch import Completion
from megatoken.posttrain.answer_scores import AnswerScorer
from megatoken.posttrain.batches import RolloutBatch
from megatoken.posttrain.losses import PolicyLoss
from megatoken.posttrain.policy_loss import clipped_loss, clipped_value_loss, group_advantages
from megatoken.posttrain.rollouts import Prompt, RolloutBatches, Score, build_rows, sequence_seed
from megatoken.posttrain.settings import ObjectiveConfig
from megatoken.train.run import History, Run
from megatoken.train.state import Position, TrainState
from megatoken.train.step import StepMetrics, train_step
from tests.tiny_model import CPU, TINY_GPT, TINY_LLAMA, tiny_config, tiny_state, tiny_step_config

LOSS_CHUNK = 64
STOPS = (3, 5)
PROMPTS = [Prompt([7 + i, 20 + i, 40][: 2 + i % 2], f"p{i}", str(i)) for i in range(12)]


def count_low_ids(ids: Sequence[int]) -> float:
    return sum(id < 30 and id not in STOPS for id in ids) / 4


def pay_for_low_ids(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
    return [count_low_ids(each.ids) for each in completions]


@dataclass
class Job:
    """A state in training, and what its batches read of it."""

    state: TrainState
    run: Run
    scorer: AnswerScorer
    events: list[dict[str, object]]

    def step(self, batch: RolloutBatch, micro_batch: int = 8, **values: object) -> StepMetrics:
        config = self.run.config
        loss = PolicyLoss(config.objective.name, config.section(ObjectiveConfig))
        step_config = replace(tiny_step_config(micro_batch, **values), loss=loss)
        return train_step(self.state, step_config, CPU, batch)

    def log_probs(self, batch: RolloutBatch, temperature: float = 1.0) -> torch.Tensor:
        return self.scorer.log_probs(self.state.model, batch, temperature)


def open_run(
    out: Path, name: str = "grpo", *, model: ModelConfig = TINY_GPT, device: Device = CPU,
    batch: int = 8, **settings: object,
) -> Job:  # fmt: skip
    settings = {"name": name, "group": 4, "max_new_tokens": 6, "kl": 0.0, **settings}
    values = {f"objective__{key}": value for key, value in settings.items()}
    config = tiny_config(budget__batch_tokens=16 * batch, **values)
    state = tiny_state(model_config=replace(model, value_head=name == "ppo"))
    events = []
    run = Run(
        config=config,
        out=out,
        data=None,
        state=state,
        step_config=tiny_step_config(4, machine__loss_chunk=LOSS_CHUNK),
        device=device,
        comm=state.comm,
        dims=state.dims,
        console=Console(quiet=True),
        log_file=MetricsLogger(out),
        stop=PreemptionHandler(None),
        history=History(),
        observers=[events.append],
    )
    return Job(state, run, AnswerScorer(run.device, run.step_config), events)


def open_batches(run: Job, score: Score = pay_for_low_ids) -> RolloutBatches:
    return RolloutBatches(run.run, PROMPTS, PROMPTS[:5], STOPS, score)


def test_rows_train_the_answer_and_its_stop_token():
    prompts = [Prompt([7, 8], "", ""), Prompt([9], "", "")]
    stopped = Completion([11, 12], [-0.1, -0.2, -0.3], "stop", 3)
    batch, log_probs = build_rows(
        prompts, [stopped, Completion([13, 14], [-0.4, -0.5], "length")], 6
    )
    assert batch.inputs_BT.tolist() == [[7, 8, 11, 12, 3, 0], [9, 13, 14, 0, 0, 0]]
    assert batch.targets_BT.tolist() == [[-1, 11, 12, 3, -1, -1], [13, 14, -1, -1, -1, -1]]
    expected = torch.tensor([[0, -0.1, -0.2, -0.3, 0, 0], [-0.4, -0.5, 0, 0, 0, 0]])
    torch.testing.assert_close(log_probs, expected)


@pytest.mark.parametrize(
    ("model", "temperature"), [(TINY_GPT, 0.6), (TINY_LLAMA, 1.0), (TINY_LLAMA, 1.5)]
)
def test_log_probabilities_are_of_the_distribution_sampled_from(
    tmp_path: Path, model: ModelConfig, temperature: float
):
    run = open_run(tmp_path, model=model, temperature=temperature)
    batch = open_batches(run).get(0)
    again = run.log_probs(batch, temperature)
    assert torch.allclose(again, run.log_probs(batch)) is (temperature == 1.0)
    torch.testing.assert_close(batch.log_probs_BT, again, rtol=0, atol=2e-6)
    assert (again < 0).sum() == (batch.targets_BT >= 0).sum()


def test_sequences_have_seeds_of_their_own():
    assert (
        len({sequence_seed(*numbers) for numbers in itertools.product(range(9), repeat=3)}) == 729
    )


def mean_of_answers(values: torch.Tensor, batch: RolloutBatch) -> float:
    return values[batch.targets_BT >= 0].float().mean().item()


def test_clipping_acts_from_the_second_update_on(tmp_path: Path):
    """On values, too: what is clipped has the larger error of the two."""
    run, shares = open_run(tmp_path, "ppo", updates=3, value_clip=0.01), []
    batches = open_batches(run)
    for _ in range(3):
        batch = batches.get(run.state.position.next_batch)
        log_probs, values = run.log_probs(batch), run.scorer.values(run.state.model, batch)
        _, clipped = clipped_loss(log_probs, batch.log_probs_BT, batch.advantages_BT, clip=0.2)
        errors = clipped_value_loss(values, batch.values_BT, batch.returns_BT, clip=0.01)
        metrics = run.step(batch, optim__lr=3e-2, optim__schedule="constant").values
        shares.append(metrics["clip_share"])
        assert shares[-1] == pytest.approx(mean_of_answers(clipped, batch))
        assert metrics["value_loss"] == pytest.approx(mean_of_answers(errors, batch), rel=1e-5)
    assert shares[0] == 0 < 0.1 < min(shares[1:])


def test_a_skipped_batch_leaves_out_the_rest_of_its_rollout(tmp_path: Path):
    run, drawn = open_run(tmp_path, updates=2), []
    batches, empty = open_batches(run), Batch(torch.zeros(1, 1), torch.zeros(1, 1))
    batches._sample = lambda rollout: drawn.append(rollout) or empty
    for skipped, steps in (([], range(4)), ([3], (3, 4)), ([3, 5], (4, 5, 6))):
        for step in steps:
            run.state.position = Position(step=step).skip(*skipped)
            batches.get(run.state.position.next_batch)
    assert drawn == [0, 1, 2, 3, 4, 5]


def test_advantages_are_those_of_each_prompts_answers(tmp_path: Path):
    batches = open_batches(open_run(tmp_path))
    batch = batches.get(5)
    assert (batch.targets_BT == 0).any()  # 0 is a token like others
    answers, rewards = score_answers(batch)
    expected = group_advantages(rewards.view(2, 4)).flatten()[:, None]
    advantages = (expected * (batch.targets_BT >= 0)).float()
    torch.testing.assert_close(batch.advantages_BT, advantages, rtol=0, atol=1e-6)
    assert batches.metrics["reward"] == pytest.approx(rewards.mean().item())
    assert batches.metrics["answer_tokens"] == sum(map(len, answers)) / 8
    assert batches.metrics["stopped"] == sum(ids[-1] in STOPS for ids in answers) / 8


def score_answers(batch: RolloutBatch) -> tuple[list[list[int]], torch.Tensor]:
    answers = [row[row >= 0].tolist() for row in batch.targets_BT]
    return answers, torch.tensor([count_low_ids(ids) for ids in answers]).double()


def test_ppo_returns_are_the_rewards(tmp_path: Path):
    """With the values at 0 and lambda 1 every token's return is its answer's reward; advantages are whitened."""
    batch = open_batches(open_run(tmp_path, "ppo", lam=1.0)).get(0)
    mask = batch.targets_BT >= 0
    returns = (score_answers(batch)[1][:, None] * mask).float()
    torch.testing.assert_close(batch.returns_BT * mask, returns)
    advantages = batch.advantages_BT[mask]
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.std().item() == pytest.approx(1, abs=1e-4)
    assert batch.values_BT.abs().max() == 0


@pytest.mark.parametrize(("micro_batch", "temperature"), [(8, 1.0), (3, 0.6)])
def test_the_first_gradient_is_the_policy_gradient(
    tmp_path: Path, micro_batch: int, temperature: float
):
    """Where the model is the one that sampled, the clipped objective's gradient is that of -A log p over the tokens."""
    run = open_run(tmp_path, temperature=temperature)
    batch, model = open_batches(run).get(0), run.state.model
    log_probs = (model.logits(batch.inputs_BT) / temperature).log_softmax(-1)
    answer_BT = log_probs.gather(-1, batch.targets_BT.clamp(min=0)[..., None])[..., 0]
    loss = -(batch.advantages_BT * answer_BT).sum() / (batch.targets_BT >= 0).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    metrics = run.step(batch, micro_batch)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)
    assert metrics.values == {"clip_share": 0.0}


def test_answers_without_an_advantage_are_left_out_of_the_step(tmp_path: Path):
    """Loss, gradient and clipped share are those of all rows; one at least of each micro-batch is computed."""
    run, rows = open_run(tmp_path, batch=16, updates=2), []
    batch = open_batches(run).get(0)
    batch.advantages_BT[[0, 1, 2, 3, 4, 6, 7]] = 0
    generator = torch.Generator().manual_seed(0)
    batch.log_probs_BT.add_(torch.randn(batch.log_probs_BT.shape, generator=generator), alpha=0.3)
    losses, clipped = clipped_loss(
        run.log_probs(batch), batch.log_probs_BT, batch.advantages_BT, clip=0.2
    )
    forward = run.state.compute.forward
    run.state.compute = replace(
        run.state.compute,
        forward=lambda ids, **options: rows.append(len(ids)) or forward(ids, **options),
    )
    metrics = run.step(batch, 4)
    assert rows == [1, 1, 4, 4]
    assert metrics.loss == pytest.approx(mean_of_answers(losses, batch), rel=1e-5)
    assert metrics.values["clip_share"] == pytest.approx(mean_of_answers(clipped, batch))
    assert clipped.any()


@pytest.mark.parametrize(("name", "precision"), [("grpo", "bf16"), ("ppo", "fp32")])
def test_rewards_rise(tmp_path: Path, name: str, precision: str):
    run = open_run(tmp_path, name, device=replace(CPU, precision=precision), group=8)
    batches, rewards = open_batches(run), []
    settings = {"optim__lr": 1e-2, "optim__schedule": "constant"}
    for number in range(30):
        metrics = run.step(batches.get(number), **settings)
        rewards.append(batches.metrics["reward"])
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1.5
    assert ("value_loss" in metrics.values) is (name == "ppo")


def test_rollouts_without_a_difference_are_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megatoken.posttrain.rollouts.QUIET_ROLLOUTS", 3)
    run = open_run(tmp_path)
    batches = open_batches(run, lambda prompts, completions: [1.0] * len(completions))
    for number in range(4):
        assert len(run.events) == (number >= 3)
        metrics = run.step(batches.get(number), 4)
        assert metrics.loss == metrics.grad_norm == 0.0
    assert run.events[0]["what"] == "no difference in rewards"
    assert batches.metrics["groups_without_difference"] == 1.0
