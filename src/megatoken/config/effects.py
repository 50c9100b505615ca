"""Settings that another one leaves without effect, a row each: who gives one expects what will not happen."""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from megatoken.config.fields import Duration
from megatoken.config.schema import Config

MANIFEST = "manifest.json"  # of a dataset that `megatoken prepare` made
NOT_CUDA = ("cpu", "mps")


class Rule(NamedTuple):
    """keys: of settings that have an effect only if `has_effect`, which the setting `cause` decides."""

    keys: str
    cause: str
    has_effect: Callable[[Config], bool]
    why: str


RULES = (
    Rule(
        "model.rope_theta model.rope_factor",
        "model.pos_emb",
        lambda c: c.model.pos_emb == "rotary",
        "not rotary",
    ),
    Rule(
        "model.rope_low model.rope_high model.rope_context",
        "model.rope_factor",
        lambda c: c.model.rope_factor > 1 and c.model.pos_emb == "rotary",
        "rotary positions are scaled by a factor above 1",
    ),
    Rule(
        "model.window",
        "model.seq_len",
        lambda c: (
            bool(c.model.init) or c.model.window < c.model.seq_len
        ),  # whose context is still to come
        "all tokens are within it",
    ),
    Rule(
        "model.window_pattern",
        "model.window",
        lambda c: c.model.window > 0,
        "no layer has a window",
    ),
    Rule(
        "data.tokenizer",
        "data.path",
        lambda c: not (Path(c.data.path) / MANIFEST).is_file(),
        "a dataset of `megatoken prepare` carries its own",
    ),
    Rule(
        "data.document_mask",
        "objective.name",
        lambda c: c.objective.name == "pretrain",
        "it is for text",
    ),
    Rule(
        "optim.decay optim.min_lr_ratio",
        "optim.schedule",
        lambda c: c.optim.schedule != "constant",
        "no decay",
    ),
    Rule("objective.beta", "objective.name", lambda c: c.objective.name == "dpo", "it is for dpo"),
    Rule(
        "objective.reward objective.group objective.updates objective.temperature objective.max_new_tokens "
        "objective.kl objective.clip",
        "objective.name",
        lambda c: c.objective.samples,
        "it is for grpo and ppo",
    ),
    Rule(
        "objective.gamma objective.lam objective.value_clip objective.value_weight",
        "objective.name",
        lambda c: c.objective.name == "ppo",
        "it is for ppo",
    ),
    Rule(
        "machine.tf32",
        "machine.device",
        lambda c: c.machine.device not in NOT_CUDA,
        "it is for CUDA",
    ),
    Rule(
        "machine.fused",
        "machine.device",
        lambda c: c.machine.device != "mps",
        "it is for CUDA and CPUs",
    ),
    Rule(
        "machine.compile",
        "machine.device",
        lambda c: c.machine.compile != "graphs" or c.machine.device not in NOT_CUDA,
        "CUDA graphs are for CUDA",
    ),
    Rule(
        "machine.master_weights",
        "machine.precision",
        lambda c: c.machine.precision != "fp32",
        "in fp32 the weights are their own masters",
    ),
    Rule(
        "machine.adamw",
        "optim.name",
        lambda c: c.optim.name in ("adamw", "muon"),
        "it is for adamw and muon",
    ),
    Rule(
        "optim.matrix_lr optim.momentum optim.momentum_warmup optim.cautious_decay",
        "optim.name",
        lambda c: c.optim.name != "adamw",
        "it is for muon",
    ),
    Rule(
        "save.keep_every",
        "save.every",
        lambda c: c.save.every.value > 0,
        "nothing is saved before the end",
    ),
    Rule(
        "evaluate.every evaluate.patience save.keep_best",
        "evaluate.tokens",
        lambda c: c.evaluate.tokens > 0,
        "nothing is evaluated",
    ),
    Rule(
        "evaluate.tasks_every evaluate.tasks_data evaluate.tasks_limit",
        "evaluate.tasks",
        lambda c: bool(c.evaluate.tasks),
        "there are none",
    ),
    Rule(
        "sample.at_start sample.prompt sample.tokens sample.temperature sample.top_k sample.num_samples",
        "sample.every",
        lambda c: c.sample.every.value > 0,
        "there are no samples",
    ),
    Rule(
        "sample.top_k",
        "sample.temperature",
        lambda c: c.sample.temperature > 0,
        "that takes the likeliest",
    ),
    Rule("log.pictures", "log.plots", lambda c: c.log.plots, "nothing is drawn"),
)


def list_without_effect(
    config: Config, layers: Mapping[str, int]
) -> Iterator[tuple[str, str, str]]:
    """Yield (key, the setting that leaves it without effect, why) for each setting that the user gave in vain.

    layers: of the user's settings, 1 for a recipe, 2 for the command line. A setting counts where it was given no
    earlier than what takes its effect away: a command line that turns something off says nothing about the recipe.
    """
    for rule in RULES:
        for key in rule.keys.split():
            is_vain = layers.get(key, 0) >= max(
                1, layers.get(rule.cause, 0)
            ) and not rule.has_effect(config)
            if is_vain and not _asks_for_nothing(attrgetter(key)(config)):
                yield key, rule.cause, rule.why


def _asks_for_nothing(value: object) -> bool:
    """Whether a value turns something off or leaves it open."""
    return (
        not value
        or value in ("auto", "off", "none")
        or (isinstance(value, Duration) and not value.value)
    )
