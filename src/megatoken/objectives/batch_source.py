"""Where a run's batches come from: windows of tokens, pairs of preferences, or answers sampled as training goes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.chat_dataset import ROW_OBJECTIVES, open_rows, read_answers
from megatoken.data.chat_template import find_template
from megatoken.data.dataloader import Batch, Prefetcher
from megatoken.errors import ConfigError
from megatoken.eval.rewards import REWARDS, Reward, load_reward, score_answers
from megatoken.objectives.answer_scores import measure_answers, take_last
from megatoken.objectives.preferences import PairBatches, Row
from megatoken.objectives.rollouts import Prompt, RolloutBatches, Score, build_rows
from megatoken.sampling.batch import Completion
from megatoken.train.run_context import BatchSource, RunContext


def open_batches(run: RunContext, reward: str | Reward | None) -> BatchSource:
    """The source that the objective reads; call it once the run is restored and its kernels are chosen.

    reward: a user's own, or its module:function. Sets `run.validation` where the validation is not that of text.
    Raises ConfigError, DataError and CheckpointError for what does not fit.
    """
    name = run.config.objective.name
    if name not in ROW_OBJECTIVES:
        return Prefetcher(run.loader, run.device.torch_device)
    source: PairBatches | RolloutBatches
    if name in ("dpo", "reward"):
        source = PairBatches(run, read_pairs(run, "train"), read_pairs(run, "val"))
    else:
        score = build_score(run, load_reward(reward) if isinstance(reward, str) else reward)
        train, held_out = (read_prompts(run, split) for split in ("train", "val"))
        source = RolloutBatches(run, train, held_out, find_template(run.tokenizer).stop_ids, score)
    run.validation = source.validate
    return source


def read_pairs(run: RunContext, split: str) -> list[tuple[Row, Row]]:
    """The pairs of a split, the chosen answer first."""
    rows = open_rows(run.dataset.parts[0].dataset, split)
    sequences = [Row(*rows.sequence(row)) for row in range(len(rows))]
    return list(zip(sequences[::2], sequences[1::2], strict=True))


def read_prompts(run: RunContext, split: str) -> list[Prompt]:
    """The prompts of a split with their answers; their text is that of the last message."""
    dataset = run.dataset.parts[0].dataset
    rows, prompts = open_rows(dataset, split), []
    for number, row in enumerate(read_answers(dataset, split)):
        given = row["prompt"]
        text = given if isinstance(given, str) else str(given[-1]["content"])
        prompts.append(Prompt(rows.sequence(number)[0], text, str(row["answer"])))
    return prompts


def check_reward(name: str, reward: str | Reward | None) -> None:
    """Raise ConfigError for a user's reward that cannot be imported, and for a name of neither a rule nor a run.

    reward: the user's own, or its module:function.
    """
    if isinstance(reward, str):
        load_reward(reward)
    if reward is not None or name in REWARDS:
        return
    if ":" in name:
        fix = f"name it on the command line, --reward {name}: a recipe runs no code"
        raise ConfigError(f"reward {name} is a function of your own", "objective.reward", fix)
    if not (Path(name) / "checkpoints").is_dir():
        fix = f"choose one of {', '.join(REWARDS)}, or name the run of a reward model"
        raise ConfigError(f"unknown reward {name!r}", "objective.reward", fix)


def build_score(run: RunContext, reward: Reward | None) -> Score:
    """What scores answers: a user's reward, a rule by name, or a reward model, as `check_reward` allows."""
    name = run.config.objective.reward
    rule = reward or REWARDS.get(name)
    if rule is None:
        return build_model_score(run, name)
    return partial(score_by_rule, run, rule, name, is_own=reward is not None)


def score_by_rule(
    run: RunContext,
    rule: Reward,
    name: str,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    is_own: bool,
) -> list[float]:
    """The rule's reward of each answer's text. A rule of REWARDS pays nothing for an answer that was cut off."""
    rows = [
        (prompt.text, run.tokenizer.decode(completion.ids), prompt.right)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    rewards = score_answers(rule, name, rows)
    if is_own:
        return rewards
    return [
        reward * (c.finish_reason == "stop") for reward, c in zip(rewards, completions, strict=True)
    ]


def build_model_score(run: RunContext, name: str) -> Score:
    """The score of a reward model, a run of the objective `reward`, of each prompt with its answer."""
    loaded = load_pretrained(name, run.console.warn)
    if not loaded.model.config.value_head:
        fix = "train one: megatoken train reward --init RUN --out OUT data.path=PREFERENCES"
        raise ConfigError(f"{name} is no reward model", "objective.reward", fix)
    if not loaded.tokenizer.shares_ids(run.tokenizer):
        raise ConfigError(
            f"{name} has another tokenizer than the run",
            "objective.reward",
            "train it from the same model",
        )
    model = loaded.model.to(run.device.torch_device)

    def score(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        if not prompts:  # of a rank without a held-out one
            return []
        width = max(len(p.ids) + len(c.logprobs) for p, c in zip(prompts, completions, strict=True))
        rows, _ = build_rows(prompts, completions, width)
        batch = Batch(
            rows.inputs_BT.to(run.device.torch_device), rows.targets_BT.to(run.device.torch_device)
        )
        values = measure_answers(model, run.step_config, run.device, batch, values=True)
        rewards: list[float] = take_last(values, batch.targets_BT).tolist()
        return rewards

    return score
