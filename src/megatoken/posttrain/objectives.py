"""The objectives of fine-tuning: on conversations, preferences and sampled completions."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.base.config.load import ResolvedConfig
from megatoken.base.config.schema import Config
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.rooms import list_entries, list_own
from megatoken.data.dataloader import DataLoader
from megatoken.data.mixture import Mixture
from megatoken.data.shard_format import SPLITS
from megatoken.distributed.comm import Comm
from megatoken.inference.batch import Completion
from megatoken.inference.rewards import Reward, load_reward, score_completions
from megatoken.posttrain.answer_scores import AnswerScorer, take_last
from megatoken.posttrain.batches import SHOWN
from megatoken.posttrain.chat_batches import ChatBatches, ChatLoader
from megatoken.posttrain.losses import PolicyLoss, PreferenceLoss
from megatoken.posttrain.preferences import PairBatches, read_pairs
from megatoken.posttrain.rollouts import Prompt, RolloutBatches, Score, build_rows, read_prompts
from megatoken.posttrain.settings import ObjectiveConfig
from megatoken.store.pretrained import load_weights
from megatoken.text.chat_dataset import open_rows
from megatoken.text.chat_template import find_template
from megatoken.text.tokenizer import open_tokenizer
from megatoken.train.objective import BatchSource, Objective, open_loader
from megatoken.train.run import Run
from megatoken.train.state import Loss


class ChatObjective(Objective):
    """An objective whose datasets hold rows of conversations, prepared for one context."""

    is_chat = True

    def check_data(self, config: Config, dataset: Mixture) -> None:
        super().check_data(config, dataset)
        seq_len = config.model.seq_len
        for part in dataset.components:
            row_tokens = part.dataset.manifest.source["seq_len"]
            if row_tokens != seq_len:
                what = f"its rows have {row_tokens:,} tokens, model.seq_len is {seq_len:,}"
                fix = f"prepare it with --context {seq_len}, or set model.seq_len={row_tokens}"
                raise DataError(what, part.name, fix)


class Sft(ChatObjective):
    """Supervised fine-tuning: the cross-entropy of the assistant's tokens."""

    kind = "chat"

    def open_data(
        self, config: Config, dataset: Mixture, comm: Comm
    ) -> tuple[DataLoader | None, int]:
        labels = np.concatenate(
            [open_rows(part.dataset, "train").labels for part in dataset.components]
        )
        loader = open_loader(ChatLoader, config, dataset, comm, labels=labels)
        return loader, loader.n_windows * loader.seq_len

    def open_batches(self, run: Run) -> BatchSource:
        return ChatBatches(run)


class RowObjective(ChatObjective):
    """An objective whose batches are made of single rows of one dataset."""

    fills_context = False
    rows = 1  # of the dataset, per sequence of a batch

    def sequences_per_row(self, config: Config) -> int:
        """Return the number of sequences trained on for each row of an epoch."""
        return 1

    def open_data(
        self, config: Config, dataset: Mixture, comm: Comm
    ) -> tuple[DataLoader | None, int]:
        if len(dataset.components) > 1:
            what = f"objective.name={config.objective.name} reads one dataset"
            raise ConfigError(what, "data.path", "prepare the rows together")
        n_rows = len(dataset.train) // (config.model.seq_len + 1) // self.rows
        return None, n_rows * self.sequences_per_row(config) * config.model.seq_len

    def show(self, row: Mapping[str, Any]) -> list[str]:
        """Leave out the loss if no rewards differ within a group, because it is then 0."""
        texts = [f"{name} {row[key]:.3f}" for key, name in SHOWN.items() if key in row]
        return texts if row.get("groups_without_difference") == 1 else [*texts, *super().show(row)]


class Dpo(RowObjective):
    """Direct preference optimization."""

    kind = "preference"
    rows = 2

    def build_loss(self, config: Config) -> Loss:
        return PreferenceLoss(config.objective.name, config.section(ObjectiveConfig))

    def open_batches(self, run: Run) -> BatchSource:
        return PairBatches(run, {split: read_pairs(run, split) for split in SPLITS})


class Kto(Dpo):
    """Kahneman-Tversky optimization, on rated answers."""

    kind = "kto"
    rows = 1


class RewardModel(Dpo):
    """A reward model, trained on preferences."""

    def next_command(self, config: Config, out: Path) -> str:
        start = shlex.quote(config.model.init or "RUN")
        run = shlex.quote(str(out))
        return f"train ppo --init {start} data.path=PROMPTS objective.reward={run}"


@dataclass(frozen=True, kw_only=True)
class Policy(RowObjective):
    """GRPO and PPO, on sampled completions.

    reward: the user's reward function, or its name as module:function; None for the setting
    `objective.reward`.
    """

    kind = "prompt"
    reward: str | Reward | None = None

    def record_options(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """Raise ConfigError if the reward cannot be imported or found."""
        section, reward = resolved.config.section(ObjectiveConfig), self.reward
        if reward is None:
            check_reward(section.reward)
            return resolved
        if not isinstance(reward, str):  # a callable object or functools.partial has no name
            name = getattr(reward, "__qualname__", type(reward).__qualname__)
            reward = f"{reward.__module__}:{name}"
        else:
            load_reward(reward)
        section = replace(section, reward=reward)
        return replace(resolved, config=resolved.config.with_section(section))

    def stop_interval(self, config: Config) -> int:
        """Return the number of updates on the same completions, which are not saved."""
        return config.section(ObjectiveConfig).updates

    def sequences_per_row(self, config: Config) -> int:
        settings = config.section(ObjectiveConfig)
        return settings.group * settings.updates

    def build_loss(self, config: Config) -> Loss:
        return PolicyLoss(config.objective.name, config.section(ObjectiveConfig))

    def open_batches(self, run: Run) -> BatchSource:
        prompts, held_out = (read_prompts(run, split) for split in SPLITS)
        stop_ids = find_template(open_tokenizer(run.data.dataset.vocabulary)).stop_ids
        return RolloutBatches(run, prompts, held_out, stop_ids, self._build_score(run))

    def _build_score(self, run: Run) -> Score:
        """Return the function that scores completions: a reward function or a reward model."""
        name, reward = run.config.section(ObjectiveConfig).reward, self.reward
        if callable(reward):
            return score_by_rule(run, reward, name, needs_stop=False)
        if reward is None and name not in list_entries("reward"):
            return score_by_model(run, name)
        is_own = ":" in name or name in list_own("reward")
        return score_by_rule(run, load_reward(name), name, needs_stop=not is_own)


def check_reward(name: str) -> None:
    """Raise ConfigError unless `name` is a rule or the run of a reward model."""
    if ":" in name:
        fix = f"pass --reward {name}: recipes run no code"
        raise ConfigError(f"reward {name} is Python code", "objective.reward", fix)
    rules = list_entries("reward")
    if name not in rules and not (Path(name) / "checkpoints").is_dir():
        fix = f"choose one of {', '.join(rules)}, or the run of a reward model"
        raise ConfigError(f"unknown reward {name!r}", "objective.reward", fix)


def score_by_rule(run: Run, rule: Reward, name: str, *, needs_stop: bool) -> Score:
    """Return a function that scores completions by applying `rule` to their text.

    needs_stop: whether completions without a stop token get 0.
    """
    decode: Callable[[Sequence[int]], str] = open_tokenizer(run.data.dataset.vocabulary).decode

    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        pairs = list(zip(prompts, completions, strict=True))
        rows = [
            (prompt.text, decode(completion.ids), prompt.answer) for prompt, completion in pairs
        ]
        rewards = score_completions(rule, name, rows)
        return [
            reward if completion.finish_reason == "stop" or not needs_stop else 0.0
            for reward, completion in zip(rewards, completions, strict=True)
        ]

    return score


def score_by_model(run: Run, name: str) -> Score:
    """Return a function that scores completions with the reward model of the run `name`.

    Raises ConfigError if the run has no value head or another tokenizer.
    """
    loaded = load_weights(name, run.console.warn)
    if not loaded.model.config.value_head:
        fix = "train one: megatoken train reward --init RUN --out OUT data.path=PREFERENCES"
        raise ConfigError(f"{name} is not a reward model", "objective.reward", fix)
    if not loaded.vocabulary.shares_ids(run.data.dataset.vocabulary):
        what = f"{name} has a different tokenizer"
        raise ConfigError(what, "objective.reward", "train it from the same model")
    device = run.device.torch_device
    model = loaded.model.to(device)
    scorer = AnswerScorer(run.device, run.step_config)

    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        if not prompts:  # a rank without held-out prompts
            return []
        width = max(len(p.ids) + len(c.logprobs) for p, c in zip(prompts, completions, strict=True))
        rows, _ = build_rows(prompts, completions, width)
        batch = rows.to(device)
        values_BT = scorer.values(model, batch)
        rewards: list[float] = take_last(values_BT, batch.targets_BT).tolist()
        return rewards

    return score
