"""Every knob of a run: typed, frozen, documented where it is declared.

In: values by dotted key. Out: a `Run`. `model data optim budget` and `seed` are science: they fix the loss curve.
The other sections are machine: they must not change it. Absent: reading files (recipe.py), anything derived from
the data or the hardware; a derived value is a property here, never an assignment.
"""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from megatoken.architecture import Model, find_misfits, nearest_divisors
from megatoken.knobs import Duration, Knob, knob, list_knobs, parse_time
from megatoken.presets import PRESETS, usual_d_ff

DEVICE_WORDS = r"auto|cpu|mps|cuda(:\d{1,2})?"
SCIENCE = ("seed", "model", "data", "optim", "budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is read."""

    path: str = knob("", "dataset folder made by `megatoken prepare`, or a folder or glob of .bin/.npy shards")
    tokenizer: str = knob("gpt2", "tokenizer that made foreign .bin/.npy shards; ours carry their own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    """AdamW (Loshchilov & Hutter 2019) with a warm-up and a decay."""

    lr: float = knob(6e-4, "peak learning rate", low=0.0)
    schedule: Literal["cosine", "linear", "wsd", "wsd-sqrt", "constant"] = knob(
        "cosine", "shape of the decay after warm-up"
    )
    warmup: Duration = knob(Duration(0), "linear warm-up from 0 to lr", low=0)
    decay: Duration = knob(Duration(0.2, "dur"), "length of the final decay under `wsd` and `wsd-sqrt`", low=0)
    floor: float = knob(0.1, "learning rate at the end, as a share of lr", low=0.0, high=1.0)
    beta1: float = knob(0.9, "decay of the first moment", low=0.0, high=0.9999999)
    beta2: float = knob(0.95, "decay of the second moment", low=0.0, high=0.9999999)
    eps: float = knob(1e-8, "added to the root of the second moment", low=0.0, open_low=True)
    weight_decay: float = knob(0.1, "decoupled decay, on matrices only", low=0.0)
    clip: float = knob(1.0, "largest global gradient norm; 0: no clipping", low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much is trained: exactly one of steps, tokens, epochs."""

    steps: int = knob(0, "optimizer steps", "steps", low=0)
    tokens: int = knob(0, "training tokens", "tokens", low=0)
    epochs: float = knob(0.0, "passes over the training split", "epochs", low=0.0)
    batch_tokens: int = knob(524288, "global batch of one step; a multiple of model.seq_len", "tokens", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How it is computed; nothing here changes what is learnt."""

    device: str = knob("auto", "auto, cpu, cuda, cuda:N or mps; auto: the fastest present")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = knob("auto", "auto: what the device is fast at")
    tf32: bool = knob(True, "let fp32 matrix products on CUDA use TF32")
    compile: Literal["auto", "off", "on", "blocks", "graphs"] = knob(
        "auto",
        "torch.compile the model, its blocks (a shorter first step), or the model into CUDA graphs (for small ones); "
        "auto: the model, on CUDA when the run is long enough",
    )
    micro_batch: int | Literal["auto"] = knob("auto", "sequences per forward; auto: the fastest", "seqs", low=1)
    loss_chunk: int | Literal["auto"] = knob(
        "auto",
        "tokens per chunk of the output layer; auto: 512 on a CPU, 4096 elsewhere; 0: all at once",
        "tokens",
        low=0,
    )
    mixed: Literal["auto", "autocast", "masters"] = knob(
        "auto", "low precision by casting weights at each use, or by weights held in it beside fp32 masters"
    )
    linear: Literal["auto", "torch", "numpy", "onednn"] = knob("auto", "library of the blocks' matrix products")
    attention: Literal["auto", "explicit", "flash", "blocked", "cudnn", "fa2", "fa3", "fa4", "flex"] = knob(
        "auto", "form of causal attention; flash: torch's choice; cudnn, fa2, fa3, fa4 and flex: that one or none"
    )
    fused: Literal["auto", "off", "on"] = knob("auto", "norm, GELU and softmax by our own GPU kernels")
    recompute: Literal["none", "gelu", "block"] = knob(
        "none", "what is not kept for the backward but computed again: nothing, the MLP's wide output, whole blocks"
    )
    adamw: Literal["auto", "loop", "foreach", "fused"] = knob("auto", "AdamW a tensor, a list or a kernel at a time")
    shard: Literal["auto", "none", "zero1", "zero2", "zero3", "hybrid"] = knob(
        "auto",
        "what processes split instead of repeating it: moments, also gradients, also weights; hybrid: all of these "
        "within a machine; auto: no more than memory asks for",
    )
    tensor_parallel: int = knob(1, "processes that share every layer", low=1)
    threads: int = knob(0, "CPU threads; 0: all this process may use", low=0, high=1024)
    deterministic: bool = knob(
        False,
        "refuse operations without a deterministic implementation; add gradients in an order of 1, 2, 4, ... ranks",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Checkpoints: besides this schedule one is written at the end, on SIGTERM/SIGINT/SIGUSR1 and at the time limit."""

    every: Duration = knob(Duration(0), "0: only at the end and on a stop", low=0)
    keep_last: int = knob(2, "newest checkpoints to keep", low=1)
    keep_every: Duration = knob(Duration(0), "keep for ever what falls on this schedule; 0: none", low=0)
    time_limit: str = knob("", "stop and save after this wall-clock time: seconds, or 90m, 11h30m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Loss over a fixed set of held-out tokens, and scores in multiple-choice tasks."""

    every: Duration = knob(Duration(0.1, "dur"), "0: only at the end", low=0)
    tokens: int = knob(1048576, "held-out tokens to score, from the start of the split; 0: none", "tokens", low=0)
    tasks: str = knob("", "tasks to score, such as hellaswag,piqa; empty: none")
    tasks_every: Duration = knob(Duration(0), "0: only at the end", low=0)
    tasks_data: str = knob("", "their examples: a file, or a folder with TASK.jsonl; empty: the Hugging Face hub")
    tasks_limit: int = knob(0, "first examples of each task; 0: all", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Text the model writes while it learns."""

    every: Duration = knob(Duration(0), "0: never", low=0)
    prompt: str = knob("", "text to continue; empty: a fresh document")
    tokens: int = knob(64, "new tokens per sample", "tokens", low=1)
    temperature: float = knob(0.8, "0: greedy", low=0.0)
    top_k: int = knob(50, "draw from this many likeliest tokens; 0: all", low=0)
    n: int = knob(1, "sequences per sample", low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What is written down."""

    every: Duration = knob(Duration(1), "steps between rows of metrics.jsonl", low=0, open_low=True)
    plots: bool = knob(True, "draw the curves at the end (needs the plot extra)")
    pictures: bool = knob(False, "draw position embeddings and a weight matrix too")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run, wholly described."""

    seed: int = knob(1337, "decides initial weights, data order and dropout", low=0, high=2**63 - 1)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    budget: Budget = field(default_factory=Budget)
    machine: Machine = field(default_factory=Machine)
    save: Save = field(default_factory=Save)
    evaluate: Evaluate = field(default_factory=Evaluate)
    sample: Sample = field(default_factory=Sample)
    log: Log = field(default_factory=Log)

    @property
    def batch_seqs(self) -> int:
        """Sequences in the global batch of one step."""
        return self.budget.batch_tokens // self.model.seq_len

    def total_steps(self, epoch_tokens: int) -> int:
        """Optimizer steps of the whole run, given the tokens of one pass over the training split."""
        budget = self.budget
        if budget.steps:
            return budget.steps
        if budget.tokens:
            return max(1, round(budget.tokens / budget.batch_tokens))
        return max(1, round(budget.epochs * epoch_tokens / budget.batch_tokens))


KNOBS: dict[str, Knob] = {knob.key: knob for knob in list_knobs(Run)}


def build(values: dict[str, Any]) -> Run:
    """A `Run` from parsed values by dotted key; fields not named keep their defaults, then their preset's."""
    shape = PRESETS.get(values.get("model.preset", ""))
    sizes = {f.name for f in fields(Model)}
    merged = {f"model.{k}": v for k, v in dataclasses.asdict(shape).items() if k in sizes} if shape else {}
    if shape and shape.d_ff == usual_d_ff(shape.d_model, shape.mlp):
        merged["model.d_ff"] = 0  # so that it follows a width that is overridden
    merged |= values
    parts: dict[str, Any] = {}
    for key, value in merged.items():
        section, _, name = key.rpartition(".")
        if section:
            parts.setdefault(section, {})[name] = value
        else:
            parts[name] = value
    sections: dict[str, Any] = {f.name: f.type for f in fields(Run) if is_dataclass(f.type)}
    return Run(**{name: sections[name](**value) if name in sections else value for name, value in parts.items()})


def flatten(run: Run) -> dict[str, Any]:
    """Every value of a run by dotted key, in the order of declaration."""
    values = {}
    for key in KNOBS:
        section, _, name = key.rpartition(".")
        values[key] = getattr(getattr(run, section) if section else run, name)
    return values


def nearest_multiples(value: int, divisor: int, count: int = 2) -> list[int]:
    """The multiples of `divisor` around `value`, at least one of them."""
    below = value // divisor * divisor
    return [m for m in (below + i * divisor for i in range(count)) if m > 0] or [divisor]


def find_conflicts(run: Run) -> Iterator[tuple[str, str, str]]:
    """Rules between fields: yields (key, what is wrong, what to do) for each that is broken."""
    model, budget, optim = run.model, run.budget, run.optim
    yield from find_misfits(model)
    if budget.batch_tokens % model.seq_len:
        near = nearest_multiples(budget.batch_tokens, model.seq_len)
        what = f"batch_tokens {budget.batch_tokens} is not a multiple of seq_len {model.seq_len}"
        yield "budget.batch_tokens", what, f"nearest that are: {', '.join(map(str, near))}"
    elif run.machine.micro_batch != "auto" and run.batch_seqs % run.machine.micro_batch:
        what = f"micro_batch {run.machine.micro_batch} does not divide the batch of {run.batch_seqs} sequences"
        fits = nearest_divisors(run.machine.micro_batch, run.batch_seqs)
        yield "machine.micro_batch", what, f"nearest that do: {fits}, or auto"
    chosen = [name for name in ("steps", "tokens", "epochs") if getattr(budget, name)]
    if len(chosen) != 1:
        what = "no length given" if not chosen else f"{' and '.join(chosen)} are both set"
        yield f"budget.{chosen[-1] if chosen else 'steps'}", what, "set one of budget.steps, tokens, epochs"
    for key, length in (("optim.warmup", optim.warmup), ("optim.decay", optim.decay)):
        if length.unit == "dur" and length.value > 1:
            yield key, f"{length} is longer than the run", "a share of the run is at most 1dur"
    if not re.fullmatch(DEVICE_WORDS, run.machine.device):
        yield "machine.device", f"unknown device {run.machine.device!r}", "use auto, cpu, cuda, cuda:N or mps"
    if run.machine.device == "cpu" and run.machine.precision == "fp16":
        yield "machine.precision", "fp16 is not trained on a CPU", "use auto, bf16 or fp32"
    if run.machine.compile not in ("auto", "off") and run.machine.linear in ("numpy", "onednn"):
        what = f"machine.linear={run.machine.linear} calls a library that cannot be compiled"
        yield "machine.linear", what, "set machine.compile=off, or machine.linear=auto"
    if run.machine.tensor_parallel > 1 and run.machine.linear in ("numpy", "onednn"):
        yield "machine.linear", f"{run.machine.linear} cannot multiply split weights", "use auto, or no tensor_parallel"
    if run.machine.tensor_parallel > 1 and run.machine.recompute == "gelu":
        yield "machine.recompute", "the wide output is split by tensor_parallel already", "use none or block"
    if run.machine.shard not in ("auto", "none") and run.machine.mixed == "masters":
        yield "machine.mixed", "sharded weights are masters already, gathered in low precision", "use auto"
    try:
        parse_time(run.save.time_limit)
    except ValueError as wrong:
        yield "save.time_limit", str(wrong), "write it as 45s, 90m, 11h30m or 2d"
