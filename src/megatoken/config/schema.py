"""Every setting of a config: typed, frozen, documented where it is declared.

`model data objective optim budget` and `seed` are run-defining: they fix the loss curve. The other sections are runtime
settings and must not change it. A derived value is a property, never an assignment.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from megatoken.config.batch_ramp import BatchRamp
from megatoken.config.fields import ConfigField, Duration, config_field, list_fields, parse_time
from megatoken.config.model_config import (
    ModelConfig,
    default_d_ff,
    nearest_divisors,
    validate_model,
)
from megatoken.config.presets import PRESETS, PUBLISHED

Resume = Literal["free", "guarded", "fatal"]
DataOrder = Literal["shuffled", "sequential", "one-batch"]
DEVICE_WORDS = r"auto|cpu|mps|cuda(:\d{1,2})?"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The dataset."""

    path: str = config_field(
        "",
        "dataset folder made by `megatoken prepare`, or a folder or glob of .bin/.npy shards; or an address: s3://...; "
        "several with their weights: PATH:WEIGHT,PATH:WEIGHT,...",
    )
    order: DataOrder = config_field(
        "shuffled",
        "of the batches; sequential: in a row through each shard, as build-nanogpt; one-batch: the first, always, "
        "to check that a model can learn it",
    )
    document_mask: bool = config_field(
        False,
        "tokens do not attend to earlier documents: one begins at each end-of-text token, with position 0",
    )
    tokenizer: str = config_field(
        "gpt2", "tokenizer that made external .bin/.npy shards; ours carry their own"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """What training minimizes."""

    name: Literal["pretrain", "sft", "dpo", "reward", "grpo", "ppo"] = config_field(
        "pretrain",
        "pretrain: the loss of every token of text; sft: of the assistant's answers in conversations "
        "(supervised fine-tuning); dpo: of preferences; reward: a model of preferences; grpo, ppo: reinforce answers",
    )
    beta: float = config_field(
        0.1,
        "dpo: how far log-probabilities may go from the reference for a reward",
        low=0.0,
        open_low=True,
    )
    reward: str = config_field(
        "exact",
        "grpo, ppo: exact, number or gsm8k, or the run of a reward model; own code by --reward module:function",
    )
    group: int = config_field(8, "grpo, ppo: answers to each prompt", low=1)
    updates: int = config_field(
        1, "grpo, ppo: optimizer steps on the same answers, all of them each time", low=1
    )
    temperature: float = config_field(
        1.0,
        "grpo, ppo: answers are sampled from softmax(logits / temperature), and trained as such",
        low=0.01,
    )
    max_new_tokens: int = config_field(64, "grpo, ppo: longest answer", "tokens", low=1)
    kl: float = config_field(
        0.0, "grpo, ppo: weight of the KL divergence from the model at the start; 0: none", low=0.0
    )
    clip: float = config_field(
        0.2,
        "grpo, ppo: largest change of a token's probability that is rewarded",
        low=0.0,
        open_low=True,
    )
    gamma: float = config_field(1.0, "ppo: discount of later rewards, a token", low=0.0, high=1.0)
    lam: float = config_field(
        0.95, "ppo: of generalized advantage estimation; 1: the rewards alone", low=0.0, high=1.0
    )
    value_clip: float = config_field(
        0.2, "ppo: largest change of a value that is learnt at once", low=0.0, open_low=True
    )
    value_weight: float = config_field(0.1, "ppo: weight of the values' squared error", low=0.0)

    @property
    def samples(self) -> bool:
        """Whether it trains on answers that are sampled."""
        return self.name in ("grpo", "ppo")

    @property
    def rollout_steps(self) -> int:
        """Steps from one sampling of answers to the next."""
        return self.updates if self.samples else 1

    @property
    def answers(self) -> int:
        """Sequences of the batches that a row of the dataset becomes."""
        return self.group * self.updates if self.samples else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon"] = config_field(
        "adamw",
        "optimizer; muon: for the matrices of hidden layers, AdamW for all else; more can be registered from Python "
        "(docs/hacking.md)",
    )
    lr: float = config_field(6e-4, "peak learning rate; under muon of what AdamW updates", low=0.0)
    matrix_lr: float = config_field(
        0.02, "peak learning rate of the matrices that muon updates", low=0.0
    )
    schedule: Literal["cosine", "linear", "wsd", "wsd-sqrt", "multi-step", "constant"] = (
        config_field("cosine", "decay after warm-up")
    )
    warmup: Duration = config_field(Duration(0), "linear warm-up from 0 to lr", low=0)
    decay: Duration | Literal["auto"] = config_field(
        "auto",
        "length of the decay: after warm-up under `cosine` and `linear`, which then stay at min_lr_ratio (auto: the "
        "rest of the run); at the end under `wsd`, `wsd-sqrt` and `multi-step` (auto: 0.2dur)",
        low=0,
    )
    min_lr_ratio: float = config_field(
        0.1, "final learning rate, as a share of lr", low=0.0, high=1.0, alias="floor"
    )
    beta1: float = config_field(0.9, "decay of the first moment", low=0.0, high=0.9999999)
    beta2: float = config_field(0.95, "decay of the second moment", low=0.0, high=0.9999999)
    eps: float = config_field(
        1e-8, "added to the root of the second moment", low=0.0, open_low=True
    )
    momentum: float = config_field(
        0.95, "of muon, with Nesterov's look-ahead", low=0.0, high=0.9999999
    )
    momentum_warmup: Duration = config_field(
        Duration(0), "linear growth of muon's momentum from 0.85", low=0
    )
    weight_decay: float = config_field(0.1, "decoupled decay, on matrices only", low=0.0)
    cautious_decay: bool = config_field(
        False, "muon decays a weight only where its update points to 0, too (Chen et al. 2025)"
    )
    grad_clip: float = config_field(
        1.0, "largest global gradient norm; 0: no clipping", low=0.0, alias="clip"
    )
    spike: Literal["warn", "skip", "off"] = config_field(
        "warn",
        "a batch whose loss or gradient norm is far above those of the last 128 steps: train on it or skip it",
    )
    max_skips: int = config_field(
        3,
        "skipped batches in a row after which training goes back to the newest checkpoint",
        "batches",
        low=1,
    )

    @property
    def decay_length(self) -> Duration | None:
        """Length of the decay; None: the rest of the run."""
        if self.decay != "auto":
            return self.decay
        return Duration(0.2, "dur") if self.schedule in END_DECAYS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """Length of the config: exactly one of steps, tokens, epochs."""

    steps: int = config_field(0, "optimizer steps", "steps", low=0)
    tokens: int = config_field(0, "training tokens", "tokens", low=0)
    epochs: float = config_field(0.0, "passes over the training split", "epochs", low=0.0)
    batch_tokens: int = config_field(
        524288, "global batch of one step; a multiple of model.seq_len", "tokens", low=1
    )
    batch_start: int = config_field(
        0,
        "batch of the first step, which grows by its multiples over batch_ramp; 0: batch_tokens",
        "tokens",
        low=0,
    )
    batch_ramp: int = config_field(
        0, "length of the growth from batch_start to batch_tokens", "tokens", low=0
    )

    @property
    def ramp(self) -> BatchRamp | None:
        """The sizes of the batches where they grow."""
        return (
            BatchRamp(self.batch_start, self.batch_tokens, self.batch_ramp)
            if self.batch_ramp
            else None
        )

    def tokens_before(self, batch: int) -> int:
        """Tokens in the batches before this one; batches are counted from 0."""
        return self.ramp.before(batch) if self.ramp else batch * self.batch_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineConfig:
    """How the run is computed; nothing here changes the loss curve."""

    device: str = config_field("auto", "auto, cpu, cuda, cuda:N or mps; auto: the fastest present")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = config_field(
        "auto", "auto: what the device is fast at"
    )
    tf32: bool = config_field(True, "let fp32 matrix products on CUDA use TF32")
    compile: Literal["auto", "off", "on", "blocks", "graphs"] = config_field(
        "auto",
        "torch.compile the model, its blocks (a shorter first step), or the model into CUDA graphs (for small ones); "
        "auto: the model, on CUDA when the run is long enough",
    )
    micro_batch: int | Literal["auto"] = config_field(
        "auto",
        "sequences of seq_len per forward, of shorter answers more; auto: the fastest",
        "seqs",
        low=1,
    )
    loss_chunk: int | Literal["auto"] = config_field(
        "auto",
        "of the output layer; auto: 512 on a CPU, 4096 elsewhere; 0: all at once",
        "tokens",
        low=0,
    )
    master_weights: Literal["auto", "off", "on"] = config_field(
        "auto",
        "low precision: off casts the weights at each use (autocast), on keeps a copy in it beside fp32 masters",
        alias="mixed",
        alias_values={"autocast": "off", "masters": "on"},
    )
    gemm_backend: Literal["auto", "torch", "torch+native", "native"] = config_field(
        "auto",
        "library of the blocks' matrix products, norms and activations; native: our own, for CPUs; torch+native: "
        "torch's products, our norms and activations",
        alias="linear",
        alias_values={"numpy": "torch", "onednn": "torch"},
    )
    attention: Literal["auto", "explicit", "flash", "blocked", "native", "cudnn", "fa2"] = (
        config_field(
            "auto",
            "attention; flash: torch's choice; native: our own, for CPUs; cudnn and fa2: that one or an error",
        )
    )
    fused: Literal["auto", "off", "on"] = config_field(
        "auto", "the loss's softmax by our own kernel"
    )
    activation_checkpointing: Literal["none", "gelu", "block"] = config_field(
        "none",
        "what the backward recomputes: nothing, the GELU output, whole blocks",
        alias="recompute",
    )
    adamw: Literal["auto", "loop", "foreach", "fused", "native"] = config_field(
        "auto", "AdamW by tensor, by list, in torch's kernel or in our own, for CPUs"
    )
    sharding: Literal["auto", "none", "zero1", "zero2", "zero3", "hybrid"] = config_field(
        "auto",
        "what data-parallel processes split: optimizer state (zero1), also gradients (zero2), also weights (zero3, "
        "FSDP); hybrid: zero3 within a machine; auto: the least that fits in memory",
        alias="shard",
    )
    tensor_parallel: int = config_field(1, "processes that share every layer", low=1)
    threads: int = config_field(0, "CPU threads; 0: all this process may use", low=0, high=1024)
    deterministic: bool = config_field(
        False, "deterministic operations only; add gradients in an order of 1, 2, 4, ... ranks"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConfig:
    """Checkpoints: besides this schedule one is written at the end, on SIGTERM/SIGINT/SIGUSR1 and at the time limit."""

    every: Duration = config_field(Duration(0), "0: only at the end and on a stop", low=0)
    keep_last: int = config_field(2, "newest checkpoints to keep", low=1)
    keep_best: bool = config_field(
        False, "also save and keep the one with the lowest validation loss, as RUN/best"
    )
    keep_every: Duration = config_field(
        Duration(0), "keep for ever what falls on this schedule; 0: none", low=0
    )
    mirror: str = config_field(
        "",
        "folder or address, such as s3://bucket/run, to copy checkpoints to and to fetch them from; empty: none",
    )
    time_limit: str = config_field(
        "", "stop and save after this wall-clock time: seconds, or 90m, 11h30m"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Loss over a fixed set of held-out tokens, and scores in multiple-choice tasks."""

    every: Duration = config_field(Duration(0.1, "dur"), "0: only at the end", low=0)
    tokens: int = config_field(
        1048576, "to score, spread evenly over the held-out split; 0: none", "tokens", low=0
    )
    patience: int = config_field(
        0, "end the run after so many validations without a lower loss; 0: never", low=0
    )
    tasks: str = config_field(
        "", "tasks to score, such as hellaswag,piqa; piqa?: if its examples can be had; empty: none"
    )
    tasks_every: Duration = config_field(Duration(0), "0: only at the end", low=0)
    tasks_data: str = config_field(
        "", "file of examples, or folder with TASK.jsonl; empty: the Hugging Face hub"
    )
    tasks_limit: int = config_field(0, "first examples of each task; 0: all", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """Text generated during training."""

    every: Duration = config_field(Duration(0), "0: never", low=0)
    at_start: bool = config_field(False, "also before the first step")
    prompt: str = config_field("", "text to continue; empty: a fresh document")
    tokens: int = config_field(64, "new tokens per sample", "tokens", low=1)
    temperature: float = config_field(0.8, "0: greedy", low=0.0)
    top_k: int = config_field(50, "draw from this many likeliest tokens; 0: all", low=0)
    num_samples: int = config_field(1, "sequences per sample", low=1, alias="n")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is logged."""

    every: Duration = config_field(
        Duration(1), "steps between rows of metrics.jsonl", low=0, open_low=True
    )
    plots: bool = config_field(True, "draw the curves at the end (needs the plot extra)")
    pictures: bool = config_field(False, "draw position embeddings and a weight matrix too")
    sinks: str = config_field(
        "", "programs that get every row, too: of tensorboard, wandb, trackio, with commas"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of one training config."""

    seed: int = config_field(
        1337, "decides initial weights, data order and dropout", low=0, high=2**63 - 1
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
        """Sequences in the global batch of one step."""
        return self.budget.batch_tokens // self.model.seq_len

    def total_steps(self, epoch_tokens: int) -> int:
        """Optimizer steps of the whole run, given the tokens of one pass over the training split."""
        budget = self.budget
        if budget.steps:
            return budget.steps
        tokens = budget.tokens or budget.epochs * epoch_tokens
        return max(
            1, budget.ramp.count(tokens) if budget.ramp else round(tokens / budget.batch_tokens)
        )


END_DECAYS = (
    "wsd",
    "wsd-sqrt",
    "multi-step",
)  # of optim.schedule, the others decay from the warm-up on
SINKS = ("tensorboard", "wandb", "trackio")  # of log.sinks; their packages have the same names


def split_sinks(names: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


FIELDS: dict[str, ConfigField] = {spec.key: spec for spec in list_fields(Config)}
# Whether a resume may change a section or one of its fields: free; guarded, only by --allow-changes, because the run
# goes on another way; fatal, never, because weights, optimizer state or the order of the data would not fit.
ON_RESUME: dict[str, Resume] = {
    **{
        "seed": "fatal",
        "model": "fatal",
        "data": "guarded",
        "optim": "guarded",
        "budget": "guarded",
    },
    **{"objective": "guarded", "objective.name": "fatal"},
    **{"machine": "free", "save": "free", "evaluate": "free", "sample": "free", "log": "free"},
    **{"model.preset": "free", "model.dropout": "guarded", "data.tokenizer": "fatal"},
    **{"optim.name": "fatal", "budget.batch_tokens": "fatal"},
    **{"budget.batch_start": "fatal", "budget.batch_ramp": "fatal"},
}
# What earlier versions called a field, and its field today.
ALIASES = {
    f"{key.rpartition('.')[0]}.{spec.alias}": key for key, spec in FIELDS.items() if spec.alias
}


def resume_class(key: str) -> Resume:
    """Whether a resume may change this field."""
    return ON_RESUME.get(key) or ON_RESUME[key.partition(".")[0]]


def build_config(values: dict[str, Any]) -> Config:
    """A `Config` from parsed values by dotted key; fields not named keep their defaults, then their preset's."""
    merged = dict(values)
    if preset := PRESETS.get(values.get("model.preset", "")):
        sizes = preset.architecture()
        if preset.d_ff == default_d_ff(preset.d_model, preset.mlp):
            sizes["d_ff"] = 0  # so that it follows a width that is overridden
        sizes |= {"n_kv_head": preset.n_kv_head, "zero_init": preset.zero_init}
        merged = {
            key: sizes[name] for key in FIELDS if (name := key.removeprefix("model.")) in sizes
        } | merged
    sections: dict[str, dict[str, Any]] = {}
    for key, value in merged.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    types: dict[str, Any] = {f.name: f.type for f in fields(Config)}
    top = sections.pop("", {})
    return Config(**top, **{name: types[name](**given) for name, given in sections.items()})


def flatten(config: Config) -> dict[str, Any]:
    """Every value of a run by dotted key, in the order of declaration."""
    return {key: attrgetter(key)(config) for key in FIELDS}


def nearest_multiples(value: int, divisor: int) -> list[int]:
    """The multiples of `divisor` around `value`; those above 0."""
    below = value // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple > 0]


def validate(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield (key, what is wrong, what to do) for each rule between fields that is broken."""
    model, budget, optim = config.model, config.budget, config.optim
    if model.preset and model.preset not in PRESETS:
        name = model.preset.lower()
        near = PUBLISHED.get(name) or next(iter(difflib.get_close_matches(name, PRESETS, n=1)), "")
        fix = f"{f'did you mean {near}? ' if near else ''}choose one of {', '.join(PRESETS)}"
        yield "model.preset", f"unknown preset {model.preset!r}", fix
    yield from validate_model(model)
    default = ModelConfig(value_head=model.value_head).architecture()
    if not (model.init and model.architecture() == default):  # else its sizes are still to come
        yield from _validate_batch(config)
    chosen = [name for name in ("steps", "tokens", "epochs") if getattr(budget, name)]
    if len(chosen) != 1:
        what = "no length given" if not chosen else f"{' and '.join(chosen)} are both set"
        yield (
            f"budget.{chosen[-1] if chosen else 'steps'}",
            what,
            "set one of budget.steps, tokens, epochs",
        )
    for key, length in (("optim.warmup", optim.warmup), ("optim.decay", optim.decay)):
        if length != "auto" and length.unit == "dur" and length.value > 1:
            yield key, f"{length} is longer than the run", "a share of the run is at most 1dur"
    lengths = optim.warmup, optim.decay_length or Duration(0)
    if (
        optim.schedule in END_DECAYS
        and sum(each.value for each in lengths if each.unit == "dur") > 1 + 1e-9
    ):
        what = f"a warm-up of {lengths[0]} and a decay of {lengths[1]} are longer than the run"
        yield (
            "optim.decay" if optim.decay != "auto" else "optim.warmup",
            what,
            "make them 1dur together, or less",
        )
    if optim.schedule == "multi-step" and not optim.min_lr_ratio:
        yield (
            "optim.min_lr_ratio",
            "multi-step falls by its square root twice, so to 0 at once",
            "use 0.1, or linear",
        )
    if not re.fullmatch(DEVICE_WORDS, config.machine.device):
        yield (
            "machine.device",
            f"unknown device {config.machine.device!r}",
            "use auto, cpu, cuda, cuda:N or mps",
        )
    if config.machine.device == "cpu" and config.machine.precision == "fp16":
        yield "machine.precision", "fp16 is not trained on a CPU", "use auto, bf16 or fp32"
    if config.machine.tensor_parallel > 1 and config.machine.activation_checkpointing == "gelu":
        yield (
            "machine.activation_checkpointing",
            "tensor_parallel splits the GELU output already",
            "use none or block",
        )
    if config.objective.name != "pretrain":
        if config.machine.tensor_parallel > 1:
            what = "rows of conversations are not split over tensor-parallel processes"
            yield "machine.tensor_parallel", what, "use machine.sharding"
        if config.data.order == "sequential":
            yield "data.order", "rows of conversations are shuffled", "set data.order=shuffled"
    if config.data.document_mask and config.objective.name == "pretrain":
        if config.machine.tensor_parallel > 1:
            what = "windows with data.document_mask are not split over tensor-parallel processes"
            yield (
                "machine.tensor_parallel",
                what,
                "use machine.sharding, or data.document_mask=false",
            )
        if config.machine.attention in ("cudnn", "fa2"):
            what = f"attention {config.machine.attention!r} takes no mask, which data.document_mask needs"
            yield "machine.attention", what, "use auto or flash, or data.document_mask=false"
    if config.machine.sharding not in ("auto", "none") and config.machine.master_weights == "on":
        yield "machine.master_weights", "sharded weights are fp32 masters already", "use auto"
    yield from _validate_objective(config)
    if config.evaluate.patience and not config.evaluate.every.value:
        yield (
            "evaluate.patience",
            "has no effect with evaluate.every=0",
            "set evaluate.every, or evaluate.patience=0",
        )
    for name in split_sinks(config.log.sinks):
        if name not in SINKS:
            yield "log.sinks", f"unknown sink {name!r}", f"choose of {', '.join(SINKS)}"
    try:
        parse_time(config.save.time_limit)
    except ValueError as wrong:
        yield "save.time_limit", str(wrong), "write it as 45s, 90m, 11h30m or 2d"


def _validate_objective(config: Config) -> Iterator[tuple[str, str, str]]:
    objective, has_head, save = config.objective, config.model.value_head, config.save
    if objective.name == "grpo" and objective.group < 2:
        what = f"a group of {objective.group} has no difference to learn from"
        yield "objective.group", what, "set it to 2 or more, or use ppo"
    steps = objective.rollout_steps
    saves = {
        "save.every": save.every,
        **({"evaluate.every": config.evaluate.every} if save.keep_best else {}),
    }
    for key, every in saves.items():  # a resume samples from the weights of a checkpoint
        if every.value and steps > 1 and (every.unit != "steps" or every.value % steps):
            near = [
                f"{n}steps"
                for n in nearest_multiples(int(every.value), steps)
                if every.unit == "steps"
            ]
            what = f"checkpoints every {every} would fall between the {steps} updates on the same answers"
            yield (
                key,
                what,
                f"set it to a multiple of objective.updates: {', '.join(near) or f'{steps}steps'}",
            )
    if has_head != (objective.name in ("reward", "ppo")):
        what = (
            f"objective {objective.name} {'has no use for' if has_head else 'needs'} a value head"
        )
        yield "model.value_head", what, f"set model.value_head={str(not has_head).lower()}"


def _validate_batch(config: Config) -> Iterator[tuple[str, str, str]]:
    budget, seq_len = config.budget, config.model.seq_len
    if budget.batch_tokens % seq_len:
        near = nearest_multiples(budget.batch_tokens, seq_len)
        what = f"batch_tokens {budget.batch_tokens} is not a multiple of seq_len {seq_len}"
        yield "budget.batch_tokens", what, f"nearest that are: {', '.join(map(str, near))}"
    elif config.machine.micro_batch != "auto" and config.batch_seqs % config.machine.micro_batch:
        what = f"micro_batch {config.machine.micro_batch} does not divide the batch of {config.batch_seqs} sequences"
        fits = nearest_divisors(config.machine.micro_batch, config.batch_seqs)
        yield "machine.micro_batch", what, f"nearest that do: {fits}, or auto"
    elif config.objective.samples and config.batch_seqs % config.objective.group:
        what = f"a batch of {config.batch_seqs} sequences is not whole groups of {config.objective.group} answers"
        low = 2 if config.objective.name == "grpo" else 1  # a group of 1 is refused
        fits = nearest_divisors(config.objective.group, config.batch_seqs, low)
        fix = "set another budget.batch_tokens"
        yield "objective.group", what, f"nearest that fit: {fits}, or {fix}" if fits else fix
    if bool(budget.batch_start) != bool(budget.batch_ramp):
        given, missing = (
            ("batch_start", "batch_ramp") if budget.batch_start else ("batch_ramp", "batch_start")
        )
        yield (
            f"budget.{given}",
            f"has no effect without budget.{missing}",
            f"set budget.{missing}, too",
        )
    elif budget.batch_start % seq_len:
        near = nearest_multiples(budget.batch_start, seq_len)
        what = f"batch_start {budget.batch_start} is not a multiple of seq_len {seq_len}"
        yield "budget.batch_start", what, f"nearest that are: {', '.join(map(str, near))}"
    elif budget.batch_start and config.data.order == "sequential":
        yield (
            "data.order",
            "shards are cut into batches of one size",
            "set budget.batch_start=0 budget.batch_ramp=0",
        )
    elif budget.batch_start > budget.batch_tokens:
        what = f"batch_start {budget.batch_start} is larger than batch_tokens {budget.batch_tokens}"
        yield "budget.batch_start", what, "the batch grows from batch_start to batch_tokens"
