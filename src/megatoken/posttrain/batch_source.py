"""Open the batches of the objectives that train on rows: preference pairs or sampled answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatoken.base.config.load import ResolvedConfig
from megatoken.base.config.schema import Config
from megatoken.base.errors import ConfigError
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.shard_format import SPLITS
from megatoken.inference.batch import Completion
from megatoken.posttrain.answer_scores import take_last
from megatoken.posttrain.batches import Learner
from megatoken.posttrain.objective import PreferenceLoss
from megatoken.posttrain.preferences import PairBatches, read_pairs
from megatoken.posttrain.rewards import REWARDS, Reward, load_reward, score_answers
from megatoken.posttrain.rollouts import Prompt, RolloutBatches, Score, build_rows, read_prompts
from megatoken.posttrain.settings import SAMPLING, ObjectiveConfig
from megatoken.text.chat_template import find_template
from megatoken.text.tokenizer import open_tokenizer
from megatoken.train.state import Loss


def open_row_batches(
    learner: Learner, loss: Loss, reward: str | Reward | None
) -> PairBatches | RolloutBatches:
    """Open the batches of dpo, kto, reward, grpo or ppo; the run must be restored first.

    reward: the user's reward function, or its name as module:function. Raises ConfigError,
    DataError or CheckpointError.
    """
    name = learner.config.objective.name
    if name in ("dpo", "kto", "reward"):
        pairs = {split: read_pairs(learner, split) for split in SPLITS}
        assert isinstance(loss, PreferenceLoss)
        return PairBatches(learner, loss, pairs)
    prompts, held_out = (read_prompts(learner, split) for split in SPLITS)
    score = build_score(learner, load_reward(reward) if isinstance(reward, str) else reward)
    stop_ids = find_template(open_tokenizer(learner.dataset.vocabulary)).stop_ids
    return RolloutBatches(learner, prompts, held_out, stop_ids, score)


def check_reward(config: Config, reward: str | Reward | None) -> None:
    """Raise ConfigError if a run's reward cannot be imported or found.

    config: its objective.reward is a rule of REWARDS or the run of a reward model. reward: the
    user's own function, or its name as module:function, which replaces objective.reward.
    """
    name = config.section(ObjectiveConfig).reward
    if isinstance(reward, str):
        load_reward(reward)
    if reward is not None or name in REWARDS:
        return
    if ":" in name:
        fix = f"pass --reward {name}: recipes run no code"
        raise ConfigError(f"reward {name} is Python code", "objective.reward", fix)
    if not (Path(name) / "checkpoints").is_dir():
        fix = f"choose one of {', '.join(REWARDS)}, or the run of a reward model"
        raise ConfigError(f"unknown reward {name!r}", "objective.reward", fix)


def record_reward(resolved: ResolvedConfig, reward: str | Reward) -> ResolvedConfig:
    """Return the config with the reward's name in it, so that resuming with another one fails.

    Raises ConfigError if the objective uses no rewards.
    """
    config = resolved.config
    if config.objective.name not in SAMPLING:
        what = f"a reward has no effect with objective.name={config.objective.name}"
        raise ConfigError(what, "Trainer", "leave it out, or train grpo or ppo")
    name = reward
    if not isinstance(name, str):  # a callable object or functools.partial has no name
        name = f"{reward.__module__}:{getattr(reward, '__qualname__', type(reward).__qualname__)}"
    section = replace(config.section(ObjectiveConfig), reward=name)
    return replace(resolved, config=config.with_section(section))


def build_score(learner: Learner, reward: Reward | None) -> Score:
    """Return the function that scores answers: by `reward`, a built-in rule or a reward model."""
    name = learner.config.section(ObjectiveConfig).reward
    if reward is None and name not in REWARDS:
        return score_by_model(learner, name)
    return score_by_rule(learner, reward or REWARDS[name], name, needs_stop=reward is None)


def score_by_rule(learner: Learner, rule: Reward, name: str, *, needs_stop: bool) -> Score:
    """Return a function that scores answers by applying `rule` to their text.

    needs_stop: whether answers without a stop token get 0.
    """
    decode: Callable[[Sequence[int]], str] = open_tokenizer(learner.dataset.vocabulary).decode

    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        pairs = list(zip(prompts, completions, strict=True))
        rows = [(prompt.text, decode(completion.ids), prompt.right) for prompt, completion in pairs]
        rewards = score_answers(rule, name, rows)
        return [
            reward if completion.finish_reason == "stop" or not needs_stop else 0.0
            for reward, completion in zip(rewards, completions, strict=True)
        ]

    return score


def score_by_model(learner: Learner, name: str) -> Score:
    """Return a function that scores answers with the reward model of the run `name`.

    Raises ConfigError if the run has no value head or another tokenizer.
    """
    loaded = load_pretrained(name, learner.console.warn)
    if not loaded.model.config.value_head:
        fix = "train one: megatoken train reward --init RUN --out OUT data.path=PREFERENCES"
        raise ConfigError(f"{name} is not a reward model", "objective.reward", fix)
    if not loaded.tokenizer.shares_ids(open_tokenizer(learner.dataset.vocabulary)):
        what = f"{name} has a different tokenizer"
        raise ConfigError(what, "objective.reward", "train it from the same model")
    device = learner.device.torch_device
    model = loaded.model.to(device)

    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        if not prompts:  # a rank without held-out prompts
            return []
        width = max(len(p.ids) + len(c.logprobs) for p, c in zip(prompts, completions, strict=True))
        rows, _ = build_rows(prompts, completions, width)
        batch = rows.to(device)
        values_BT = learner.scorer.values(model, batch)
        rewards: list[float] = take_last(values_BT, batch.targets_BT).tolist()
        return rewards

    return score
