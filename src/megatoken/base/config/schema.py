"""Declare the settings of the core, typed and frozen, and collect those that rooms add.

A room adds a section as an entry of the kind "section", named by the prefix of its settings: a
frozen dataclass of fields with defaults. The core may have other settings with that prefix. The
sections model, data, objective, optim and budget, and the setting `seed`, determine the loss
curve of a run. Settings in other sections must not change it. Derived values are properties.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from megatoken.base.config.batch_ramp import BatchRamp
from megatoken.base.config.fields import ConfigField, Duration, Resume, list_fields
from megatoken.base.config.model_config import ModelConfig, default_d_ff
from megatoken.base.config.presets import PRESETS
from megatoken.base.rooms import list_entries, load_entry

DataOrder = Literal["shuffled", "spans", "sequential", "one-batch"]
CACHE = r"all|\d+(\.\d+)?[MGT]B"
DEVICE_NAMES = r"auto|cpu|mps|cuda(:\d{1,2})?"
END_DECAYS = ("wsd", "wsd-sqrt", "multi-step")  # schedules that decay at the end of the run
S = TypeVar("S")
# The sections of rooms, by the prefix of their settings.
SECTIONS: dict[str, Any] = {name: load_entry("section", name) for name in list_entries("section")}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset."""

    path: str = ""
    order: DataOrder = "shuffled"
    cache: str = "100GB"
    document_mask: bool = False
    tokenizer: str = "gpt2"


@dataclass(frozen=True, kw_only=True)
class ObjectiveChoice:
    """The training objective: pre-training, or one that a room adds, and terms of its loss."""

    name: str = "pretrain"
    terms: str = ""

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the loss terms in `terms`, by name. Raises ValueError."""
        pairs = [term.partition("=") for term in self.terms.split(",") if term]
        return {name.strip(): float(weight) for name, _, weight in pairs}


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: str = "adamw"
    lr: float = 6e-4
    matrix_lr: float = 0.02
    schedule: str = "cosine"
    warmup: Duration = Duration(0)
    decay: Duration | Literal["auto"] = "auto"
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    momentum_warmup: Duration = Duration(0)
    weight_decay: float = 0.1
    cautious_decay: bool = False
    equal_rows: bool = False
    grad_clip: float = 1.0
    spike: Literal["warn", "skip", "off"] = "warn"
    max_skips: int = 3

    @property
    def decay_length(self) -> Duration | None:
        """The length of the learning-rate decay; None if it lasts for the rest of the run."""
        if self.decay != "auto":
            return self.decay
        return Duration(0.2, "dur") if self.schedule in END_DECAYS else None


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """Length of the run, set by exactly one of steps, tokens and epochs, and the batch size."""

    steps: int = 0
    tokens: int = 0
    epochs: float = 0.0
    batch_tokens: int = 524288
    batch_start: int = 0
    batch_ramp: int = 0

    @property
    def ramp(self) -> BatchRamp | None:
        """The growing batch sizes at the start of the run; None for a constant batch size."""
        if not self.batch_ramp:
            return None
        return BatchRamp(self.batch_start, self.batch_tokens, self.batch_ramp)

    def tokens_before(self, batch: int) -> int:
        """Return the total tokens of batches 0 to `batch` - 1."""
        return self.ramp.before(batch) if self.ramp else batch * self.batch_tokens


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """How the run is computed. Apart from rounding, no setting changes the loss curve."""

    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    tf32: bool = True
    compile: Literal["auto", "off", "on", "blocks", "graphs"] = "auto"
    micro_batch: int | Literal["auto"] = "auto"
    loss_chunk: int | Literal["auto"] = "auto"
    master_weights: Literal["auto", "off", "on"] = "auto"
    gemm_backend: Literal["auto", "torch", "torch+native", "native", "cublaslt"] = "auto"
    attention: str = "auto"
    fp8: Literal["off", "head"] = "off"
    fused: Literal["auto", "off", "on"] = "auto"
    activation_checkpointing: Literal["none", "gelu", "block"] = "none"
    adamw: Literal["auto", "loop", "foreach", "fused", "native"] = "auto"
    sharding: Literal["auto", "none", "zero1", "zero2", "zero3", "hybrid"] = "auto"
    tensor_parallel: int = 1
    threads: int = 0
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """When to save checkpoints, and which to keep.

    Regardless of these settings, a run saves at its end, on SIGTERM, SIGINT or SIGUSR1, and at the
    time limit.
    """

    every: Duration = Duration(0)
    keep_last: int = 2
    keep_best: bool = False
    keep_every: Duration = Duration(0)
    mirror: str = ""
    time_limit: str = ""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How often to measure the validation loss, and on what."""

    every: Duration = Duration(0.1, "dur")
    tokens: int = 1048576
    patience: int = 0
    target_loss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """How often to log."""

    every: Duration = Duration(1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting of a run. sections: those of rooms, in the order of SECTIONS."""

    seed: int = 1337
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveChoice = field(default_factory=ObjectiveChoice)
    optim: OptimConfig = field(default_factory=OptimConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    sections: tuple[Any, ...] = tuple(section() for section in SECTIONS.values())

    def section(self, section_type: type[S]) -> S:
        """Return the section of a room, given its class."""
        return next(section for section in self.sections if isinstance(section, section_type))

    def with_section(self, section: object) -> "Config":
        """Return a config in which `section` replaces that of the same class."""
        sections = (section if type(each) is type(section) else each for each in self.sections)
        return replace(self, sections=tuple(sections))

    @property
    def batch_seqs(self) -> int:
        """The number of sequences in the global batch of one step."""
        return self.budget.batch_tokens // self.model.seq_len

    def total_steps(self, epoch_tokens: int) -> int:
        """Return the number of optimizer steps of the run.

        epoch_tokens: training tokens in one epoch.
        """
        budget = self.budget
        if budget.steps:
            return budget.steps
        tokens = budget.tokens or budget.epochs * epoch_tokens
        steps = budget.ramp.count(tokens) if budget.ramp else round(tokens / budget.batch_tokens)
        return max(1, steps)


_CORE: dict[str, Any] = {item.name: item.type for item in fields(Config) if is_dataclass(item.type)}


def _list_settings() -> Iterator[ConfigField]:
    yield from list_fields(Config)
    for prefix in sorted(_CORE | SECTIONS, key="log".__eq__):  # the section log comes last
        for sections in (_CORE, SECTIONS):
            if prefix in sections:
                yield from list_fields(sections[prefix], f"{prefix}.")


FIELDS: dict[str, ConfigField] = {spec.key: spec for spec in _list_settings()}
# Whether a resume may change the settings of a section, unless their rows in settings.toml say so.
# free: yes. guarded: only with --allow-changes, because training would continue differently. fatal:
# never, because weights, optimizer state or data order would not fit.
ON_RESUME: dict[str, Resume] = {
    "seed": "fatal",
    "model": "fatal",
    "data": "guarded",
    "objective": "guarded",
    "optim": "guarded",
    "budget": "guarded",
}


def resume_class(key: str) -> Resume:
    """Return whether a resume may change this setting: `free`, `guarded` or `fatal`."""
    return FIELDS[key].resume or ON_RESUME.get(key.partition(".")[0], "free")


def is_ignored(config: Config, key: str) -> bool:
    """Return whether the setting has no effect because its `only_if` does not hold."""
    condition = FIELDS[key].only_if
    if not condition:
        return False
    cause, operator, values = re.split("(!?=)", condition)
    value = flatten(config)[cause]
    if FIELDS[cause].find_own(value):
        return False
    return (str(value) in values.split("|")) != (operator == "=")


def build_config(values: Mapping[str, Any]) -> Config:
    """Build a `Config` from values by dotted key.

    Missing values come from the preset, if `model.preset` is set, or else are defaults.
    """
    preset = PRESETS.get(values.get("model.preset", ""))
    given = defaultdict[Any, dict[str, Any]](dict)
    given[ModelConfig] = _preset_values(preset) if preset else {}
    for key, value in values.items():
        given[FIELDS[key].section][key.rpartition(".")[2]] = value
    core = {prefix: section(**given[section]) for prefix, section in _CORE.items()}
    added = tuple(section(**given[section]) for section in SECTIONS.values())
    return Config(**given[Config], **core, sections=added)


def _preset_values(preset: ModelConfig) -> dict[str, Any]:
    values = preset.architecture()
    values |= {"n_kv_head": preset.n_kv_head, "zero_init": preset.zero_init}
    if preset.d_ff == default_d_ff(preset.d_model, preset.mlp):
        values["d_ff"] = 0  # follows an overridden width
    return values


def flatten(config: Config) -> dict[str, Any]:
    """Return the value of every setting by dotted key, in order of declaration."""
    sections = {
        type(section): section for section in (config, *vars(config).values(), *config.sections)
    }
    return {
        key: getattr(sections[spec.section], key.rpartition(".")[2]) for key, spec in FIELDS.items()
    }
