"""Set up a run before its first step: data, layout, checks, and the files that describe it.

train.py calls these functions once each, in order. initial_state.py builds the model.
"""

import json
import platform
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megatoken import __version__
from megatoken.base.config.load import Change, ResolvedConfig, render
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import Config
from megatoken.base.console import format_memory
from megatoken.base.errors import ConfigError, StorageError
from megatoken.base.redact import redact
from megatoken.base.rooms import call_entries
from megatoken.base.system.atomic_write import replace_file, storage_errors
from megatoken.base.system.machine import find_commit
from megatoken.base.system.metrics_log import MetricsLogger
from megatoken.base.system.threads import set_thread_count, thread_count
from megatoken.data.mixture import load_mixture
from megatoken.distributed.comm import Comm
from megatoken.distributed.memory import choose_dims, count_state_bytes, holds_low_precision
from megatoken.distributed.parallel_dims import ParallelDims, disable_unsupported
from megatoken.distributed.preemption import PreemptionHandler
from megatoken.model.gpt import set_attention
from megatoken.optim.costs import count_saved_bytes
from megatoken.store.commit import choose_surplus, count_needed_bytes, list_steps
from megatoken.store.run_folder import CHECKPOINTS, CONFIG, PROVENANCE, TOKENIZER, find_changes
from megatoken.train.objective import Objective
from megatoken.train.run import Run, RunContext, RunData, RunPlan
from megatoken.train.state import StepConfig, build_step_config

MEMORY_MARGIN = 2  # a run may need twice the free memory: other programs may end or be swapped out


def check_folder(
    context: RunContext, resolved: ResolvedConfig, *, allow_changes: bool
) -> list[Change]:
    """Check that the run folder can be used, and fetch a checkpoint from elsewhere if it has none.

    An entry of the kind "fetch" is a function of the config and the context that returns whether it
    fetched a checkpoint. Returns the settings that changed since the last start. Raises what
    `find_changes` and these entries raise.

    allow_changes: as in `find_changes`.
    """
    find = partial(find_changes, context.out, resolved, allow_changes=allow_changes)
    changes = find()
    return find() if any(call_entries("fetch", resolved.config, context)) else changes


def open_log(out: Path, comm: Comm) -> MetricsLogger:
    """Open the metrics log on rank 0, which locks the run folder; other ranks get a dummy log.

    Raises StorageError on all ranks if another process uses the folder or it is not writable.
    """
    logs = [MetricsLogger(out)]
    comm.run_on_rank0(lambda: logs.append(MetricsLogger.open(out)))
    return logs[-1]


def open_data(config: Config, objective: Objective, context: RunContext) -> RunData:
    """Open the dataset, its tokenizer, and the loader of this data-parallel rank.

    Raises DataError if something is missing or damaged, or if the dataset is smaller than a batch.
    Raises ConfigError if model.vocab_size is too small for the tokenizer, or if the batch does not
    divide among ranks.
    """
    dataset = load_mixture(
        config.data.path,
        external_tokenizer=config.data.tokenizer,
        cache=config.data.cache,
        report=context.console.print,
    )
    vocabulary = dataset.vocabulary
    objective.check_data(config, dataset)
    if 0 < config.model.vocab_size < vocabulary.vocab_size:
        what = f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's"
        fix = "set it to 0 to use the tokenizer's"
        raise ConfigError(f"{what} {vocabulary.vocab_size}", "model.vocab_size", fix)
    dataset.set_vocab_size(vocabulary.vocab_size)
    loader, epoch_tokens = objective.open_data(config, dataset, context.comm)
    return RunData(
        dataset=dataset,
        model_config=config.model.resolve(vocabulary.vocab_size),
        loader=loader,
        epoch_tokens=epoch_tokens,
        fills_context=objective.fills_context,
        is_chat=objective.is_chat,
    )


def plan_run(
    config: Config,
    data: RunData,
    log_file: MetricsLogger,
    stop: PreemptionHandler,
    context: RunContext,
) -> RunPlan:
    """Choose how the model is sharded and convert the run's durations to steps.

    Raises what `choose_layout` raises.
    """
    config, dims = choose_layout(config, data.model_config, context)
    device = context.device
    if context.is_main and not device.peak_flops:
        device = next(iter(call_entries("peak", device)), device)
    return RunPlan(
        **vars(context) | {"device": device},
        config=config,
        data=data,
        step_config=build_step_config(
            config,
            epoch_tokens=data.epoch_tokens,
            device_type=device.type,
            is_fused=holds_low_precision(config.machine, dims, device.precision),
        ),
        dims=dims,
        log_file=log_file,
        stop=stop,
    )


def choose_layout(
    config: Config, model_config: ModelConfig, context: RunContext
) -> tuple[Config, ParallelDims]:
    """Choose how to shard the model; return the config and the mesh of processes.

    Machine settings that the sharding does not support are turned off in the returned config.
    Raises ConfigError if the model cannot fit in memory.
    """
    device = context.device
    env = context.comm.dist_env
    memory_bytes = context.comm.broadcast_from_rank0(device.memory_bytes(env.local_world_size))
    optimizer = config.optim.name
    dims = choose_dims(config.machine, model_config, device.precision, memory_bytes, env, optimizer)
    needed = count_state_bytes(dims, model_config, optimizer, device.precision)
    if 0 < MEMORY_MARGIN * memory_bytes < needed:
        what = (
            f"weights, gradients and moments need {format_memory(needed)} per process, "
            f"available: {format_memory(memory_bytes)}"
        )
        raise ConfigError(what, "model", "choose a smaller model, or split it: docs/scaling-up.md")
    if config.machine.deterministic and not dims.is_unsharded:
        what = "machine.deterministic: a split model sums gradients in an order that depends on"
        context.console.warn(
            f"{what} the ranks; machine.sharding=none and tensor_parallel=1 do not"
        )
    return replace(config, machine=disable_unsupported(config.machine, dims)), dims


def tune(run: Run, *, explain: bool) -> StepConfig:
    """Choose kernels, micro-batch and compilation: by a room that measures them, if there is one.

    Otherwise torch's operations run uncompiled, with the micro-batch of the config, or one
    sequence. Returns the step config with the micro-batch. Raises ConfigError for settings that
    cannot be applied.

    explain: whether to print the measurements.
    """
    tuned: list[StepConfig] = call_entries("tuner", run, explain)
    if tuned:
        return tuned[0]
    machine = run.config.machine
    for key in ("compile", "gemm_backend", "fp8", "fused", "master_weights"):
        if getattr(machine, key) not in ("auto", "off", "torch"):
            what = "this installation has no room that tunes steps"
            raise ConfigError(what, f"machine.{key}", "leave it out")
    if machine.attention != "auto":
        set_attention(run.state.model, machine.attention)
    set_thread_count(min(run.comm.gather(thread_count())))  # rounding depends on it
    size = 1 if machine.micro_batch == "auto" else machine.micro_batch
    run.state.start_grad_reduction()
    return replace(run.step_config, micro_batch=size)


def write_run_files(resolved: ResolvedConfig, run: Run) -> None:
    """Check the free space, and write provenance, config, tokenizer and status.

    Call it on rank 0 only. Raises StorageError if the disk is too full or failing.
    """
    out = run.out
    check_space(run.config, run.data.model_config, run.step_config, run.state.step, out)
    config_text = redact(render(resolved.config, resolved.origins))
    provenance = {
        "megatoken": __version__,
        "commit": find_commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": run.device.name,
        "precision": run.device.precision,
        "processes": run.comm.dist_env.world_size,
        "peak_flops": run.device.peak_flops,
        "peak_source": run.device.peak_source,
        "command": [redact(argument) for argument in sys.argv],
    }
    with storage_errors(out):
        content = json.dumps(provenance, indent=1) + "\n"
        replace_file(out / PROVENANCE, content, durable=True)  # marks it as a run
        replace_file(out / CONFIG, config_text, durable=True)
        run.data.vocabulary.save(out / TOKENIZER)  # replaces one from a failed start
    total_steps = run.step_config.total_steps
    run.log_file.status(state="running", step=run.state.step, total_steps=total_steps, message="")


def check_space(
    config: Config, model_config: ModelConfig, steps: StepConfig, step: int, out: Path
) -> None:
    """Raise StorageError unless the disk has room for the most checkpoints that exist at one time.

    That is one more than the settings keep, because an old checkpoint is removed only after a new
    one is committed. With a mirror it is two more, because one that is being copied is kept, too.
    """
    save = config.save
    every = steps.steps(save.every)
    n_saves = (steps.total_steps - step) // every + 1 if every else 1
    saved = list_steps(out / CHECKPOINTS)
    surplus = choose_surplus(
        saved, keep_last=save.keep_last, keep_every=steps.steps(save.keep_every)
    )
    n_kept = save.keep_last + save.keep_best + bool(save.mirror)
    n_missing = min(n_saves, max(0, n_kept + 1 - min(len(saved), n_kept) - len(surplus)))
    needed = n_missing * count_needed_bytes(count_saved_bytes(config.optim.name, model_config))
    free = shutil.disk_usage(out).free
    if free < needed:
        what = (
            f"no space for {n_missing} more checkpoints: {format_memory(needed)} needed, "
            f"{format_memory(free)} free"
        )
        raise StorageError(what, out, "free some space, lower save.keep_last, or change --out")
