"""Lengthen a run that has reached its end (`train RUN --extend`), before it is trained further.

A learning-rate schedule depends on the length of the run. When a cosine or linear schedule is
extended, the rate jumps up to the new, longer curve. Schedules that decay only at the end, such as
wsd, are meant to be extended: training continues from a checkpoint before the decay, as if the run
had always had its new length.
"""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatoken.base.config.fields import Duration
from megatoken.base.config.load import RUN_CONFIG, ResolvedConfig
from megatoken.base.config.schema import END_DECAYS
from megatoken.base.console import Console
from megatoken.base.errors import CheckpointError, ConfigError
from megatoken.base.system.atomic_write import storage_errors
from megatoken.base.system.device import choose_device
from megatoken.base.system.metrics_log import METRICS, MetricsLogger
from megatoken.distributed.comm import SINGLE_PROCESS
from megatoken.store.commit import list_steps, step_folder
from megatoken.store.manifest import verify
from megatoken.store.mirror import allow_rewind
from megatoken.store.run_folder import CHECKPOINTS, EXTEND, find_changes
from megatoken.train import setup
from megatoken.train.changes import previous_steps
from megatoken.train.initial_state import copy_architecture
from megatoken.train.objective import load_objective
from megatoken.train.run import RunContext
from megatoken.train.state import StepConfig, build_step_config


def extend_run(
    resolved: ResolvedConfig, out: Path, length: Duration, console: Console, *, allow_changes: bool
) -> ResolvedConfig:
    """Return the config with `length` added to its budget, if the run has reached its end.

    Call it on rank 0 only. Checkpoints that the run saved during a decay at its end are moved
    aside. The config of an unfinished run is returned unchanged: if an extended run is stopped,
    repeating the command with --extend only resumes it. Raises ConfigError for a run without a
    checkpoint.

    allow_changes: as in `find_changes`.
    """
    machine = resolved.config.machine
    device = choose_device(machine)
    context = RunContext(out=out, console=console, device=device, comm=SINGLE_PROCESS)
    setup.check_folder(context, resolved, allow_changes=allow_changes)
    saved_steps = list_steps(out / CHECKPOINTS)
    if not saved_steps:
        fix = "leave out --extend for a new run"
        raise ConfigError("no run to extend: it has no checkpoint", out, fix)
    config = copy_architecture(resolved, out).config
    objective = load_objective(config.objective.name)
    # This process alone reads the data, also if each batch is for several ranks.
    alone = replace(config, machine=replace(config.machine, tensor_parallel=1))
    data = setup.open_data(alone, objective, replace(context, console=Console(quiet=True)))
    steps = build_step_config(config, epoch_tokens=data.epoch_tokens)
    newest = max(saved_steps)
    if newest < steps.total_steps:
        what = f"step {newest:,} is not the last of {steps.total_steps:,}"
        console.print(f"not extended: {what}; resuming")
        return resolved
    total_steps = steps.total_steps + steps.steps(length)
    tokens = steps.tokens_before(total_steps)
    lengths = {"steps": total_steps, "tokens": tokens, "epochs": tokens / (steps.epoch_tokens or 1)}
    budget = resolved.config.budget
    name = next(name for name in lengths if getattr(budget, name))  # exactly one is set
    budget = replace(budget, **{name: lengths[name]})  # type: ignore[arg-type]
    origins = resolved.origins | {f"budget.{name}": f"{EXTEND}{length}"}
    extended = replace(resolved, config=replace(resolved.config, budget=budget), origins=origins)
    changes = find_changes(out, extended, allow_changes=allow_changes)
    old = previous_steps(replace(config, budget=budget), steps, changes)
    if old is not None and config.optim.schedule in END_DECAYS:
        set_aside_decay(out, old, config.optim.schedule, console)
    return extended


def set_aside_decay(out: Path, old: StepConfig, schedule: str, console: Console) -> None:
    """Move aside the checkpoints that a run saved during its learning-rate decay.

    They move to RUN/finished-step-N, a run folder with copies of the log and config so far. The run
    then resumes from its newest checkpoint before the decay.

    old: the steps of the run before it was extended.
    """
    root = out / CHECKPOINTS
    saved_steps = list_steps(root)
    early_steps = [
        step
        for step in saved_steps
        if old.schedule.is_before_decay(step) and _is_intact(step_folder(root, step))
    ]
    if not early_steps:
        if not old.schedule.is_before_decay(saved_steps[-1]):
            what = f"no checkpoint from before the decay of {schedule}"
            console.warn(f"{what}; save.keep_every keeps some")
        return
    late_steps = [step for step in saved_steps if step > early_steps[-1]]
    if not late_steps:
        return
    aside = _name_unused(out / f"finished-step-{late_steps[-1]:08d}")
    with MetricsLogger.open(out) as log, storage_errors(out):
        allow_rewind(out)
        (aside / CHECKPOINTS).mkdir(parents=True)
        for file in (METRICS, RUN_CONFIG):
            if (out / file).is_file():
                shutil.copyfile(out / file, aside / file)
        for step in reversed(late_steps):  # if killed here, the run resumes from an earlier step
            step_folder(root, step).rename(step_folder(aside / CHECKPOINTS, step))
        what = f"continuing from step {early_steps[-1]:,}, before the decay; finished run: {aside}"
        console.print(f"extended {what}")
        tokens = old.tokens_before(early_steps[-1])
        log.write("event", early_steps[-1], tokens, what="set aside", message=what)


def _name_unused(folder: Path) -> Path:
    name = folder
    number = 1
    while name.exists():
        number += 1
        name = folder.with_name(f"{folder.name}-{number}")
    return name


def _is_intact(checkpoint: Path) -> bool:
    with suppress(CheckpointError):
        verify(checkpoint)
        return True
    return False
