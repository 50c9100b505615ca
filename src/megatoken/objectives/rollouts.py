"""Batches of GRPO and PPO: answers sampled from the model as it stands, scored, and trained on `updates` times.

A rollout of n sequences is n / group prompts, in the order of data/window_order.py, with `group` answers each: the
batch of `updates` steps, the first of which is a multiple of `updates`. What an answer draws depends on (seed, rollout,
place in it) alone, so a resume at such a step samples the same text and nothing has to be saved. Log-probabilities are
those of the distribution that was sampled from, and the stop token is sampled and trained.

Shapes: P prompts, G answers to each; B rows of this process, one an answer; T tokens.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from megatoken.data.dataloader import Batch
from megatoken.data.window_order import CachedOrder, ShuffledOrder
from megatoken.errors import ConfigError, MegatokenError
from megatoken.model.gpt import GPT
from megatoken.objectives.answer_scores import measure_answers
from megatoken.objectives.policy_loss import gae, group_advantages, has_difference, moments, whiten
from megatoken.objectives.reference import load_reference
from megatoken.sampling.batch import Completion, Request, generate_batch
from megatoken.sampling.choose import Sampling
from megatoken.system.device import Device
from megatoken.train.run_context import RunContext
from megatoken.train.state import with_whole_model

DECODED_ROWS = 512  # at once
HELD_OUT_PROMPTS = 512  # that a validation answers, at most
QUIET_ROLLOUTS = 20  # in a row without a difference in any group, after which the run says so
Score = Callable[[Sequence["Prompt"], Sequence[Completion]], list[float]]


class Prompt(NamedTuple):
    """A prompt as ids that end with the assistant's header, its text, and the right answer."""

    ids: list[int]
    text: str
    right: str


class RolloutBatches:
    """Samples a rollout when its first batch is asked for. metrics: of the last one, over all processes."""

    def __init__(
        self,
        run: RunContext,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        stop_ids: Sequence[int],
        score: Score,
    ) -> None:
        """score: the rewards of answers. Raises ConfigError for prompts that the context or the batch does not hold."""
        objective, self._run, self._prompts = run.config.objective, run, prompts
        self._held_out, self._stop_ids, self._score = held_out[:HELD_OUT_PROMPTS], stop_ids, score
        check_prompts(
            [*prompts, *self._held_out], objective.max_new_tokens, run.model_config.seq_len
        )
        own = run.config.batch_seqs // run.state.dims.dp_size
        if own % objective.group:
            what = f"{own} sequences a process are not whole groups of {objective.group} answers"
            raise ConfigError(
                what, "objective.group", "set budget.batch_tokens to a multiple, or another group"
            )
        self._order = CachedOrder(ShuffledOrder(len(prompts), run.config.seed), len(prompts))
        self._reference: GPT | None = None
        if objective.kl:
            weights = load_reference(
                run, lambda model: {name: w.detach() for name, w in model.named_parameters()}
            )
            self._reference = copy.deepcopy(with_whole_model(run.state, run.device).compute_model)
            self._reference.load_state_dict(weights)
        self._quiet_rollouts = 0
        self._last: tuple[int, Batch] | None = None  # the rollout that is trained on
        self.metrics: dict[str, float] = {}

    def get(self, number: int) -> Batch:
        """The batch of the next step, by the model as it is at a rollout's first. `number - step` batches were skipped,
        each with the rest of its rollout. Raises what a reward raises, on all ranks.
        """
        step, updates = self._run.state.step, self._run.config.objective.updates
        rollout = number - step + step // updates
        if self._last is None or step % updates == 0 or self._last[0] != rollout:
            self._last = rollout, self._sample(rollout)
        return self._last[1]

    def _sample(self, number: int) -> Batch:
        """The rollout of a number by the model as it is."""
        run, objective = self._run, self._run.config.objective
        batch_seqs, dims = run.config.batch_seqs, run.state.dims
        own = batch_seqs // dims.dp_size
        first = dims.dp_rank * own  # of this process's sequences in the rollout
        windows = self._order.windows(
            (number * batch_seqs + first) // objective.group, own // objective.group
        )
        prompts = [
            self._prompts[window] for window in windows.tolist() for _ in range(objective.group)
        ]
        seeds = [sequence_seed(run.config.seed, number, first + row) for row in range(own)]
        model = with_whole_model(run.state, run.device).compute_model
        completions = self._answer(model, prompts, seeds)
        rewards = torch.tensor(
            score_on_all(run, self._score, prompts, completions), dtype=torch.float64
        )
        self._measure(rewards.view(-1, objective.group), completions)
        widths = (
            len(prompt.ids) + count_tokens(each)
            for prompt, each in zip(prompts, completions, strict=True)
        )
        return self._build(model, prompts, completions, rewards, max(run.comm.gather(max(widths))))

    def _answer(
        self, model: GPT, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[Completion]:
        run, objective = self._run, self._run.config.objective
        return answer_prompts(
            model,
            prompts,
            seeds,
            self._stop_ids,
            run.device,
            objective.max_new_tokens,
            temperature=objective.temperature,
        )

    def _build(
        self,
        model: GPT,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        rewards: Tensor,
        width: int,
    ) -> Batch:
        """Rows with what the objective needs of them (objectives/answer_scores.py), of the model that answered."""
        run, objective = self._run, self._run.config.objective
        batch, old_log_probs = build_rows(prompts, completions, width)
        mask, values = (batch.targets_BT >= 0).float(), {"log_probs": old_log_probs}
        device = run.device.torch_device
        batch = Batch(batch.inputs_BT.to(device), batch.targets_BT.to(device))
        measure = partial(
            measure_answers,
            step_config=run.step_config,
            device=run.device,
            batch=batch,
            temperature=objective.temperature,
        )
        if self._reference is not None:
            values["reference"] = measure(self._reference).cpu()
        if objective.name == "grpo":
            advantages = group_advantages(rewards.view(-1, objective.group)).flatten()
            values["advantages"] = advantages.float()[:, None] * mask
        else:
            ends = mask.cumsum(1).argmax(
                1
            )  # the first place at which all of the answer's tokens are counted
            rewards_BT = torch.zeros_like(mask).scatter_(1, ends[:, None], rewards.float()[:, None])
            if "reference" in values:
                rewards_BT -= objective.kl * (old_log_probs - values["reference"]) * mask
            values["values"] = measure(model, values=True).cpu() * mask
            advantages, values["returns"] = gae(
                rewards_BT, values["values"], mask, gamma=objective.gamma, lam=objective.lam
            )
            sums = run.comm.sum(moments(advantages, mask).to(run.device.widest).to(device)).cpu()
            values["advantages"] = whiten(advantages, mask, sums)
        return Batch(
            batch.inputs_BT,
            batch.targets_BT,
            values={name: x.to(device) for name, x in values.items()},
        )

    def _measure(self, rewards_PG: Tensor, completions: Sequence[Completion]) -> None:
        """Fill `metrics`; say once that the groups of QUIET_ROLLOUTS had no difference."""
        run, stopped = self._run, [each.finish_reason == "stop" for each in completions]
        own = rewards_PG, list(map(count_tokens, completions)), stopped
        parts = run.comm.gather(own)
        rewards = torch.cat([part[0] for part in parts])
        lengths, stops = ([float(x) for part in parts for x in part[n]] for n in (1, 2))
        differs = has_difference(rewards).double().mean().item()
        self.metrics = {
            "reward": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "groups_without_difference": 1 - differs,
            "answer_tokens": sum(lengths) / len(lengths),
            "stopped": sum(stops) / len(stops),
        }
        self._quiet_rollouts = 0 if differs or rewards.shape[1] == 1 else self._quiet_rollouts + 1
        if self._quiet_rollouts == QUIET_ROLLOUTS:
            steps = QUIET_ROLLOUTS * run.config.objective.updates
            what = f"all answers to each prompt got the same reward for {steps} steps, {rewards[0, 0]:g} at last"
            fix = "nothing is learnt: start from a model that is right sometimes, or take easier prompts"
            if rewards.mean() > 0:
                fix = "nothing more is learnt: read some answers, whether they are what was meant, or take harder prompts"
            run.console.warn(f"{what}; {fix}")
            run.write("event", what="no difference in rewards", share=1.0, message=what)

    def validate(self, poll: Callable[[], None]) -> dict[str, float]:
        """Of one answer to each held-out prompt, with the same draws every time: mean reward and its standard error,
        the share of answers that stop by themselves, their tokens; `loss` is the reward negated. Ranks share them.
        """
        run, dist_env = self._run, self._run.comm.dist_env
        own = range(dist_env.rank, len(self._held_out), dist_env.world_size)
        prompts = [self._held_out[number] for number in own]
        seeds = [sequence_seed(run.config.seed, -1, number) for number in own]
        poll()
        completions = self._answer(
            with_whole_model(run.state, run.device).compute_model, prompts, seeds
        )
        rewards = score_on_all(run, self._score, prompts, completions)
        stops = [float(each.finish_reason == "stop") for each in completions]
        lengths = [float(count_tokens(each)) for each in completions]
        parts = run.comm.gather((rewards, stops, lengths))
        all_rewards, all_stops, all_lengths = (
            torch.tensor([x for part in parts for x in part[n]]) for n in range(3)
        )
        mean, n = all_rewards.double().mean().item(), len(all_rewards)
        spread = all_rewards.double().std().item() if n > 1 else 0.0
        return {
            "loss": 0.0 - mean,  # not -0.0
            "reward": mean,
            "reward_stderr": spread / math.sqrt(n),
            "stopped": all_stops.mean().item(),
            "answer_tokens": all_lengths.mean().item(),
            "prompts": n,
        }

    def close(self) -> None:
        """Nothing is open."""


def check_prompts(prompts: Sequence[Prompt], max_new_tokens: int, seq_len: int) -> None:
    """Raise ConfigError where there is no prompt or an answer can outgrow the context."""
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    if not longest:
        raise ConfigError("the dataset holds no prompts for training", "data.path", "prepare more")
    if longest + max_new_tokens > seq_len:
        what = f"a prompt has {longest} tokens, with {max_new_tokens} of an answer more than the context of {seq_len}"
        raise ConfigError(
            what,
            "objective.max_new_tokens",
            "lower it, leave long prompts out, or raise model.seq_len",
        )


def sequence_seed(seed: int, rollout: int, sequence: int) -> int:
    """The seed of what an answer draws."""
    return xxhash.xxh3_64_intdigest(f"{seed} {rollout} {sequence}".encode()) >> 1


def answer_prompts(
    model: GPT,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    stop_ids: Sequence[int],
    device: Device,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
) -> list[Completion]:
    """An answer to each prompt with the seed beside it, from all ids; equal neighbours share work.

    The log-probabilities are those of the distribution at that temperature.
    """
    requests = [
        Request(
            prompt.ids,
            Sampling(max_new_tokens, temperature, seed=seed, stop_ids=stop_ids),
            logprobs=True,
            drawn_logprobs=True,
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    return generate_batch(model, requests, rows=DECODED_ROWS, device=device)


def count_tokens(completion: Completion) -> int:
    """Sampled tokens, that which stopped it among them."""
    return len(completion.logprobs)


def build_rows(
    prompts: Sequence[Prompt], completions: Sequence[Completion], width: int
) -> tuple[Batch, Tensor]:
    """Rows of prompt and answer, whose sampled tokens are the targets; their log-probabilities (B, T), else 0."""
    shape = len(prompts), width
    inputs, targets = (
        torch.zeros(shape, dtype=torch.int64),
        torch.full(shape, -1, dtype=torch.int64),
    )
    log_probs = torch.zeros(shape)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = [
            *prompt.ids,
            *completion.ids,
            *([] if completion.stop_id is None else [completion.stop_id]),
        ]
        inputs[row, : len(ids)] = torch.tensor(ids)
        answer = slice(len(prompt.ids) - 1, len(ids) - 1)
        targets[row, answer] = torch.tensor(ids[len(prompt.ids) :])
        log_probs[row, answer] = torch.tensor(completion.logprobs)
    return Batch(inputs, targets), log_probs


def score_on_all(
    run: RunContext, score: Score, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> list[float]:
    """The rewards of this process's answers. An error of one process is raised by all."""
    rewards: list[float] = []
    error: MegatokenError | None = None
    try:
        rewards = score(prompts, completions)
    except MegatokenError as raised:
        error = raised
    for found in run.comm.gather(error):
        if found is not None:
            raise found
    return rewards
