"""Batches of GRPO and PPO: completions sampled from the current model, scored, and trained on.

A rollout of n sequences consists of n / group prompts with `group` completions each. It is the batch
of `updates` consecutive steps. A completion depends only on the seed, the rollout's number, the
completion's index in the rollout, and the weights, so a run that resumes at the start of a rollout
samples the same text. Log-probabilities are those at the sampling temperature.
The stop token is sampled and trained on.

Shapes: P prompts, G completions of each; B rows of this process, one per completion; T tokens.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from megatoken.base.errors import ConfigError, MegatokenError
from megatoken.data.dataloader import Batch
from megatoken.data.window_order import CachedOrder, ShuffledOrder
from megatoken.inference.batch import Completion, Request, generate_batch
from megatoken.inference.sampling import Sampling
from megatoken.model.gpt import GPT
from megatoken.posttrain.batches import RolloutBatch, RowBatches, full_model
from megatoken.posttrain.lora import without_adapters
from megatoken.posttrain.policy_loss import gae, group_advantages, has_difference, moments, whiten
from megatoken.posttrain.reference import load_reference
from megatoken.posttrain.settings import ObjectiveConfig
from megatoken.text.chat_dataset import open_rows, read_answers
from megatoken.train.objective import Poll
from megatoken.train.run import Run

DECODED_ROWS = 512  # at once
HELD_OUT_PROMPTS = 512  # at most, in a validation
QUIET_ROLLOUTS = 20  # consecutive rollouts without a difference in any group, before a warning


class Prompt(NamedTuple):
    """A prompt: its ids up to the assistant's header, its text, and its answer."""

    ids: list[int]
    text: str
    answer: str


Score = Callable[[Sequence[Prompt], Sequence[Completion]], list[float]]


def read_prompts(run: Run, split: str) -> list[Prompt]:
    """Return the prompts of a split. Their `text` holds only the last message."""
    dataset = run.data.dataset.components[0].dataset
    rows = open_rows(dataset, split)
    prompts = []
    for number, row in enumerate(read_answers(dataset, split)):
        messages = row["prompt"]
        text = messages if isinstance(messages, str) else str(messages[-1]["content"])
        prompts.append(Prompt(rows.sequence(number)[0], text, str(row["answer"])))
    return prompts


class RolloutBatches(RowBatches):
    """Batches of rollouts; each rollout is sampled when its first batch is requested.

    metrics: metrics of the latest rollout, over all ranks.
    """

    def __init__(
        self,
        run: Run,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        stop_ids: Sequence[int],
        score: Score,
    ) -> None:
        """Prepare sampling; load or save the reference model if there is a KL penalty.

        With LoRA, the reference is the model without its adapters. Raises ConfigError if a prompt
        and its completion can exceed the context, or if this process's share of a batch is not a
        multiple of the group size.
        """
        super().__init__(run)
        self._objective = run.config.section(ObjectiveConfig)
        self._prompts = prompts
        self._held_out = held_out[:HELD_OUT_PROMPTS]
        self._stop_ids = stop_ids
        self._score = score
        self._quiet_rollouts = 0
        self._last: tuple[int, RolloutBatch] | None = None  # the current rollout: number, batch
        check_prompts(
            [*prompts, *self._held_out], self._objective.max_new_tokens, run.config.model.seq_len
        )
        if self.local_size % self._objective.group:
            what = f"{self.local_size} sequences per process do not divide into groups of"
            fix = "set budget.batch_tokens to a multiple, or another group"
            raise ConfigError(f"{what} {self._objective.group}", "objective.group", fix)
        self._order = CachedOrder(ShuffledOrder(len(prompts), run.config.seed), len(prompts))
        self._reference: GPT | None = None
        if self._objective.kl and not run.config.model.lora_rank:
            weights = load_reference(run, lambda model: dict(model.named_parameters()))
            self._reference = copy.deepcopy(full_model(run.state, run.device))
            self._reference.load_state_dict(weights)

    def get(self, number: int) -> RolloutBatch:
        """Return batch `number`, after sampling its rollout if this is the rollout's first batch.

        `number` is the step plus the number of skipped batches. Skipping a batch also skips the
        rest of its rollout. If the reward function fails on a rank, all ranks raise its error.
        """
        step = self.run.state.step
        updates = self._objective.updates
        rollout = number - step + step // updates
        if self._last is None or step % updates == 0 or self._last[0] != rollout:
            self._last = rollout, self._sample(rollout)
        return self._last[1]

    def _sample(self, rollout: int) -> RolloutBatch:
        """Sample and score this process's share of a rollout with the current model.

        Raises StopRequested.
        """
        run = self.run
        run.check_stop()
        group = self._objective.group
        size = self.local_size
        first = run.state.dims.dp_rank * size  # of this process's sequences in the rollout
        first_prompt = (rollout * run.config.batch_seqs + first) // group
        indices = self._order.windows(first_prompt, size // group).tolist()
        prompts = [self._prompts[index] for index in indices for _ in range(group)]
        seeds = [sequence_seed(run.config.seed, rollout, first + row) for row in range(size)]
        model = full_model(run.state, run.device)
        completions = self._complete(model, prompts, seeds)
        rewards = self._score_on_all(prompts, completions)
        self._measure(rewards, completions)
        return self._build(model, prompts, completions, rewards)

    def _complete(
        self, model: GPT, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[Completion]:
        """Complete each prompt with its seed; adjacent equal prompts are computed once."""
        requests = [
            Request(
                prompt.ids,
                Sampling(
                    self._objective.max_new_tokens,
                    self._objective.temperature,
                    seed=seed,
                    stop_ids=self._stop_ids,
                ),
                logprobs=True,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return generate_batch(model, requests, rows=DECODED_ROWS, device=self.run.device)

    def _score_on_all(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[float]:
        """Return the rewards of this process's completions; an error on any rank is raised on all."""
        rewards: list[float] = []
        error: MegatokenError | None = None
        try:
            rewards = self._score(prompts, completions)
        except MegatokenError as raised:
            error = raised
        for rank_error in self.comm.gather(error):
            if rank_error is not None:
                raise rank_error
        return rewards

    def _build(
        self,
        model: GPT,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        rewards: Sequence[float],
    ) -> RolloutBatch:
        """Build the batch: rows, advantages and whatever else the objective needs.

        model: the model that sampled the completions.
        """
        run = self.run
        objective = self._objective
        device = run.device.torch_device
        pairs = zip(prompts, completions, strict=True)
        longest = max(len(prompt.ids) + count_tokens(completion) for prompt, completion in pairs)
        # All ranks get equally wide tensors, because rounding depends on the shape.
        rows, log_probs_BT = build_rows(prompts, completions, max(self.comm.gather(longest)))
        rewards_PG = torch.tensor(rewards, dtype=torch.float64).view(-1, objective.group)
        mask_BT = (rows.targets_BT >= 0).float()
        rows_on_device = rows.to(device)
        reference_BT = values_BT = returns_BT = None
        if objective.kl:
            reference = self._reference or model
            with without_adapters(reference):
                log_probs = self.scorer.log_probs(reference, rows_on_device, objective.temperature)
            reference_BT = log_probs.cpu()
        if run.config.objective.name == "grpo":
            advantages_B = group_advantages(rewards_PG).flatten().float()
            advantages_BT = advantages_B[:, None] * mask_BT
        else:
            ends_B = mask_BT.cumsum(1).argmax(1)  # position of each completion's last token
            rewards_B1 = rewards_PG.flatten().float()[:, None]
            rewards_BT = torch.zeros_like(mask_BT).scatter_(1, ends_B[:, None], rewards_B1)
            if reference_BT is not None:
                rewards_BT -= objective.kl * (log_probs_BT - reference_BT) * mask_BT
            values_BT = self.scorer.values(model, rows_on_device).cpu() * mask_BT
            advantages_BT, returns_BT = gae(
                rewards_BT, values_BT, mask_BT, gamma=objective.gamma, lam=objective.lam
            )
            local_sums = moments(advantages_BT, mask_BT).to(run.device.widest).to(device)
            advantages_BT = whiten(advantages_BT, mask_BT, self.comm.sum(local_sums).cpu())
        batch = RolloutBatch(
            rows.inputs_BT,
            rows.targets_BT,
            log_probs_BT=log_probs_BT,
            advantages_BT=advantages_BT,
            reference_BT=reference_BT,
            values_BT=values_BT,
            returns_BT=returns_BT,
        )
        return batch.to(device)

    def _average(
        self, rewards: list[float], completions: Sequence[Completion]
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the rewards of all ranks in fp64, and means over their completions."""
        stopped = [completion.finish_reason == "stop" for completion in completions]
        parts = self.comm.gather((rewards, [*map(count_tokens, completions)], stopped))
        columns = (itertools.chain(*column) for column in zip(*parts, strict=True))
        tensors = [torch.tensor(list(column), dtype=torch.float64) for column in columns]
        names = "reward", "answer_tokens", "stopped"
        means = {name: x.mean().item() for name, x in zip(names, tensors, strict=True)}
        return tensors[0], means

    def _measure(self, rewards: list[float], completions: Sequence[Completion]) -> None:
        """Set `metrics`; warn if nothing can be learned from the rewards.

        This is the case if all completions of each prompt get the same reward in QUIET_ROLLOUTS
        consecutive rollouts.
        """
        run = self.run
        all_rewards, means = self._average(rewards, completions)
        rewards_PG = all_rewards.view(-1, self._objective.group)
        different = has_difference(rewards_PG).double().mean().item()
        self.metrics = {
            **means,
            "reward_std": rewards_PG.std(correction=0).item(),
            "groups_without_difference": 1 - different,
        }
        if different or self._objective.group == 1:
            self._quiet_rollouts = 0
            return
        self._quiet_rollouts += 1
        if self._quiet_rollouts == QUIET_ROLLOUTS:
            n_steps = QUIET_ROLLOUTS * self._objective.updates
            reward = f"{rewards_PG[0, 0]:g}"
            what = f"all answers to each prompt got the same reward for {n_steps} steps: {reward}"
            run.console.warn(f"{what}; nothing is learned: use easier or harder prompts")
            run.event(what="no difference in rewards", share=1.0, message=what)

    def measure(self, poll: Poll) -> dict[str, float]:
        """Complete each held-out prompt once, always with the same seeds; ranks share the prompts.

        Returns the mean `reward`, its standard error, the share of completions that stopped, the
        mean number of tokens, the number of prompts, and the negated reward as `loss`.
        """
        run = self.run
        dist_env = self.comm.dist_env
        numbers = range(dist_env.rank, len(self._held_out), dist_env.world_size)
        prompts = [self._held_out[number] for number in numbers]
        seeds = [sequence_seed(run.config.seed, -1, number) for number in numbers]
        poll()
        completions = self._complete(full_model(run.state, run.device), prompts, seeds)
        rewards = self._score_on_all(prompts, completions)
        all_rewards, means = self._average(rewards, completions)
        n = len(all_rewards)
        deviation = all_rewards.std().item() if n > 1 else 0.0
        return {
            "loss": 0.0 - means["reward"],  # not -0.0
            **means,
            "reward_stderr": deviation / math.sqrt(n),
            "prompts": n,
        }


def check_prompts(prompts: Sequence[Prompt], max_new_tokens: int, seq_len: int) -> None:
    """Raise ConfigError if there are no prompts, or if a prompt and its completion may not fit."""
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    if not longest:
        raise ConfigError("the dataset has no prompts for training", "data.path", "prepare more")
    if longest + max_new_tokens > seq_len:
        what = f"a prompt of {longest} tokens and an answer of {max_new_tokens}"
        fix = "lower it, leave out long prompts, or raise model.seq_len"
        raise ConfigError(
            f"{what} exceed the context of {seq_len}", "objective.max_new_tokens", fix
        )


def sequence_seed(seed: int, rollout: int, sequence: int) -> int:
    """Return the sampling seed of completion `sequence` of a rollout."""
    return xxhash.xxh3_64_intdigest(f"{seed} {rollout} {sequence}".encode()) >> 1


def count_tokens(completion: Completion) -> int:
    """Return the number of sampled tokens, including the stop token."""
    return len(completion.logprobs)


def build_rows(
    prompts: Sequence[Prompt], completions: Sequence[Completion], width: int
) -> tuple[Batch, Tensor]:
    """Return rows of prompt and completion, and the targets' log-probabilities, both (B, T).

    The targets are the sampled tokens. At other positions, the log-probabilities are 0.
    """
    shape = len(prompts), width
    inputs = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, -1, dtype=torch.int64)
    log_probs = torch.zeros(shape)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = [*prompt.ids, *completion.ids]
        if completion.stop_id is not None:
            ids.append(completion.stop_id)
        inputs[row, : len(ids)] = torch.tensor(ids)
        sampled = slice(len(prompt.ids) - 1, len(ids) - 1)
        targets[row, sampled] = torch.tensor(ids[len(prompt.ids) :])
        log_probs[row, sampled] = torch.tensor(completion.logprobs)
    return Batch(inputs, targets), log_probs
