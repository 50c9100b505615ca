"""Declare every setting of a config, typed and frozen.

The sections model, data, objective, optim and budget, and the setting `seed`, determine the loss
curve of a run. Settings in other sections must not change it. Derived values are properties.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from megatoken.config.batch_ramp import BatchRamp
from megatoken.config.fields import ConfigField, Duration, config_field, list_fields
from megatoken.config.model_config import ModelConfig, default_d_ff
from megatoken.config.objective_config import ObjectiveConfig
from megatoken.config.presets import PRESETS

Resume = Literal["free", "guarded", "fatal"]
DataOrder = Literal["shuffled", "sequential", "one-batch"]
DEVICE_WORDS = r"auto|cpu|mps|cuda(:\d{1,2})?"
END_DECAYS = ("wsd", "wsd-sqrt", "multi-step")  # schedules that decay at the end of the run
SINKS = ("tensorboard", "wandb", "trackio")  # values of log.sinks, named like their packages
IF_MUON = "optim.name=muon"
IF_DECAYING = "optim.schedule!=constant"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset."""

    path: str = config_field(
        "",
        "dataset: folder made by `megatoken prepare`, folder or glob of .bin/.npy shards, or "
        "s3://... address; mixture: PATH:WEIGHT,PATH:WEIGHT,...",
    )
    order: DataOrder = config_field(
        "shuffled",
        "batch order; sequential: in order through each shard, as in build-nanogpt; one-batch: "
        "always the first batch, to check that a model can overfit it",
    )
    document_mask: bool = config_field(
        False,
        "attend within a document only; each end-of-text token starts a document at position 0",
        only_if="objective.name=pretrain",
    )
    tokenizer: str = config_field("gpt2", "tokenizer of external .bin/.npy shards")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon"] = config_field(
        "adamw",
        "optimizer; muon: Muon for hidden matrices, AdamW for the rest; add your own from Python "
        "(docs/hacking.md)",
    )
    lr: float = config_field(6e-4, "peak learning rate; with muon, of AdamW")
    matrix_lr: float = config_field(
        0.02, "muon: peak learning rate of hidden matrices", only_if=IF_MUON
    )
    schedule: Literal["cosine", "linear", "wsd", "wsd-sqrt", "multi-step", "constant"] = (
        config_field("cosine", "learning-rate decay after warmup")
    )
    warmup: Duration = config_field(Duration(0), "linear warmup from 0 to lr")
    decay: Duration | Literal["auto"] = config_field(
        "auto",
        "length of the decay; cosine, linear: after warmup, then constant at min_lr_ratio (auto: "
        "rest of the run); wsd, wsd-sqrt, multi-step: at the end (auto: 0.2dur)",
        only_if=IF_DECAYING,
    )
    min_lr_ratio: float = config_field(
        0.1, "final learning rate / lr", high=1.0, only_if=IF_DECAYING
    )
    beta1: float = config_field(0.9, "decay of the first moment", high=0.9999999)
    beta2: float = config_field(0.95, "decay of the second moment", high=0.9999999)
    eps: float = config_field(1e-8, "added to the root of the second moment", open_low=True)
    momentum: float = config_field(0.95, "muon: Nesterov momentum", high=0.9999999, only_if=IF_MUON)
    momentum_warmup: Duration = config_field(
        Duration(0), "muon: linear warmup of the momentum from 0.85", only_if=IF_MUON
    )
    weight_decay: float = config_field(0.1, "decoupled weight decay of matrices")
    cautious_decay: bool = config_field(
        False,
        "muon: decay a weight only if its update also shrinks it (Chen et al. 2025)",
        only_if=IF_MUON,
    )
    equal_rows: bool = config_field(
        False,
        "muon: equal norms of the rows of an update, as NorMuon (Li et al. 2025) but without state",
        only_if=IF_MUON,
    )
    grad_clip: float = config_field(1.0, "largest global gradient norm; 0: no clipping")
    spike: Literal["warn", "skip", "off"] = config_field(
        "warn",
        "batches whose loss or gradient norm is far above those of the last 128 steps: warn, or "
        "skip the update",
    )
    max_skips: int = config_field(
        3, "consecutive skipped batches before rewinding to the newest checkpoint", "batches", low=1
    )

    @property
    def decay_length(self) -> Duration | None:
        """The length of the learning-rate decay; None if it lasts for the rest of the run."""
        if self.decay != "auto":
            return self.decay
        return Duration(0.2, "dur") if self.schedule in END_DECAYS else None


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """Length of the run, set by exactly one of steps, tokens and epochs, and the batch size."""

    steps: int = config_field(0, "optimizer steps", "steps")
    tokens: int = config_field(0, "training tokens", "tokens")
    epochs: float = config_field(0.0, "passes over the training split", "epochs")
    batch_tokens: int = config_field(
        524288, "global batch of one step; a multiple of model.seq_len", "tokens", low=1
    )
    batch_start: int = config_field(
        0,
        "first batch; grows by its multiples to batch_tokens over batch_ramp; 0: batch_tokens",
        "tokens",
    )
    batch_ramp: int = config_field(
        0, "length of the growth from batch_start to batch_tokens", "tokens"
    )

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

    device: str = config_field("auto", "auto (fastest available), cpu, cuda, cuda:N or mps")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = config_field(
        "auto", "compute dtype; auto: the fastest on the device"
    )
    tf32: bool = config_field(True, "TF32 in fp32 matrix products on CUDA")
    compile: Literal["auto", "off", "on", "blocks", "graphs"] = config_field(
        "auto",
        "torch.compile; on: the model; blocks: each block, for a shorter first step; graphs: with "
        "CUDA graphs, for small models; auto: on for long enough CUDA runs",
    )
    micro_batch: int | Literal["auto"] = config_field(
        "auto",
        "sequences of seq_len per forward (more if answers are shorter); auto: the fastest",
        "seqs",
        low=1,
    )
    loss_chunk: int | Literal["auto"] = config_field(
        "auto", "chunk of the output layer; auto: 1024 on a CPU, else 4096; 0: no chunks", "tokens"
    )
    master_weights: Literal["auto", "off", "on"] = config_field(
        "auto", "low precision; off: autocast; on: low-precision weights with fp32 masters"
    )
    gemm_backend: Literal["auto", "torch", "torch+native", "native", "cublaslt"] = config_field(
        "auto",
        "kernels of the blocks; native: our CPU kernels; torch+native: matrix products of torch, "
        "our norms and activations; cublaslt: GELU in matrix products (CUDA)",
    )
    attention: Literal["auto", "explicit", "flash", "blocked", "native", "cudnn", "fa2"] = (
        config_field(
            "auto",
            "attention kernel; flash: torch's choice; native: our CPU kernel; cudnn, fa2: that "
            "kernel or an error",
        )
    )
    fp8: Literal["off", "head", "all"] = config_field(
        "off",
        "FP8 matrix products with bf16 precision; head: of the output layer; all: of the MLP too",
    )
    fused: Literal["auto", "off", "on"] = config_field("auto", "our kernel for the loss's softmax")
    activation_checkpointing: Literal["none", "gelu", "block"] = config_field(
        "none", "recompute in the backward: nothing, the GELU output, full blocks"
    )
    adamw: Literal["auto", "loop", "foreach", "fused", "native"] = config_field(
        "auto", "AdamW kernel: per tensor, foreach, torch's fused, or ours for CPUs"
    )
    sharding: Literal["auto", "none", "zero1", "zero2", "zero3", "hybrid"] = config_field(
        "auto",
        "what data-parallel ranks shard; zero1: optimizer state; zero2: + gradients; zero3: + "
        "weights (FSDP); hybrid: zero3 within a machine; auto: the least that fits in memory",
    )
    tensor_parallel: int = config_field(1, "ranks that share every layer", low=1)
    threads: int = config_field(0, "CPU threads; 0: all available", high=1024)
    deterministic: bool = config_field(
        False, "deterministic kernels; gradients summed in the same order on 1, 2, 4, ... ranks"
    )


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """When to save checkpoints, and which to keep.

    Regardless of these settings, a run saves at its end, on SIGTERM, SIGINT or SIGUSR1, and at the
    time limit.
    """

    every: Duration = config_field(
        Duration(0), "interval of checkpoints; 0: only at the end and on a stop"
    )
    keep_last: int = config_field(2, "newest checkpoints to keep", low=1)
    keep_best: bool = config_field(
        False,
        "also keep the checkpoint with the lowest validation loss, as RUN/best",
        only_if="evaluate.tokens!=0",
    )
    keep_every: Duration = config_field(
        Duration(0), "interval of checkpoints kept forever; 0: none"
    )
    mirror: str = config_field(
        "", "folder or s3://... address to copy checkpoints to and restore them from"
    )
    time_limit: str = config_field(
        "", "stop and save after this wall-clock time: 3600, 90m, 11h30m"
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How often to measure the validation loss and multiple-choice scores, and on what."""

    every: Duration = config_field(
        Duration(0.1, "dur"), "interval of validation; 0: only at the end"
    )
    tokens: int = config_field(
        1048576, "validation tokens, spread evenly over the held-out split; 0: none", "tokens"
    )
    patience: int = config_field(
        0,
        "stop after this many validations without a lower loss; 0: never",
        only_if="evaluate.every!=0steps",
    )
    tasks: str = config_field(
        "", "tasks to score: hellaswag,piqa,...; `piqa?` is skipped if its examples are missing"
    )
    tasks_every: Duration = config_field(Duration(0), "interval of task scores; 0: only at the end")
    tasks_data: str = config_field(
        "", "file of examples, or folder with TASK.jsonl; empty: the Hugging Face hub"
    )
    tasks_limit: int = config_field(0, "examples per task, from the first; 0: all")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text generated during training."""

    every: Duration = config_field(Duration(0), "interval of samples; 0: never")
    at_start: bool = config_field(False, "also sample before the first step")
    prompt: str = config_field("", "text to continue; empty: a new document")
    tokens: int = config_field(64, "new tokens per sample", "tokens", low=1)
    temperature: float = config_field(0.8, "sampling temperature; 0: greedy")
    top_k: int = config_field(50, "sample from the k likeliest tokens; 0: all")
    num_samples: int = config_field(1, "samples each time", low=1)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What to log, and how often."""

    every: Duration = config_field(Duration(1), "interval of rows in metrics.jsonl", open_low=True)
    plots: bool = config_field(True, "draw the curves at the end (needs the plot extra)")
    pictures: bool = config_field(False, "also draw position embeddings and a weight matrix")
    sinks: str = config_field("", "also log to tensorboard, wandb, trackio (comma-separated)")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting of a run."""

    seed: int = config_field(
        1337, "seed of initial weights, data order and dropout", high=2**63 - 1
    )
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
# Whether a resume may change a section or a setting. free: yes. guarded: only with --allow-changes,
# because training would continue differently. fatal: never, because weights, optimizer state or
# data order would not fit.
ON_RESUME: dict[str, Resume] = {
    "seed": "fatal",
    "model": "fatal",
    "model.preset": "free",
    "model.dropout": "guarded",
    "data": "guarded",
    "data.tokenizer": "fatal",
    "objective": "guarded",
    "objective.name": "fatal",
    "optim": "guarded",
    "optim.name": "fatal",
    "budget": "guarded",
    "budget.batch_tokens": "fatal",
    "budget.batch_start": "fatal",
    "budget.batch_ramp": "fatal",
}


def resume_class(key: str) -> Resume:
    """Return whether a resume may change this setting: `free`, `guarded` or `fatal`."""
    return ON_RESUME.get(key) or ON_RESUME.get(key.partition(".")[0], "free")


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
