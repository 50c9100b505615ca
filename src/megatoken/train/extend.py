"""A run whose budget has grown: how much longer it becomes, what its learning rate then does, where it goes on from.

A decay of the learning rate is made for an end. Under cosine and linear the rate rises to its place on the new, longer
curve. Decays at the end, as wsd, are made for extensions: a checkpoint from before it goes on as if the end had always
been the new one.
"""

import shutil
from bisect import bisect_left
from dataclasses import replace
from typing import Any

from megatoken.checkpoint.commit import list_steps, step_folder
from megatoken.checkpoint.manifest import verify
from megatoken.checkpoint.mirror import allow_rewind
from megatoken.config.fields import Duration, parse_value
from megatoken.config.load import RUN_CONFIG, ResolvedConfig, list_changes
from megatoken.config.schema import END_DECAYS, FIELDS, build_config, flatten
from megatoken.errors import CheckpointError, ConfigError
from megatoken.optim.lr_schedule import LRSchedule
from megatoken.system.atomic_write import storage_errors
from megatoken.train.metrics_log import METRICS
from megatoken.train.run_context import RunContext
from megatoken.train.run_folder import BUDGET_KEYS, CHECKPOINTS
from megatoken.train.state import StepConfig, build_step_config


def extend_budget(run: RunContext, resolved: ResolvedConfig, length: Duration) -> ResolvedConfig:
    """Add `length` to the budget of a run that has reached its end; one that has not goes on to it unchanged.

    So the same command may be given again after a stop. All ranks must call it. Returns the config with the new budget.
    Raises ConfigError for a run without a checkpoint.
    """
    old = run.step_config
    steps: list[int] = run.comm.run_on_rank0(lambda: list_steps(run.out / CHECKPOINTS))
    newest = max(steps, default=0)
    if not steps:
        fix = "leave --extend out: a new run is as long as its budget"
        raise ConfigError("no run to extend: it has no checkpoint", run.out, fix)
    if newest < old.total_steps:
        run.console.print(
            f"not extended: step {newest:,} of {old.total_steps:,} is not the end; going on to there"
        )
        return resolved
    total, budget = old.total_steps + old.steps(length), resolved.config.budget
    if budget.steps:
        key, budget = "budget.steps", replace(budget, steps=total)
    elif budget.tokens:
        key, budget = "budget.tokens", replace(budget, tokens=old.tokens_before(total))
    else:
        key, budget = (
            "budget.epochs",
            replace(budget, epochs=old.tokens_before(total) / old.epoch_tokens),
        )
    config = replace(resolved.config, budget=budget)
    run.changes += list_changes(run.config, config) if run.is_main else []
    run.config = config
    run.step_config = build_step_config(
        config, epoch_tokens=old.epoch_tokens, device_type=run.device.type
    )
    return replace(resolved, config=config, origins=resolved.origins | {key: f"--extend {length}"})


def set_aside_decay(run: RunContext) -> None:
    """Let a run whose budget grew go on from its newest checkpoint before a decay at the old end, if one is kept.

    Later ones, with the log and the config so far, move to RUN/finished-step-N, which is a run folder itself.
    """
    old, root = previous_steps(run), run.out / CHECKPOINTS
    if old is None or run.config.optim.schedule not in END_DECAYS:
        return
    steps = list_steps(root)
    before = [step for step in steps if old.schedule.is_before_decay(step) and _is_whole(run, step)]
    if steps and not old.schedule.is_before_decay(steps[-1]) and not before:
        what = f"no checkpoint from before the decay of {run.config.optim.schedule} is kept"
        run.console.warn(f"{what}; another time save.keep_every keeps some")
    later = [step for step in steps if before and step > before[-1]]
    if not later:
        return
    name = f"finished-step-{later[-1]:08d}"
    aside = next(
        path
        for n in range(1, 1000)
        if not (path := run.out / (name if n == 1 else f"{name}-{n}")).exists()
    )
    allow_rewind(run.out)
    with storage_errors(run.out):
        (aside / CHECKPOINTS).mkdir(parents=True)
        for file in (METRICS, RUN_CONFIG):
            if (run.out / file).is_file():
                shutil.copyfile(run.out / file, aside / file)
        for step in reversed(
            later
        ):  # a process that is killed here leaves the run at an earlier step of the decay
            step_folder(root, step).rename(step_folder(aside / CHECKPOINTS, step))
    message = f"step {before[-1]:,}, before the decay, goes on; the run as it ended is {aside}"
    run.console.print(f"extended {message}")
    run.log.write(
        "event",
        before[-1],
        run.step_config.tokens_before(before[-1]),
        what="set aside",
        message=message,
    )


def _is_whole(run: RunContext, step: int) -> bool:
    try:
        verify(step_folder(run.out / CHECKPOINTS, step))
    except CheckpointError:
        return False
    return True


def previous_steps(run: RunContext) -> StepConfig | None:
    """The lengths and the schedule before this start's changes of budget or schedule; None where there are none."""
    old = {
        change.key: parse_value(FIELDS[change.key], change.old)
        for change in run.changes
        if is_schedule(change.key)
    }
    if not old:
        return None
    config = build_config(flatten(run.config) | old)
    return build_step_config(
        config, epoch_tokens=run.step_config.epoch_tokens, device_type=run.device.type
    )


def is_schedule(key: str) -> bool:
    """Whether a setting decides the learning rate of a step."""
    return key in (
        *BUDGET_KEYS,
        "optim.lr",
        "optim.schedule",
        "optim.warmup",
        "optim.decay",
        "optim.min_lr_ratio",
    )


def record_schedule(run: RunContext) -> None:
    """Show and log what the learning rate does from here on where a resume changes it."""
    old, new, step = previous_steps(run), run.step_config, run.state.step
    if old is None or not 0 < step < new.total_steps:
        return
    before = old.schedule.lr(step - 1)
    message = describe_rates(new.schedule, step, new.total_steps, before)
    run.console.print(f"schedule {message}")
    facts: dict[str, Any] = {
        "old_total_steps": old.total_steps,
        "total_steps": new.total_steps,
        "lr_before": before,
    }
    facts |= {"lr_after": new.schedule.lr(step), "lr_end": new.schedule.lr(new.total_steps - 1)}
    run.write("event", what="schedule changed", message=message, **facts)


def describe_rates(schedule: LRSchedule, step: int, total_steps: int, before: float) -> str:
    """What the learning rate does from `step` to the end. before: that of the step before."""
    after, end = schedule.lr(step), schedule.lr(total_steps - 1)
    turn = bisect_left(range(total_steps), True, lo=step, key=lambda s: schedule.lr(s) < after)
    jump = (
        "stays" if abs(after - before) <= 0.01 * before else "rises" if after > before else "falls"
    )
    words = f"{schedule.decay}: the learning rate {jump} at step {step:,}"
    words += f", {after:.2e}" if jump == "stays" else f" from {before:.2e} to {after:.2e}"
    words += f", holds until step {min(turn, total_steps):,}" if turn > step + 1 else ""
    return words + (
        f", ends at {end:.2e} at step {total_steps:,}"
        if end < after
        else f"; the end is step {total_steps:,}"
    )
