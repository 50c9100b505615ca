"""Declare every setting of a config, typed and frozen.

The sections model, data, objective, optim and budget, and the setting `seed`, determine the loss
curve of a run. Settings in other sections must not change it. Derived values are properties.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from megatoken.base.config.batch_ramp import BatchRamp
from megatoken.base.config.fields import ConfigField, Duration, Resume, list_fields
from megatoken.base.config.model_config import ModelConfig, default_d_ff
from megatoken.base.config.objective_config import ObjectiveConfig
from megatoken.base.config.presets import PRESETS

DataOrder = Literal["shuffled", "sequential", "one-batch"]
DEVICE_WORDS = r"auto|cpu|mps|cuda(:\d{1,2})?"
END_DECAYS = ("wsd", "wsd-sqrt", "multi-step")  # schedules that decay at the end of the run
SINKS = ("tensorboard", "wandb", "trackio")  # values of log.sinks, named like their packages


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset."""

    path: str = ""
    order: DataOrder = "shuffled"
    document_mask: bool = False
    tokenizer: str = "gpt2"


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 6e-4
    matrix_lr: float = 0.02
    schedule: Literal["cosine", "linear", "wsd", "wsd-sqrt", "multi-step", "constant"] = "cosine"
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
    attention: Literal["auto", "explicit", "flash", "blocked", "native", "cudnn", "fa2"] = "auto"
    fp8: Literal["off", "head", "all"] = "off"
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
    """How often to measure the validation loss and multiple-choice scores, and on what."""

    every: Duration = Duration(0.1, "dur")
    tokens: int = 1048576
    patience: int = 0
    tasks: str = ""
    tasks_every: Duration = Duration(0)
    tasks_data: str = ""
    tasks_limit: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text generated during training."""

    every: Duration = Duration(0)
    at_start: bool = False
    prompt: str = ""
    tokens: int = 64
    temperature: float = 0.8
    top_k: int = 50
    num_samples: int = 1


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What to log, and how often."""

    every: Duration = Duration(1)
    plots: bool = True
    pictures: bool = False
    sinks: str = ""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting of a run."""

    seed: int = 1337
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    evaluate: EvalConfig = field(default_factory=EvalConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)

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


FIELDS: dict[str, ConfigField] = {spec.key: spec for spec in list_fields(Config)}
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
    value = attrgetter(cause)(config)
    if FIELDS[cause].is_registered(value):
        return False
    return (str(value) in values.split("|")) != (operator == "=")


def build_config(values: Mapping[str, Any]) -> Config:
    """Build a `Config` from values by dotted key.

    Missing values come from the preset, if `model.preset` is set, or else are defaults.
    """
    preset = PRESETS.get(values.get("model.preset", ""))
    sections: dict[str, dict[str, Any]] = {"model": _preset_values(preset) if preset else {}}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    top = sections.pop("", {})
    types: dict[str, Any] = {f.name: f.type for f in fields(Config)}
    return Config(**top, **{name: types[name](**given) for name, given in sections.items()})


def _preset_values(preset: ModelConfig) -> dict[str, Any]:
    values = preset.architecture()
    values |= {"n_kv_head": preset.n_kv_head, "zero_init": preset.zero_init}
    if preset.d_ff == default_d_ff(preset.d_model, preset.mlp):
        values["d_ff"] = 0  # follows an overridden width
    return values


def flatten(config: Config) -> dict[str, Any]:
    """Return the value of every setting by dotted key, in order of declaration."""
    return {key: attrgetter(key)(config) for key in FIELDS}


def split_sinks(names: str) -> list[str]:
    """Split the comma-separated names in log.sinks."""
    return [name.strip() for name in names.split(",") if name.strip()]


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """Return the positive multiples of `divisor` just below and above `value`."""
    below = value // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple > 0]
