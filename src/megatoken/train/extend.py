"""Extend the budget of a finished run (`train --extend`), and report changed learning rates.

A learning-rate schedule depends on the length of the run. When a cosine or linear schedule is
extended, the rate jumps up to the new, longer curve. Schedules that decay only at the end, such as
wsd, are meant to be extended: training continues from a checkpoint before the decay, as if the run
had always had its new length.
"""

import shutil
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatoken.base.config.fields import Duration, parse_value
from megatoken.base.config.load import RUN_CONFIG, Change, ResolvedConfig
from megatoken.base.config.schema import (
    END_DECAYS,
    FIELDS,
    BudgetConfig,
    Config,
    build_config,
    flatten,
)
from megatoken.base.errors import CheckpointError, ConfigError
from megatoken.base.system.atomic_write import storage_errors
from megatoken.base.system.metrics_log import METRICS
from megatoken.optim.lr_schedule import LRSchedule
from megatoken.store.commit import list_steps, step_folder
from megatoken.store.manifest import verify
from megatoken.store.mirror import allow_rewind
from megatoken.train.run import Run, RunContext, RunData, RunPlan
from megatoken.train.run_folder import BUDGET_KEYS, CHECKPOINTS
from megatoken.train.state import StepConfig, build_step_config

SCHEDULE_KEYS = (
    *BUDGET_KEYS,
    "optim.lr",
    "optim.schedule",
    "optim.warmup",
    "optim.decay",
    "optim.min_lr_ratio",
)


def extend_budget(
    resolved: ResolvedConfig, data: RunData, length: Duration, context: RunContext
) -> ResolvedConfig:
    """Return the config with `length` added to its budget, if the run has reached its end.

    The config of an unfinished run is returned unchanged: if an extended run is stopped, repeating
    the command with --extend only resumes it. All ranks must call this. Raises ConfigError for a
    run without a checkpoint.
    """
    saved_steps: list[int] = context.comm.run_on_rank0(
        lambda: list_steps(context.out / CHECKPOINTS)
    )
    if not saved_steps:
        fix = "leave out --extend for a new run"
        raise ConfigError("no run to extend: it has no checkpoint", context.out, fix)
    steps = build_step_config(resolved.config, epoch_tokens=data.epoch_tokens)
    newest = max(saved_steps)
    if newest < steps.total_steps:
        what = f"step {newest:,} is not the last of {steps.total_steps:,}"
        context.console.print(f"not extended: {what}; resuming")
        return resolved
    key, budget = _lengthen(resolved.config.budget, steps, steps.total_steps + steps.steps(length))
    config = replace(resolved.config, budget=budget)
    return replace(resolved, config=config, origins=resolved.origins | {key: f"--extend {length}"})


def _lengthen(
    budget: BudgetConfig, steps: StepConfig, total_steps: int
) -> tuple[str, BudgetConfig]:
    """Return the key of the budget setting to change, and a budget of `total_steps` steps."""
    tokens = steps.tokens_before(total_steps)
    if budget.steps:
        return "budget.steps", replace(budget, steps=total_steps)
    if budget.tokens:
        return "budget.tokens", replace(budget, tokens=tokens)
    return "budget.epochs", replace(budget, epochs=tokens / steps.epoch_tokens)


def set_aside_decay(plan: RunPlan, changes: Sequence[Change]) -> None:
    """Move aside the checkpoints that an extended run saved during its old learning-rate decay.

    They move to RUN/finished-step-N, a run folder with copies of the log and config so far. The run
    then resumes from its newest checkpoint before the decay. Does nothing for schedules that decay
    from the start.
    """
    schedule = plan.config.optim.schedule
    old = previous_steps(plan.config, plan.step_config, changes)
    if old is None or schedule not in END_DECAYS:
        return
    out = plan.out
    root = out / CHECKPOINTS
    saved_steps = list_steps(root)
    early_steps = [
        step
        for step in saved_steps
        if old.schedule.is_before_decay(step) and _is_intact(step_folder(root, step))
    ]
    if not early_steps:
        if saved_steps and not old.schedule.is_before_decay(saved_steps[-1]):
            what = f"no checkpoint from before the decay of {schedule}"
            plan.console.warn(f"{what}; save.keep_every keeps some")
        return
    late_steps = [step for step in saved_steps if step > early_steps[-1]]
    if not late_steps:
        return
    aside = _name_unused(out / f"finished-step-{late_steps[-1]:08d}")
    allow_rewind(out)
    with storage_errors(out):
        (aside / CHECKPOINTS).mkdir(parents=True)
        for file in (METRICS, RUN_CONFIG):
            if (out / file).is_file():
                shutil.copyfile(out / file, aside / file)
        for step in reversed(late_steps):  # if killed here, the run resumes from an earlier step
            step_folder(root, step).rename(step_folder(aside / CHECKPOINTS, step))
    message = f"continuing from step {early_steps[-1]:,}, before the decay; finished run: {aside}"
    plan.console.print(f"extended {message}")
    tokens = plan.step_config.tokens_before(early_steps[-1])
    plan.log_file.write("event", early_steps[-1], tokens, what="set aside", message=message)


def _name_unused(folder: Path) -> Path:
    name = folder
    number = 1
    while name.exists():
        number += 1
        name = folder.with_name(f"{folder.name}-{number}")
    return name


def _is_intact(checkpoint: Path) -> bool:
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True


def previous_steps(
    config: Config, steps: StepConfig, changes: Sequence[Change]
) -> StepConfig | None:
    """Return the step config before `changes`, or None if no change affects lengths or schedule."""
    old = {
        change.key: parse_value(FIELDS[change.key], change.old)
        for change in changes
        if change.key in SCHEDULE_KEYS
    }
    if not old:
        return None
    return build_step_config(build_config(flatten(config) | old), epoch_tokens=steps.epoch_tokens)


def record_changes(run: Run, changes: Sequence[Change]) -> None:
    """Print and log each setting that a resume changes, and the effect on the learning rate."""
    if not run.is_main:
        return
    for change in changes:
        run.console.print(f"changed  {change}")
        run.log.event(
            "setting changed", key=change.key, old=change.old, new=change.new, message=str(change)
        )
    old = previous_steps(run.config, run.step_config, changes)
    new = run.step_config
    step = run.state.step
    if old is None or not 0 < step < new.total_steps:
        return
    old_lr = old.schedule.lr(step - 1)
    message = describe_rates(new.schedule, step, new.total_steps, old_lr)
    run.console.print(f"schedule {message}")
    run.log.event(
        "schedule changed",
        message=message,
        old_total_steps=old.total_steps,
        total_steps=new.total_steps,
        lr_before=old_lr,
        lr_after=new.schedule.lr(step),
        lr_end=new.schedule.lr(new.total_steps - 1),
    )


def describe_rates(schedule: LRSchedule, step: int, total_steps: int, old_lr: float) -> str:
    """Describe the learning rate from `step` to the end. old_lr: the rate at the previous step."""
    lr = schedule.lr(step)
    end = schedule.lr(total_steps - 1)
    if abs(lr - old_lr) <= 0.01 * old_lr:
        text = f"learning rate stays {lr:.2e} at step {step:,}"
    else:
        verb = "rises" if lr > old_lr else "falls"
        text = f"learning rate {verb} from {old_lr:.2e} to {lr:.2e} at step {step:,}"
    turn = bisect_left(range(total_steps), True, lo=step, key=lambda s: schedule.lr(s) < lr)
    if turn > step + 1 and schedule.lr(step + 1) == lr:
        text += f", constant until step {min(turn, total_steps):,}"
    if end < lr:
        text += f", ends at {end:.2e} at step {total_steps:,}"
    return f"{schedule.decay}: {text}"
