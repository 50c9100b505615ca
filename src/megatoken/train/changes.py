"""Report the settings that a resume changes, and their effect on the learning rate."""

from collections.abc import Sequence

from megatoken.base.config.fields import parse_value
from megatoken.base.config.load import Change
from megatoken.base.config.schema import FIELDS, Config, build_config, flatten
from megatoken.optim.lr_schedule import describe_rates
from megatoken.store.run_folder import BUDGET_KEYS
from megatoken.train.run import Run
from megatoken.train.state import StepConfig, build_step_config

SCHEDULE_KEYS = (
    *BUDGET_KEYS,
    "optim.lr",
    "optim.schedule",
    "optim.warmup",
    "optim.decay",
    "optim.min_lr_ratio",
)


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
        run.console.print(f"changed       {change}")
        run.event(
            "setting changed", key=change.key, old=change.old, new=change.new, message=str(change)
        )
    old = previous_steps(run.config, run.step_config, changes)
    new = run.step_config
    step = run.state.step
    if old is None or not 0 < step < new.total_steps:
        return
    old_lr = old.schedule.lr(step - 1)
    message = describe_rates(new.schedule, step, new.total_steps, old_lr)
    run.console.print(f"schedule      {message}")
    run.event(
        "schedule changed",
        message=message,
        old_total_steps=old.total_steps,
        total_steps=new.total_steps,
        lr_before=old_lr,
        lr_after=new.schedule.lr(step),
        lr_end=new.schedule.lr(new.total_steps - 1),
    )
