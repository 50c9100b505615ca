"""What happens between a checked config and the first step, in the order in which pretrain.py calls it.

All of it happens once. The model is built in train/initial_state.py, what is measured for it in train/tuning.py.
"""

import json
import platform
import shutil
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatoken import __version__
from megatoken.checkpoint.commit import count_needed_bytes, list_steps, list_surplus
from megatoken.config.load import ResolvedConfig, render
from megatoken.config.model_config import describe_heads
from megatoken.console import format_count, format_quantity
from megatoken.data.chat_dataset import (
    OBJECTIVE_DATA,
    ROW_OBJECTIVES,
    Marks,
    open_rows,
    require_data_for,
)
from megatoken.data.dataloader import DataLoader
from megatoken.data.mixture import count_rows, load_mixture
from megatoken.distributed.parallel_dims import (
    ParallelDims,
    build_dims,
    check_dims,
    count_state_bytes,
    disable_unsupported,
)
from megatoken.errors import ConfigError, DataError, StorageError
from megatoken.eval.multiple_choice import read_tasks
from megatoken.model.flops import (
    count_matmul_parameters,
    count_padded_parameters,
    count_parameters,
    expected_initial_loss,
    flops_per_token,
)
from megatoken.optim.costs import count_optimizer_bytes, count_saved_bytes
from megatoken.redact import redact
from megatoken.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.system.machine import find_commit
from megatoken.train.metrics_log import STATUS, MetricsLogger
from megatoken.train.run_context import RunContext
from megatoken.train.run_folder import CHECKPOINTS, CONFIG, PROVENANCE, TOKENIZER
from megatoken.train.state import build_step_config

SCANNED_TOKENS = 1 << 24  # for a token between documents
MEMORY_MARGIN = 2  # of what is free: other programs may end, and some of it may be swapped


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
    external_tokenizer, report = config.data.tokenizer, run.console.print
    run.dataset = load_mixture(
        config.data.path, external_tokenizer=external_tokenizer, report=report
    )
    vocab_size, seq_len = run.tokenizer.vocab_size, config.model.seq_len
    marks = open_marks(run)
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
        raise ConfigError(
            "a mixture is shuffled",
            "data.order",
            "set data.order=shuffled, or one dataset in data.path",
        )
    if config.objective.name in ROW_OBJECTIVES:
        epoch_tokens = (
            count_rows(run.dataset, config.objective.name) * config.objective.answers * seq_len
        )
        run.step_config = build_step_config(
            config, epoch_tokens=epoch_tokens, device_type=run.device.type
        )
        return
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
        marks=marks,
        document_start=find_document_start(run)
        if config.data.document_mask and marks is None
        else None,
    )
    epoch_tokens = run.loader.n_windows * seq_len
    run.step_config = build_step_config(
        config, epoch_tokens=epoch_tokens, device_type=run.device.type
    )


def open_marks(run: RunContext) -> Marks | None:
    """Check that the dataset is of the kind that the objective needs; the marks of its training rows, None for text.

    Raises DataError for another kind, and for rows of another context.
    """
    objective, seq_len = run.config.objective.name, run.config.model.seq_len
    kind = OBJECTIVE_DATA[objective]
    for part in run.dataset.parts:
        require_data_for(objective, part.dataset)
        rows_of = (
            part.dataset.manifest.source.get("seq_len", seq_len) if kind != "text" else seq_len
        )
        if rows_of != seq_len:
            what = f"its rows are for a context of {rows_of:,} tokens, model.seq_len is {seq_len:,}"
            fix = f"prepare it again with --context {seq_len}, or set model.seq_len={rows_of}"
            raise DataError(what, part.name, fix)
    if kind == "text":
        return None
    return np.concatenate([open_rows(part.dataset, "train").marks for part in run.dataset.parts])


def find_document_start(run: RunContext) -> int:
    """The id between documents. Raises ConfigError where the training split is one document, or seems to be.

    Shards of other programs do not record their documents, and may separate them by another id.
    """
    id, sizes = (
        run.tokenizer.eot,
        [part.dataset.manifest.documents.get("train", 0) for part in run.dataset.parts],
    )
    what = "" if max(sizes) != 1 or 0 in sizes else "the training split is one document"
    if 0 in sizes:
        count = min(len(run.dataset.train), SCANNED_TOKENS)
        if not (run.dataset.train.read(0, count) == id).any():
            what = f"no end-of-text token (id {id}) among the first {count:,} training tokens"
    if what:
        fix = "leave it out, or prepare the text as several documents"
        raise ConfigError(f"data.document_mask has no effect: {what}", "data.document_mask", fix)
    return id


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
    needed = missing * count_needed_bytes(
        count_saved_bytes(run.config.optim.name, run.model_config)
    )
    free = shutil.disk_usage(run.out).free
    if free < needed:
        what = f"no room for checkpoints, {missing} more needed at once: {format_quantity(needed, 'B')}"
        what += f", {format_quantity(free, 'B')} are free"
        raise StorageError(
            what, run.out, "free some space, lower save.keep_last or choose another --out"
        )


def check_memory(run: RunContext, dims: ParallelDims, memory_bytes: int) -> None:
    """Raise ConfigError where weights, gradients and moments alone need far more than a process has (0: unknown)."""
    n_params = count_padded_parameters(run.model_config)
    optimizer_bytes = count_optimizer_bytes(run.config.optim.name, run.model_config)
    needed = count_state_bytes(dims, n_params, optimizer_bytes, run.device.precision)
    if 0 < MEMORY_MARGIN * memory_bytes < needed:
        what = f"weights, gradients and moments of {format_quantity(n_params)} parameters need "
        what += f"{format_quantity(needed, 'B')} in each process, which has {format_quantity(memory_bytes, 'B')}"
        raise ConfigError(
            what,
            "model",
            "choose a smaller model.preset, n_layer or d_model, or split it: docs/scaling-up.md",
        )


def apply_dims(run: RunContext, dims: ParallelDims) -> None:
    """Turn off the settings that a split model cannot use; warn where the config asks for one."""
    asked = run.config.machine
    machine = disable_unsupported(asked, dims)
    for name in ("master_weights", "fused"):
        if getattr(asked, name) == "on" != getattr(machine, name):
            run.console.warn(f"machine.{name}=on is left out: the model is split ({dims})")
    if asked.sharding not in ("auto", dims.sharding):
        run.console.warn(
            f"machine.sharding={asked.sharding} is left out: one data-parallel process shards nothing"
        )
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
    size = (
        f"{steps.ramp.start:,} to {steps.batch_tokens:,}"
        if steps.ramp
        else f"{steps.batch_tokens:,}"
    )
    length = f"{format_count(steps.total_steps, 'step')} of {size} tokens = {format_quantity(tokens)} tokens"
    peak = (
        f"peak {format_quantity(device.peak_flops, 'FLOP/s')} ({device.peak_source})"
        if device.peak_flops
        else ""
    )
    is_rows = (
        run.config.objective.name in ROW_OBJECTIVES
    )  # shorter than contexts, and more is computed than a step
    total = f", {format_quantity(flops * tokens, 'FLOP')} in all"
    first_loss = (
        f"expected at first: ln({model.vocab_size:,}) = {expected_initial_loss(model):.2f} nats"
    )
    rows = [
        ("run", f"{name} in {run.out}"),
        ("model", f"{sizes}: {counts}"),
        ("data", f"{dataset}: {splits}, tokenizer {tokenizer.name} ({tokenizer.vocab_size:,} ids)"),
        ("budget", f"{length} = {_format_epochs(tokens / steps.epoch_tokens)} epochs"),
        *(("", row) for row in _describe_parts(run, tokens)),
        ("work", f"{flops:,} FLOPs a token (full attention)" + ("" if is_rows else total)),
        (
            "machine",
            ", ".join(
                filter(None, (str(device.torch_device), device.name, device.precision, peak))
            ),
        ),
        ("layout", "" if dims == ParallelDims() else str(dims)),
        ("loss", "" if run.config.model.init else first_loss),
    ]
    run.console.table([row for row in rows if row[1]])
    schedule, unit = steps.schedule, "tokens" if steps.ramp else "steps"
    for key, n_units in (
        ("optim.warmup", schedule.warmup),
        ("optim.decay", schedule.decay_length or 0),
    ):
        if n_units > schedule.total:
            run.console.warn(
                f"{key} is {n_units:,} {unit}, longer than the run of {schedule.total:,}"
            )
    unused = model.vocab_size - tokenizer.vocab_size
    if (
        unused >= model.vocab_multiple and not run.config.model.init
    ):  # fewer may pad the vocabulary of another program
        what = f"{unused:,} of the model's {model.vocab_size:,} ids stand for no text of this tokenizer"
        run.console.warn(
            f"{what}; model.vocab_size=0 takes the tokenizer's {tokenizer.vocab_size:,}"
        )
    if not dataset.n_val:
        run.console.warn("the dataset has no validation split: no held-out loss will be measured")


def _describe_parts(run: RunContext, tokens: int) -> list[str]:
    """A line about each dataset of a mixture."""
    parts, seq_len = run.dataset.parts, run.model_config.seq_len
    if len(parts) == 1:
        return []
    whole = [(len(part.dataset.train) - 1) // seq_len * seq_len for part in parts]
    epochs = [
        _format_epochs(tokens * part.share / size) for part, size in zip(parts, whole, strict=True)
    ]
    return [
        f"{part.name}: {part.share:.1%} of the batches, {passes} epochs of {size:,} tokens"
        for part, size, passes in zip(parts, whole, epochs, strict=True)
    ]


def _format_epochs(epochs: float) -> str:
    return f"{epochs:.3g}" if epochs < 100 else f"{epochs:,.0f}"


def record_changes(run: RunContext) -> None:
    """Show and log what a resume changes: one event row each."""
    for change in run.changes:
        run.console.print(f"changed  {change}")
        message = str(change)
        run.write(
            "event",
            what="setting changed",
            key=change.key,
            old=change.old,
            new=change.new,
            message=message,
        )


def is_finished(run: RunContext) -> bool:
    """Whether the restored state is the end of a run whose status is `done`."""
    return run.is_at_end and read_object(run.out / STATUS).get("state") == "done"


def write_provenance(run: RunContext, resolved: ResolvedConfig) -> None:
    """Write what the run is made of: versions and machine, which mark the folder as a run, resolved config, tokenizer.

    Raises StorageError when the disk is full or failing.
    """
    facts: dict[str, Any] = {"megatoken": __version__, "commit": find_commit()}
    facts |= {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    facts |= {
        "system": platform.platform(),
        "device": run.device.name,
        "precision": run.device.precision,
    }
    facts |= {"processes": run.comm.dist_env.world_size, "peak_flops": run.device.peak_flops}
    facts |= {"peak_source": run.device.peak_source, "command": [redact(word) for word in sys.argv]}
    with storage_errors(run.out):
        replace_file(run.out / PROVENANCE, json.dumps(facts, indent=1) + "\n", durable=True)
        replace_file(
            run.out / CONFIG, redact(render(resolved.config, resolved.origins)), durable=True
        )
        run.tokenizer.save(run.out / TOKENIZER)  # also over that of a start that failed
    run.log.status(
        state="running", step=run.state.step, total_steps=run.step_config.total_steps, message=""
    )
