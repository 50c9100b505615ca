"""What happens between a checked config and the first step, in the order in which pretrain.py calls it.

All of it happens once. Loading a checkpoint is in train/restore.py.
"""

import inspect
import json
import math
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatoken import __version__
from megatoken.checkpoint.commit import list_steps, list_surplus
from megatoken.checkpoint.manifest import FileEntry
from megatoken.config.load import Change, ResolvedConfig, render
from megatoken.config.model_config import ModelConfig, describe_heads
from megatoken.config.schema import Config, validate
from megatoken.console import Console, format_duration, format_quantity
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.dataloader import DataLoader
from megatoken.data.mixture import Mixture, load_mixture
from megatoken.data.tokenizer import Tokenizer
from megatoken.distributed.comm import Comm
from megatoken.distributed.parallel_dims import (
    ParallelDims,
    build_dims,
    check_dims,
    count_state_bytes,
    disable_unsupported,
)
from megatoken.errors import ConfigError, DataError, StorageError
from megatoken.eval.multiple_choice import EncodedExample, read_tasks
from megatoken.launch.heartbeat import Heartbeat
from megatoken.model.flops import (
    count_matmul_parameters,
    count_padded_parameters,
    count_parameters,
    expected_initial_loss,
    flops_per_token,
    state_bytes,
)
from megatoken.model.gpt import GPT, init_weights
from megatoken.model.kernels.attention import ATTENTION, BUILT_IN, WITHOUT_MASK
from megatoken.redact import redact
from megatoken.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.system.device import Device, misses_triton, wants_compile
from megatoken.system.environment import find_commit
from megatoken.train.kernel_autotune import KernelChoice, apply_choice, autotune, list_requests
from megatoken.train.metrics_log import STATUS, MetricsLogger
from megatoken.train.micro_batch import compile_forward, pick_micro_batch, tune_micro_batch
from megatoken.train.preemption import PreemptionHandler, StopRequested
from megatoken.train.run_folder import CHECKPOINTS, CONFIG, MACHINE, PROVENANCE, TOKENIZER
from megatoken.train.state import StepConfig, TrainState, build_state, build_step_config

Callback = Callable[[dict[str, Any]], bool | None]

MEMORY_MARGIN = 2  # of what is free: other programs may end, and some of it may be swapped


@dataclass(slots=True, kw_only=True)
class RunContext:
    """Everything that a live run consists of, filled in while it is set up.

    callbacks: called with every row (`kind`, `step`, `tokens`, `elapsed_seconds` and the values; train rows at every
    step); one that returns True asks the run to save and stop. logged: (kind, step) of the rows in the metrics log; of
    an evaluation (task, step). val_losses: the validation loss of each step in the log. verified: the files of the
    checkpoints that this process has hashed, so that pruning hashes nothing twice. changes: what differs from the run's
    last start.
    """

    config: Config
    out: Path
    console: Console
    device: Device
    comm: Comm
    is_main: bool
    callbacks: Sequence[Callback] = ()
    allow_changes: bool = False
    changes: list[Change] = field(default_factory=list)
    logged: set[tuple[str, int]] = field(default_factory=set)
    val_losses: dict[int, float] = field(default_factory=dict)
    verified: dict[Path, Mapping[str, FileEntry]] = field(default_factory=dict)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    dataset: Mixture = field(init=False)
    model_config: ModelConfig = field(init=False)
    tasks: dict[str, list[EncodedExample]] = field(init=False)
    loader: DataLoader = field(init=False)
    log: MetricsLogger = field(init=False)
    preemption: PreemptionHandler = field(init=False)
    state: TrainState = field(init=False)
    step_config: StepConfig = field(init=False)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.dataset.tokenizer

    def best_of(self, steps: Iterable[int]) -> int | None:
        """The one of these steps with the lowest validation loss, the first of equal ones; None where none has any."""
        measured = [step for step in sorted(steps) if math.isfinite(self.val_losses.get(step, math.nan))]
        return min(measured, key=self.val_losses.__getitem__, default=None)

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last `evaluate.patience` validations have not lowered the loss."""
        best, patience = self.best_of(self.val_losses), self.config.evaluate.patience
        since = sum(best is None or step > best for step in self.val_losses)
        return 0 < patience <= since

    def write(self, kind: str, *, step: int | None = None, to_file: bool = True, **values: Any) -> None:
        """Add a row at `step` (None: the current one) to the metrics log and pass it to the callbacks.

        to_file: False for train rows between those that are logged.
        """
        step = self.state.step if step is None else step
        tokens = self.state.tokens_trained(self.step_config, step)
        values = {"elapsed_seconds": self.log.elapsed_seconds, **values}
        if to_file:
            self.log.write(kind, step, tokens, **values)
            self.logged.add((values.get("task", kind), step))
        for callback in self.callbacks:
            if callback({"kind": kind, "step": step, "tokens": tokens, **values}):
                self.preemption.request_stop("callback")

    def begin(self, phase: str) -> None:
        """Note what this process does from now on, for the one that watches it and in status.json."""
        self.heartbeat.beat(phase, self.state.step)
        self.log.begin(phase)

    @contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """Context of a phase within another one, which goes on after it."""
        with self.heartbeat.during(phase, step):
            outer = self.log.begin(phase)
            try:
                yield
            finally:
                self.log.begin(outer)

    def check_stop(self, next_seconds: float = 0.0, *, flag: bool = False) -> bool:
        """Raise StopRequested on all ranks when one of them has to save and stop; all must call it.

        next_seconds: how long that which comes next took before. Return whether any rank has set `flag`.
        """
        stop, flag = self.comm.any_of_each([bool(self.preemption.stop_before(next_seconds)), flag])
        if stop:
            raise StopRequested
        return flag


def open_log(run: RunContext) -> MetricsLogger:
    """The metrics log: rank 0's, with the lock of the run folder, and one on every other rank that writes nothing.

    Raises StorageError on all ranks when another run has the folder or it cannot be written.
    """
    logs = [MetricsLogger(run.out)]
    run.comm.run_on_rank0(lambda: logs.append(MetricsLogger.open(run.out)))
    return logs[-1]


def open_data(run: RunContext) -> None:
    """Open the dataset, its tokenizer, the tasks and the loader of this data-parallel rank; resolve durations to steps.

    Raises DataError when something is missing or damaged or the dataset holds less than one batch, ConfigError when the
    model cannot hold the tokenizer's ids or the batch does not divide.
    """
    config, env = run.config, run.comm.dist_env
    if not config.data.path:
        fix = "set data.path=FOLDER; `megatoken prepare SOURCE --out FOLDER` makes one"
        raise ConfigError("no dataset given", "data.path", fix)
    external_tokenizer, report = config.data.tokenizer, run.console.print
    run.dataset = load_mixture(config.data.path, external_tokenizer=external_tokenizer, report=report)
    vocab_size, seq_len = run.tokenizer.vocab_size, config.model.seq_len
    if 0 < config.model.vocab_size < vocab_size:
        what = f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's {vocab_size}"
        raise ConfigError(what, "model.vocab_size", "set it to 0 to take the tokenizer's")
    run.dataset.set_vocab_size(vocab_size)
    run.model_config = config.model.resolve(vocab_size)
    prompt_tokens = len(run.tokenizer.encode(config.sample.prompt))
    if config.sample.every.value and prompt_tokens > seq_len:
        what = f"sample.prompt has {prompt_tokens} tokens, the model's context is {seq_len}"
        raise ConfigError(what, "sample.prompt", "shorten it, or set sample.every=0")
    tasks = read_tasks(config.evaluate, run.tokenizer, seq_len, run.console.warn)
    on_ranks = run.comm.gather(list(tasks))  # a machine may lack what another has
    run.tasks = {name: tasks[name] for name in tasks if all(name in names for names in on_ranks)}
    dims = build_dims("none", config.machine.tensor_parallel, env)
    check_dims(dims, config.model)  # tensor-parallel neighbours read the same batches
    order, parts = config.data.order, run.dataset.parts
    if order == "sequential" and len(parts) > 1:
        raise ConfigError("a mixture is shuffled", "data.order", "set data.order=shuffled, or one dataset in data.path")
    run.loader = DataLoader(
        run.dataset.train,
        seq_len=seq_len,
        batch_size=config.batch_seqs,
        seed=config.seed,
        dp_rank=dims.dp_rank,
        dp_size=dims.dp_size,
        ramp=config.budget.ramp,
        order=order,
        sources=[(len(part.dataset.train), part.share) for part in parts],
    )
    epoch_tokens = run.loader.n_windows * seq_len
    run.step_config = build_step_config(config, epoch_tokens=epoch_tokens, device_type=run.device.type)


def check_space(run: RunContext) -> None:
    """Raise StorageError unless the checkpoints that the run will hold at once, beside those it has, fit on the disk.

    That is one more than it keeps, two with a mirror: an old one is removed after a new one is committed and copied.
    """
    steps, save = run.step_config, run.config.save
    every, steps_left = steps.steps(save.every), steps.total_steps - run.state.step
    n_saves = steps_left // every + 1 if every else 1
    saved = list_steps(run.out / CHECKPOINTS)
    surplus = list_surplus(saved, keep_last=save.keep_last, keep_every=steps.steps(save.keep_every))
    kept = save.keep_last + save.keep_best + bool(save.mirror)
    missing = min(n_saves, max(0, kept + 1 - min(len(saved), kept) - len(surplus)))
    needed, free = missing * state_bytes(run.model_config), shutil.disk_usage(run.out).free
    if free < needed:
        what = f"no room for checkpoints, {missing} more needed at once: {format_quantity(needed, 'B')}"
        what += f", {format_quantity(free, 'B')} are free"
        raise StorageError(what, run.out, "free some space, lower save.keep_last or choose another --out")


def check_memory(run: RunContext, dims: ParallelDims, memory_bytes: int) -> None:
    """Raise ConfigError where weights, gradients and moments alone need far more than a process has (0: unknown)."""
    n_params = count_padded_parameters(run.model_config)
    needed = count_state_bytes(dims, n_params, run.device.precision)
    if 0 < MEMORY_MARGIN * memory_bytes < needed:
        what = f"weights, gradients and moments of {format_quantity(n_params)} parameters need "
        what += f"{format_quantity(needed, 'B')} in each process, which has {format_quantity(memory_bytes, 'B')}"
        raise ConfigError(
            what, "model", "choose a smaller model.preset, n_layer or d_model, or split it: docs/scaling-up.md"
        )


def apply_dims(run: RunContext, dims: ParallelDims) -> None:
    """Turn off the settings that a split model cannot use; warn where the config asks for one."""
    asked = run.config.machine
    machine = disable_unsupported(asked, dims)
    for name in ("master_weights", "fused"):
        if getattr(asked, name) == "on" != getattr(machine, name):
            run.console.warn(f"machine.{name}=on is left out: the model is split ({dims})")
    if asked.sharding not in ("auto", dims.sharding):
        run.console.warn(f"machine.sharding={asked.sharding} is left out: one data-parallel process shards nothing")
    if machine.deterministic and not dims.is_unsharded:
        what = "machine.deterministic: gradients of a split model are added in an order that changes with the ranks"
        run.console.warn(f"{what}; machine.sharding=none and tensor_parallel=1 keep it")
    run.config = replace(run.config, machine=machine)


def print_summary(run: RunContext, name: str, dims: ParallelDims) -> None:
    """Print what is about to happen: model, data, budget, machine, and the loss to expect first."""
    dataset, tokenizer, device, model = run.dataset, run.tokenizer, run.device, run.model_config
    steps, flops = run.step_config, flops_per_token(model, causal=False)
    tokens = steps.tokens_before(steps.total_steps)
    sizes = f"{model.n_layer} layers, {describe_heads(model)}, width {model.d_model}, context {model.seq_len}"
    counts = f"{count_parameters(model):,} parameters, {count_matmul_parameters(model):,} in matrix products"
    splits = f"{len(dataset.train):,} train and {dataset.n_val:,} held-out tokens"
    size = f"{steps.ramp.start:,} to {steps.batch_tokens:,}" if steps.ramp else f"{steps.batch_tokens:,}"
    length = f"{steps.total_steps:,} steps of {size} tokens = {format_quantity(tokens)} tokens"
    peak = f"peak {format_quantity(device.peak_flops, 'FLOP/s')} ({device.peak_source})" if device.peak_flops else ""
    rows = [
        ("run", f"{name} in {run.out}"),
        ("model", f"{sizes}: {counts}"),
        ("data", f"{dataset}: {splits}, tokenizer {tokenizer.name} ({tokenizer.vocab_size:,} ids)"),
        ("budget", f"{length} = {tokens / steps.epoch_tokens:.3g} epochs"),
        *(("", row) for row in _describe_parts(run, tokens)),
        ("work", f"{flops:,} FLOPs a token (full attention), {format_quantity(flops * tokens, 'FLOP')} in all"),
        ("machine", ", ".join(filter(None, (str(device.torch_device), device.name, device.precision, peak)))),
        ("layout", "" if dims == ParallelDims() else str(dims)),
        ("loss", f"expected at first: ln({model.vocab_size:,}) = {expected_initial_loss(model):.2f} nats"),
    ]
    run.console.table([row for row in rows if row[1]])
    schedule, unit = steps.schedule, "tokens" if steps.ramp else "steps"
    for key, n_units in (("optim.warmup", schedule.warmup), ("optim.decay", schedule.decay_length or 0)):
        if n_units > schedule.total:
            run.console.warn(f"{key} is {n_units:,} {unit}, longer than the run of {schedule.total:,}")
    if not dataset.n_val:
        run.console.warn("the dataset has no validation split: no held-out loss will be measured")


def _describe_parts(run: RunContext, tokens: int) -> list[str]:
    """A line about each dataset of a mixture."""
    parts, seq_len = run.dataset.parts, run.loader.seq_len
    if len(parts) == 1:
        return []
    whole = [(len(part.dataset.train) - 1) // seq_len * seq_len for part in parts]
    return [
        f"{part.name}: {part.share:.1%} of the batches, {tokens * part.share / size:.3g} epochs of {size:,} tokens"
        for part, size in zip(parts, whole, strict=True)
    ]


def build_train_state(
    run: RunContext, dims: ParallelDims, model: GPT | None = None, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Put the model on its device and build its optimizer: `run.state`.

    model, optimizer: the user's, whose weights the run starts from; else the weights are initial ones or those of
    `model.init`, and left uninitialized where a checkpoint will replace them.
    """
    config, is_own = run.config, model is not None
    if model is None:
        with torch.device("cpu" if dims.is_unsharded else "meta"):
            model = GPT(run.model_config, seed=None)
    run.state = build_state(model, config, run.device, dims, optimizer)
    run.state.comm = run.comm
    if not is_own and not config.model.init:
        run.state.sharded.copy_from_full(init_weights(model, config.seed))
    elif not is_own and not run.comm.run_on_rank0(lambda: list_steps(run.out / CHECKPOINTS)):
        run.state.sharded.copy_from_full(_pretrained_weights(run))


def take_architecture(resolved: ResolvedConfig, out: Path) -> ResolvedConfig:
    """The config with the sizes and switches of `model.init`, where it gives none but a context of its own.

    They are those of a run in `out` once it has a checkpoint: `model.init` may be gone. Raises as `load_pretrained`.
    """
    model, origins = resolved.config.model, resolved.origins
    own = {name for name in model.architecture() if origins.get(f"model.{name}", "default") != "default"}
    if not model.init or own - {"seq_len"}:
        return resolved
    given = load_pretrained(out if list_steps(out / CHECKPOINTS) else model.init).model.config
    sizes = {name: value for name, value in given.architecture().items() if name not in own}
    config = replace(resolved.config, model=replace(model, **sizes))
    for key, what, fix in validate(config):
        raise ConfigError(f"{key}: {what}", f"model.init {model.init}", fix)
    return replace(resolved, config=config, origins=origins | {f"model.{name}": "model.init" for name in sizes})


def check_own_model(run: RunContext, model: GPT, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError unless the user's model is the one that the config describes, in one process, and the user's
    optimizer updates its parameters, all and only."""
    if run.config.model.init:
        raise ConfigError("a model and model.init are both given", "model.init", "give one of them")
    if not run.comm.is_single_process:
        raise ConfigError("a model object cannot be split over processes", "model", "use model.init with nproc")
    if type(model).loss is not GPT.loss:
        what = f"{type(model).__name__}.loss is not what training computes"
        raise ConfigError(what, "model", "change model/loss.py, or override forward")
    differs = _list_differences(model.config, run.model_config)
    if model.config.dropout != run.model_config.dropout:
        differs.append(f"model.dropout={model.config.dropout}")
    if differs:
        raise ConfigError("the model differs from config.model", "model", f"set {' '.join(differs)}")
    if model.config.dropout and "dropout_keys_B" not in inspect.signature(model.forward).parameters:
        what = f"{type(model).__name__}.forward takes no dropout_keys_B"
        raise ConfigError(what, "model", "pass it on to GPT.forward, or set model.dropout=0")
    if optimizer is not None:
        updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
        own = {id(param) for param in model.parameters()}
        if updated != own:
            what = f"the optimizer updates {len(updated & own)} of the model's {len(own)} parameters"
            what += f" and {len(updated - own)} others" if updated - own else ""
            raise ConfigError(what, "optimizer", "build it over model.parameters()")


def _list_differences(given: ModelConfig, wanted: ModelConfig) -> list[str]:
    """`model.field=value` of `given` for each field of the architecture that differs."""
    other = wanted.architecture()
    return [f"model.{name}={value}" for name, value in given.architecture().items() if value != other[name]]


def _pretrained_weights(run: RunContext) -> Iterator[tuple[str, Tensor]]:
    """The weights of `model.init`; a shorter context takes the first learned positions."""
    name, model_config = run.config.model.init, run.model_config
    loaded = load_pretrained(name, run.console.warn)
    given = loaded.model.config
    differs = _list_differences(replace(given, seq_len=model_config.seq_len), model_config)
    if model_config.pos_emb == "learned" and given.seq_len < model_config.seq_len:
        differs.append(f"model.seq_len={given.seq_len}")
    if differs:
        raise ConfigError("model.init has a different architecture", name, f"set {' '.join(differs)}")
    if not loaded.tokenizer.shares_ids(run.tokenizer):
        ours, theirs = (f"{t.name} ({t.fingerprint[:8]})" for t in (run.tokenizer, loaded.tokenizer))
        what = f"model.init was trained with tokenizer {theirs}, the dataset is made by {ours}"
        raise DataError(what, name, "prepare the dataset with the model's tokenizer")
    for weight, values in loaded.model.state_dict().items():
        yield weight, values[: model_config.seq_len] if weight == "positions.weight" else values
    run.console.print(f"weights from {loaded.source}")


def record_changes(run: RunContext) -> None:
    """Show and log what a resume changes: one event row each."""
    for change in run.changes:
        run.console.print(f"changed  {change}")
        message = str(change)
        run.write("event", what="setting changed", key=change.key, old=change.old, new=change.new, message=message)


def is_finished(run: RunContext) -> bool:
    """Whether the restored state is the end of a run whose status is `done`."""
    is_at_end = run.state.step >= run.step_config.total_steps or run.is_out_of_patience
    return is_at_end and read_object(run.out / STATUS).get("state") == "done"


def _update_json(path: Path, values: Mapping[str, Any]) -> None:
    with storage_errors(path.parent):
        replace_file(path, json.dumps(read_object(path) | dict(values), indent=1) + "\n")


def choose_kernels(run: RunContext, *, explain: bool) -> None:
    """Use the kernels that the config names, that the run started with, or that are the fastest here.

    machine.json in the run folder keeps them: a resume must add in the same order to stay bit-identical. Rank 0 chooses
    for all.
    """
    attention = run.config.machine.attention
    if attention in WITHOUT_MASK and (run.tasks or run.config.sample.every.value):
        what = f"attention {attention!r} supports neither a mask nor a cache, which sampling and tasks need"
        raise ConfigError(what, "machine.attention", "set sample.every=0 and evaluate.tasks='', or support both")
    choice = KernelChoice.from_json(run.comm.run_on_rank0(lambda: _choose_kernels(run).to_json()))
    apply_choice(run.state, choice, run.device)
    run.console.print(f"kernels  {choice}")
    missing = misses_triton(run.device) if run.config.machine.fused == "on" else ""
    if missing:
        run.console.warn(f"fused kernels are left out: {missing}")
    if run.config.machine.master_weights == "on" and not choice.master_weights:
        run.console.warn("machine.master_weights=on is left out: in fp32 the weights are their own masters")
    reasons = choice.explain()
    if run.config.model.dropout and choice.kernels.attention in BUILT_IN:
        reason = "trains by the explicit formula with dropout: torch's kernels cannot take its masks"
        reasons.append(("dropout", f"attention {reason}"))
        if attention not in ("auto", "explicit"):
            run.console.warn(f"machine.attention={attention} evaluates and samples; it {reason}")
    for name, reason in reasons if explain else []:
        run.console.print(f"  {name:<9} {reason}")


def _choose_kernels(run: RunContext) -> KernelChoice:
    machine, device, dropout = run.config.machine, run.device, run.config.model.dropout
    compiled = wants_compile(machine, device, run.step_config.total_steps)[0] != "off"
    circumstances = {"device": device.name, "precision": device.precision, "dropout": dropout, "compiled": compiled}
    circumstances |= list_requests(machine)
    kept: Any = read_object(run.out / MACHINE).get("forms")
    match kept:
        case {"circumstances": known, "kernels": {"attention": str(name)}, "masters": bool(), "seconds": dict()}:
            if known == circumstances and name in ATTENTION:
                return KernelChoice.from_json(kept)  # else an older version kept an implementation that is gone
    micro_batch = machine.micro_batch if machine.micro_batch != "auto" else run.config.batch_seqs
    model_config = run.state.model.config
    choice = autotune(model_config, machine, device, micro_batch=micro_batch, dropout=dropout, compiled=compiled)
    _update_json(run.out / MACHINE, {"forms": {"circumstances": circumstances, **choice.to_json()}})
    return choice


def choose_micro_batch(run: RunContext) -> None:
    """Set the micro-batch: the config's, the one that the run started with, or the fastest, measured by all ranks."""
    micro_batch, device = run.config.machine.micro_batch, run.device
    if micro_batch == "auto":
        batch_seqs = run.config.batch_seqs // run.state.dims.dp_size
        circumstances = {"device": device.name, "precision": device.precision, "batch_seqs": batch_seqs}
        circumstances["loss_chunk"] = run.step_config.loss_chunk
        kept = read_object(run.out / MACHINE)
        known = kept.get("micro_batch") if kept.get("circumstances") == circumstances else None
        micro_batch = run.comm.broadcast_from_rank0(known)
        if not isinstance(micro_batch, int) or not 0 < micro_batch <= batch_seqs:
            rates = tune_micro_batch(run.state, run.step_config, device, batch_seqs)
            micro_batch = pick_micro_batch(rates)
            if len(rates) > 1:
                measured = ", ".join(f"{size}: {rate:,.0f}" for size, rate in rates.items())
                run.console.print(f"micro-batch {micro_batch} of {batch_seqs} sequences (tokens/s by size: {measured})")
            record = {"micro_batch": micro_batch, "circumstances": circumstances, "tokens_per_second": rates}
            run.comm.run_on_rank0(lambda: _update_json(run.out / MACHINE, record))
    run.step_config = replace(run.step_config, micro_batch=int(micro_batch))


def compile_model(run: RunContext) -> bool:
    """Compile the forward where that is wanted and works, and return whether it is; one warning where it does not."""
    mode, note = wants_compile(run.config.machine, run.device, run.step_config.total_steps)
    if mode != "off":
        mode = mode if run.state.dims.is_unsharded else "blocks"  # weights are gathered between them
        start = time.monotonic()
        note = compile_forward(run.state, run.step_config, run.device, mode)
        if not note:
            run.console.print(f"compiled (machine.compile={mode}) in {format_duration(time.monotonic() - start)}")
    if note:
        run.console.warn(note)
    run.comm.run_on_rank0(lambda: _update_json(run.out / MACHINE, {"compile": "off" if note else mode}))
    return mode != "off" and not note


def write_provenance(run: RunContext, resolved: ResolvedConfig) -> None:
    """Write what the run is made of: versions and machine, which mark the folder as a run, resolved config, tokenizer.

    Raises StorageError when the disk is full or failing.
    """
    facts: dict[str, Any] = {"megatoken": __version__, "commit": find_commit()}
    facts |= {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
    facts |= {"system": platform.platform(), "device": run.device.name, "precision": run.device.precision}
    facts |= {"processes": run.comm.dist_env.world_size, "peak_flops": run.device.peak_flops}
    facts |= {"peak_source": run.device.peak_source, "command": [redact(word) for word in sys.argv]}
    with storage_errors(run.out):
        replace_file(run.out / PROVENANCE, json.dumps(facts, indent=1) + "\n", durable=True)
        replace_file(run.out / CONFIG, redact(render(resolved.config, resolved.origins)), durable=True)
        run.tokenizer.save(run.out / TOKENIZER)  # also over that of a start that failed
    run.log.status(state="running", step=run.state.step, total_steps=run.step_config.total_steps, message="")
