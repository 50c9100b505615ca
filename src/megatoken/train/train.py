"""Train a model: read this file first.

`Trainer(config, out).fit()` sets up a run in a folder (docs/run-folder.md), resumes it from its
newest checkpoint, and trains it to the end of its budget. The loop is `run_loop`; objective.py
opens its batches, step.py computes a step, recovery.py judges it, restore.py resumes.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatoken.base.config.fields import parse_time
from megatoken.base.config.load import ResolvedConfig, from_python
from megatoken.base.config.schema import Config
from megatoken.base.console import Console
from megatoken.base.errors import (
    ConfigError,
    ExitCode,
    MegatokenError,
    NumericsError,
    error_from_code,
)
from megatoken.base.rooms import call_entries
from megatoken.base.system.address import run_folder
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.device import Device, memory_errors, open_device, restored_settings
from megatoken.base.system.metrics_log import STATUS, find_last_rows
from megatoken.distributed.comm import Comm, join_process_group, peer_errors
from megatoken.distributed.env import read_dist_env
from megatoken.distributed.preemption import PreemptionHandler, StopRequested
from megatoken.model.gpt import GPT
from megatoken.train import setup
from megatoken.train.actions import Action, call_actions, is_due, list_actions
from megatoken.train.changes import record_changes
from megatoken.train.checkpoint_saver import CheckpointSaver
from megatoken.train.initial_state import build_train_state, copy_architecture
from megatoken.train.objective import BatchSource, Objective, load_objective
from megatoken.train.recovery import REPLICA_CHECK_STEPS, Guard, settle_steps
from megatoken.train.restore import find_dataset_change, restore
from megatoken.train.run import History, Observer, Run, RunContext
from megatoken.train.step import train_step_async
from megatoken.train.step_log import StepLog, report_end

MEMORY_FIX = (
    "set machine.micro_batch to a smaller number, or machine.activation_checkpointing=block"
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How a run ended.

    code: DONE or STOPPED. run: its folder. loss, val_loss: the last ones, in nats; None if not
    measured. reason: why it was stopped; "" if it was not.
    """

    code: ExitCode
    run: str
    steps: int
    tokens: int
    loss: float | None
    val_loss: float | None
    seconds: float
    reason: str


class Trainer:
    """Trains a config in a run folder."""

    def __init__(
        self,
        config: Config | ResolvedConfig,
        out: Path | str,
        *,
        model: GPT | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        callbacks: Sequence[Observer] = (),
        nproc: int = 1,
        console: Console | None = None,
        explain: bool = False,
        allow_changes: bool = False,
        **options: Any,
    ) -> None:
        """Check the arguments. Raises ConfigError if they cannot be combined.

        model: a GPT with the architecture in `config.model` and the initial weights.
        optimizer: built over that model's parameters. The schedule sets the learning rate of each
            of its groups, multiplied by the group's initial learning rate / `optim.lr`.
        callbacks: called with every row of metrics; one that returns True stops the run.
        nproc: number of processes to start on this machine.
        explain: whether to print the measurements behind every automatic choice.
        allow_changes: whether a resume may change guarded settings or the dataset.
        options: of the objective, such as `reward` of grpo and ppo: a function of (prompt,
            completion, answer), or its name as `module:function`.
        """
        objects = [model, optimizer, *callbacks, *filter(callable, options.values())]
        if nproc > 1 and any(each is not None for each in objects):
            what = "models, optimizers and functions cannot be passed to other processes"
            raise ConfigError(what, "Trainer", "use nproc=1, or the config: model.init, optim.name")
        if optimizer is not None and model is None:
            fix = "pass the model it was built over"
            raise ConfigError("an optimizer needs its model", "Trainer", fix)
        if not isinstance(config, ResolvedConfig):
            config = from_python(config, Path(out).name)
        self.options = options
        self.objective = load_objective(config.config.objective.name, options)
        self.resolved = self.objective.record_options(config)
        self.out = run_folder(out)
        self.model = model
        self.optimizer = optimizer
        self.callbacks = callbacks
        self.nproc = nproc
        self.console = console or Console()
        self.explain = explain
        self.allow_changes = allow_changes

    @restored_settings()
    def fit(self) -> Summary:
        """Train to the end of the budget, or until a signal, the time limit or a callback stops it.

        Afterwards torch has its threads and other settings back.

        Raises MegatokenError if the run cannot start or continue; its `code` is the exit code of
        the `megatoken` command. Committed checkpoints are kept.
        """
        start = time.monotonic()
        if self.nproc > 1:
            code, steps, tokens, reason = self._fit_in_processes()
        else:
            env = read_dist_env()
            device = open_device(
                self.resolved.config.machine,
                local_rank=env.local_rank,
                local_world_size=env.local_world_size,
            )
            with (
                join_process_group(env, device.type) as comm,  # outermost: others notice a failure
                memory_errors(f"rank {env.rank}", MEMORY_FIX),
            ):
                code, steps, tokens, reason = self._fit(device, comm)
        last_rows = find_last_rows(self.out, ("train", "val"))
        losses = {kind: float(row["loss"]) for kind, row in last_rows.items()}  # "nan" in the log
        return Summary(
            code=code,
            run=str(self.out),
            steps=steps,
            tokens=tokens,
            loss=losses.get("train"),
            val_loss=losses.get("val"),
            seconds=time.monotonic() - start,
            reason=reason,
        )

    def _fit(self, device: Device, comm: Comm) -> tuple[ExitCode, int, int, str]:
        """Set up the run, resume it and train.

        Returns the exit code, the steps and tokens trained, and why it was stopped, or "".
        """
        console = self.console if comm.dist_env.is_main_process else Console(quiet=True)
        context = RunContext(out=self.out, console=console, device=device, comm=comm)
        resolved = copy_architecture(self.resolved, self.out)
        changes = comm.run_on_rank0(
            lambda: setup.check_folder(context, resolved, allow_changes=self.allow_changes)
        )
        data = setup.open_data(resolved.config, self.objective, context)
        actions = call_entries("action", resolved.config, data, context)
        config = resolved.config
        time_limit = parse_time(config.save.time_limit) or None
        with (
            setup.open_log(self.out, comm) as log_file,
            PreemptionHandler(time_limit, self.objective.stop_interval(config)) as stop,
        ):
            plan = setup.plan_run(config, data, log_file, stop, context)
            call_entries("summary", resolved.name, plan)
            observers = [*self.callbacks]
            state = build_train_state(plan, self.model, self.optimizer)
            run = Run(**vars(plan), state=state, history=History(), observers=observers)
            manifest = restore(run, allow_changes=self.allow_changes)  # None for a new run
            changes += find_dataset_change(manifest, data.dataset)
            observers += call_entries("observer", run)
            code, reason = ExitCode.DONE, ""
            is_done = run.is_at_end and read_object(self.out / STATUS).get("state") == "done"
            if comm.broadcast_from_rank0(is_done):
                run.write("finish", to_file=False)
                console.print(f"this run is finished: {self.out}; --extend LENGTH lengthens it")
            else:
                comm.run_on_rank0(lambda: setup.write_run_files(resolved, run))
                record_changes(run, changes)
                run, batches = tune_and_open(run, self.objective, explain=self.explain)
                code = train(run, self.objective, batches, actions)
                reason = stop.stop_reason if code == ExitCode.STOPPED else ""
            return code, state.step, plan.step_config.tokens_trained(state.position), reason

    def _fit_in_processes(self) -> tuple[ExitCode, int, int, str]:
        """Train in `nproc` processes of the `megatoken` command; return as `_fit` does."""
        options = self.options | {"explain": self.explain, "allow-changes": self.allow_changes}
        resolved = copy_architecture(self.resolved, self.out)
        codes = call_entries("launcher", resolved, self.out, self.nproc, options)
        if not codes:
            raise ConfigError("no room starts processes", "nproc", "start them with torchrun")
        if codes[0] not in (ExitCode.DONE, ExitCode.STOPPED):
            what = f"training in {self.nproc} processes failed, see their output — {self.out}"
            raise error_from_code(codes[0], what)
        last_save = find_last_rows(self.out, ("save",)).get("save", {"step": 0, "tokens": 0})
        return ExitCode(codes[0]), last_save["step"], last_save["tokens"], ""


def tune_and_open(run: Run, objective: Objective, *, explain: bool) -> tuple[Run, BatchSource]:
    """Tune kernels and micro-batch, then open the batches.

    explain: whether to print the measurements.
    """
    step_config = setup.tune(run, explain=explain)
    # Not before tuning, which measures steps with the cross-entropy, the default loss.
    run = replace(run, step_config=replace(step_config, loss=objective.build_loss(run.config)))
    batches = objective.open_batches(run)
    start = {"micro_batch": step_config.micro_batch, "compiled": run.state.compute.is_compiled}
    run.write("start", to_file=False, **start)
    return run, batches


def train(
    run: Run, objective: Objective, batches: BatchSource, actions: Sequence[Action] = ()
) -> ExitCode:
    """Train a run that is set up, and write its final status even if it fails.

    actions: called between steps, after save and validate.
    """
    saver = CheckpointSaver(run)
    log = StepLog(run, objective.show)
    run.log_file.start_clock()
    try:
        # Errors are converted here and not only in fit(), so that the log gets the converted ones.
        with (
            peer_errors(run.comm.dist_env),
            memory_errors(f"rank {run.comm.dist_env.rank}", MEMORY_FIX),
        ):
            code = run_loop(run, batches, saver, log, actions)
    except Exception as error:
        record_failure(run, saver, error)
        raise
    finally:
        run.console.close()
    next_command = objective.next_command(run.config, run.out)
    report_end(run, code, log, saver, next_command)
    return code


def run_loop(
    run: Run, batches: BatchSource, saver: CheckpointSaver, log: StepLog, actions: Sequence[Action]
) -> ExitCode:
    """Train to the end of the budget or until a stop is requested, and save before returning."""

    def poll() -> None:
        run.check_stop()
        saver.commit_if_written()

    state = run.state
    actions = list_actions(run, batches, saver, actions)
    guard = Guard(run.config.optim.max_skips, run.config.optim.spike != "off", state.step)
    code = ExitCode.DONE
    try:
        with closing(batches):
            while state.step < run.step_config.total_steps:
                call_actions(run, [action for action in actions if action.is_due(run)], poll)
                if reason := run.history.explain_early_stop(run.config.evaluate):
                    run.event("early stop", message=reason)
                    run.console.print(f"step {state.step:,}: {reason}: stopping early")
                    break
                if log.is_settled:
                    saver.commit_if_written()
                log.begin_step()
                with log.stragglers.data:
                    batch = batches.get(state.position.next_batch)
                # If a stop is requested on any rank, this raises StopRequested on all.
                n_targets = log.sum_targets(batch)
                pending = train_step_async(state, run.step_config, run.device, batch, n_targets)
                log.add(pending, batches.metrics)
                # The step has advanced state.step; its loss may still be on the device.
                must_check = (
                    state.step == run.step_config.total_steps
                    or is_due(REPLICA_CHECK_STEPS, state.step)
                    or any(action.is_due(run) for action in actions)
                )
                if must_check or log.must_read:
                    settle_steps(run, saver, guard, log, compares=must_check)
        saver.try_save()  # in the background, while the last actions compute
        call_actions(run, [action for action in actions if action.at_end], poll)
    except StopRequested:
        code = ExitCode.STOPPED
        settle_steps(run, saver, guard, log, compares=True)
    run.begin("finish")
    saver.save_last()  # commits what try_save wrote; after a stop it saves
    saver.finish()
    return code


def record_failure(run: Run, saver: CheckpointSaver, error: Exception) -> None:
    """Write an error to status.json and the metrics log, and commit the pending checkpoint."""
    code = int(error.code) if isinstance(error, MegatokenError) else 1
    run.log_file.status(state="failed", exit_code=code, step=run.state.step, message=str(error))
    run.event("failed", message=str(error))
    # All ranks raise NumericsError together; of other errors, this may be the only rank.
    if run.comm.is_single_process or isinstance(error, NumericsError):
        saver.try_commit()
        saver.finish()
    else:
        saver.try_commit_alone()
    run.write("end", to_file=False, exit_code=code, message=str(error))
