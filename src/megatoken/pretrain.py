"""The training program: start here. A run from its setup to its last step, in order; every other part is called here.

`Trainer(config, out).fit()` trains in a run folder (docs/run-folder.md), resuming from its newest checkpoint.
"""

import shlex
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from megatoken.config.fields import Duration, parse_time
from megatoken.config.load import Change, ResolvedConfig, from_python, render
from megatoken.config.schema import Config
from megatoken.console import Console, format_duration, format_step
from megatoken.data.chat_dataset import ROW_OBJECTIVES
from megatoken.distributed.comm import Comm, join_process_group, peer_errors
from megatoken.distributed.env import read_dist_env
from megatoken.distributed.memory import choose_dims
from megatoken.distributed.stragglers import StragglerDetector
from megatoken.errors import ConfigError, ExitCode, MegatokenError, NumericsError, error_from_code
from megatoken.estimate.expectation import Expectation, expect
from megatoken.eval.rewards import REWARDS, Reward
from megatoken.launch.local import COMMAND, RESTARTS, launch
from megatoken.model.gpt import GPT
from megatoken.objectives.answer_scores import build_objective
from megatoken.objectives.batch_source import check_reward, open_batches
from megatoken.plots import draw_run
from megatoken.system.device import Device, memory_errors, open_device, with_peak
from megatoken.system.object_store import run_folder
from megatoken.train import initial_state, setup, tuning
from megatoken.train.actions import BEST, Action, CheckpointSaver, is_due, list_actions
from megatoken.train.extend import extend_budget, record_schedule, set_aside_decay
from megatoken.train.live_mirror import Mirror, check_mirror, fetch_from_mirror
from megatoken.train.metrics_log import find_last_rows
from megatoken.train.preemption import PreemptionHandler, StopRequested
from megatoken.train.recovery import REPLICA_CHECK_STEPS, Recovery
from megatoken.train.restore import restore
from megatoken.train.run_context import Callback, RunContext
from megatoken.train.run_folder import BUDGET_KEYS, check_folder
from megatoken.train.sinks import SinkProcesses, check_sinks
from megatoken.train.step import PendingStep, StepMetrics, train_step_async, wait_for_steps
from megatoken.train.throughput import ThroughputMeter

MEMORY_FIX = (
    "set machine.micro_batch to a smaller number, or machine.activation_checkpointing=block"
)
SYNC_SECONDS = 1.0  # between reads of losses from a GPU; each read waits for all queued GPU work


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended. code: DONE or STOPPED; losses in nats, None where nothing was measured."""

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
        callbacks: Sequence[Callback] = (),
        nproc: int = 1,
        console: Console | None = None,
        explain: bool = False,
        allow_changes: bool = False,
        extend: Duration | None = None,
        reward: str | Reward | None = None,
    ) -> None:
        """model: a GPT of `config.model`'s architecture, to start from its weights. optimizer: built over that model's
        parameters; its groups' learning rates keep their ratio to `optim.lr`. callbacks: called with every row of
        metrics; one that returns True stops the run. nproc: processes on this machine. explain: print what was measured
        for every automatic choice. allow_changes: resume with other values of guarded fields, or other data. extend:
        by how much a run that has reached its end becomes longer. reward: your own function of (prompt, answer, right),
        or its module:function, for the objectives grpo and ppo. Raises ConfigError for arguments that cannot be
        combined.
        """
        if nproc > 1 and (
            model is not None or optimizer is not None or callbacks or callable(reward)
        ):
            what = "model, optimizer, reward and callbacks cannot be passed to the processes that nproc starts"
            raise ConfigError(what, "Trainer", "use nproc=1, or the config: model.init, optim.name")
        if optimizer is not None and model is None:
            raise ConfigError(
                "an optimizer is given without its model",
                "Trainer",
                "give the model it was built over",
            )
        self.resolved = (
            config if isinstance(config, ResolvedConfig) else from_python(config, Path(out).name)
        )
        self.out = run_folder(out)
        self.model, self.optimizer, self.callbacks = model, optimizer, callbacks
        self.nproc, self.console, self.explain = nproc, console or Console(), explain
        self.allow_changes, self.extend, self.reward = allow_changes, extend, reward
        if isinstance(reward, str) and reward in REWARDS:
            self.reward = None  # the recipe's word for it is enough
        if reward is not None:  # a resume without it is refused
            if not (objective := self.resolved.config.objective).samples:
                what = f"a reward has no effect with objective.name={objective.name}"
                raise ConfigError(what, "Trainer", "leave it out, or train grpo or ppo")
            name = reward
            if not isinstance(
                name, str
            ):  # a callable object or functools.partial has no name of its own
                name = f"{reward.__module__}:{getattr(reward, '__qualname__', type(reward).__qualname__)}"
            objective = replace(self.resolved.config.objective, reward=name)
            self.resolved = replace(
                self.resolved, config=replace(self.resolved.config, objective=objective)
            )

    def fit(self) -> Summary:
        """Train to the end of the budget, or until a signal, the time limit or a callback asks to stop.

        Raises MegatokenError, whose `code` is the command's exit code, when the run cannot start or go on. Committed
        checkpoints are kept.
        """
        start = time.monotonic()
        if self.nproc > 1:
            code, steps, reason = self._fit_in_processes()
        else:
            dist_env, machine = read_dist_env(), self.resolved.config.machine
            device = open_device(
                machine, local_rank=dist_env.local_rank, local_world_size=dist_env.local_world_size
            )
            with (
                join_process_group(
                    dist_env, device.type
                ) as comm,  # first, so that others notice a failed rank
                memory_errors(f"rank {dist_env.rank}", MEMORY_FIX),
            ):
                code, steps, reason = self._fit(device, comm)
        last = find_last_rows(self.out, ("train", "val"))
        losses = {kind: float(row["loss"]) for kind, row in last.items()}  # "nan" in the log
        return Summary(
            code=code,
            run=str(self.out),
            steps=steps,
            tokens=self.resolved.config.budget.tokens_before(steps),
            loss=losses.get("train"),
            val_loss=losses.get("val"),
            seconds=time.monotonic() - start,
            reason=reason,
        )

    def _fit(self, device: Device, comm: Comm) -> tuple[ExitCode, int, str]:
        """Set up the run, resume it and train: how it ended, at which step, and why it stopped."""
        self.resolved = initial_state.take_architecture(self.resolved, self.out)
        config, out, is_main = self.resolved.config, self.out, comm.dist_env.is_main_process
        run = RunContext(
            config=config,
            out=out,
            console=self.console if is_main else Console(quiet=True),
            device=device,
            comm=comm,
            is_main=is_main,
            callbacks=self.callbacks,
            allow_changes=self.allow_changes,
        )
        run.changes = comm.run_on_rank0(
            partial(open_folder, run, BUDGET_KEYS if self.extend else ())
        )
        check_sinks(config.log.sinks)
        check_reward(config.objective.reward, self.reward)
        setup.open_data(run)
        if self.extend:
            self.resolved = extend_budget(run, self.resolved, self.extend)
        if self.model is not None:
            initial_state.check_own_model(run, self.model, self.optimizer)
        with (
            setup.open_log(run) as run.log,
            PreemptionHandler(
                parse_time(config.save.time_limit) or None, config.objective.rollout_steps
            ) as run.preemption,
        ):
            memory_bytes = comm.broadcast_from_rank0(
                device.memory_bytes(comm.dist_env.local_world_size)
            )
            layout = config.machine, run.model_config, device.precision, memory_bytes, comm.dist_env
            dims = choose_dims(*layout, config.optim.name)
            setup.check_memory(run, dims, memory_bytes)
            setup.apply_dims(run, dims)
            if is_main:
                run.device = with_peak(device)
            setup.print_summary(run, self.resolved.name, dims)
            initial_state.build_train_state(run, dims, self.model, self.optimizer)
            if self.extend:
                comm.run_on_rank0(partial(set_aside_decay, run))
            restore(run)
            if comm.broadcast_from_rank0(setup.is_finished(run)):
                Mirror(run).finish()
                run.console.print(
                    f"this run is finished: {out}; train --extend LENGTH makes it longer"
                )
                return ExitCode.DONE, run.state.step, ""
            comm.run_on_rank0(partial(begin, run, self.resolved))
            # The order matters: kernels may replace the compute model; its micro-batch is then measured; it is compiled
            # for that size; the hooks that reduce gradients go on its final parameters.
            tuning.choose_kernels(run, explain=self.explain)
            tuning.choose_micro_batch(run)
            compiled = tuning.compile_model(run)
            run.state.start_grad_reduction(comm)
            run.state.objective = build_objective(
                run.config.objective
            )  # after what was measured with the default
            run.batches = open_batches(run, self.reward)
            if expectation := expect(run, compiled=compiled):
                message = expectation.describe(run)
                run.console.print(f"plan     {message}")
                rate = run.step_config.batch_tokens / expectation.step_seconds
                run.write("event", what="planned", message=message, tokens_per_second=rate)
            sinks = SinkProcesses(config.log.sinks if is_main else "", out, run.console)
            code = TrainLoop(run, expectation).fit()
            if code == ExitCode.DONE:  # one that was asked to stop has no time to wait
                sinks.finish()
            return code, run.state.step, run.preemption.stop_requested

    def _fit_in_processes(self) -> tuple[ExitCode, int, str]:
        """Train in `nproc` processes of the `megatoken` command."""
        self.resolved = initial_state.take_architecture(self.resolved, self.out)
        with tempfile.TemporaryDirectory(prefix="megatoken-") as folder:
            recipe = Path(folder) / f"{self.resolved.name}.yaml"
            recipe.write_text(render(self.resolved.config, self.resolved.origins), encoding="utf-8")
            command = [*COMMAND, "train", str(recipe), "--out", str(self.out)]
            flags = {"--explain": self.explain, "--allow-changes": self.allow_changes}
            command += ["--reward", str(self.reward)] if self.reward else []
            command += [flag for flag in flags if flags[flag]] + (
                ["--extend", str(self.extend)] if self.extend else []
            )
            code = launch(command, self.nproc, RESTARTS)
        if code not in (ExitCode.DONE, ExitCode.STOPPED):
            raise error_from_code(
                code, f"training in {self.nproc} processes failed, see their output — {self.out}"
            )
        saves = find_last_rows(self.out, ("save",))
        return ExitCode(code), saves["save"]["step"] if saves else 0, ""


def open_folder(run: RunContext, allowed: Sequence[str]) -> list[Change]:
    """What differs from the start before, in the run folder or in its mirror. allowed: guarded settings that may."""
    check = partial(
        check_folder, run.out, run.config, allow_changes=run.allow_changes, allowed=allowed
    )
    changes = check()
    return check() if fetch_from_mirror(run) else changes


def begin(run: RunContext, resolved: ResolvedConfig) -> None:
    """What rank 0 does alone before training: check the space, write what the run is made of and what has changed."""
    setup.check_space(run)
    setup.write_provenance(run, resolved)
    check_mirror(run)
    setup.record_changes(run)
    record_schedule(run)


class TrainLoop:
    """The steps of a run and the actions between them."""

    def __init__(self, run: RunContext, expectation: Expectation | None) -> None:
        self.run, self.state, self.expectation = run, run.state, expectation
        self.saver = CheckpointSaver(run)
        self.actions = list_actions(
            run, self.saver
        )  # validate, tasks, sample, save: each with its interval
        self.log_every = run.step_config.steps(run.config.log.every)
        self.pending: list[PendingStep] = []  # steps whose numbers are still on the device
        self.sampled: list[dict[str, float]] = []  # what is known of the batches of these steps
        self.recovery = Recovery(run, self.saver)
        # A step is held to the limits of all steps before it, where spikes are skipped.
        self.reads_every_step = run.device.type == "cpu" or run.step_config.skip_spikes
        is_dense, world_size = (
            run.config.objective.name not in ROW_OBJECTIVES,
            run.comm.dist_env.world_size,
        )
        self.meter = ThroughputMeter(
            run.device, run.model_config, run.step_config, world_size, is_dense
        )
        self.stragglers = StragglerDetector(run.comm, run.device.type)
        self.state.compute_timer = self.stragglers.compute

    def fit(self) -> ExitCode:
        """Run the training loop; write the final status, also on failure."""
        run = self.run
        run.log.start_clock()
        try:
            # A rank can be lost, or memory end, in any forward or backward.
            with (
                peer_errors(run.comm.dist_env),
                memory_errors(f"rank {run.comm.dist_env.rank}", MEMORY_FIX),
            ):
                code = self.train()
        except Exception as error:
            self.record_failure(error)
        finally:
            run.console.close()
        if run.is_main:
            self.finish(code)
        return code

    def record_failure(self, error: Exception) -> NoReturn:
        """Write the error to the status and the metrics log, commit a checkpoint on its way, then raise the error."""
        code = int(error.code) if isinstance(error, MegatokenError) else 1
        self.run.log.status(
            state="failed", exit_code=code, step=self.state.step, message=str(error)
        )
        self.run.write("event", what="failed", message=str(error))
        # All ranks are here after a step that is not finite; of another error the others may know nothing.
        if self.run.comm.is_single_process or isinstance(error, NumericsError):
            self.saver.try_commit()
            self.saver.finish_mirror()
        else:
            self.saver.try_commit_alone()
        raise error

    def train(self) -> ExitCode:
        """Train to the end of the budget or until a stop is requested; either way everything is saved on return."""
        run, state, total_steps = self.run, self.state, self.run.step_config.total_steps
        code = ExitCode.DONE
        try:
            with closing(run.batches) as batches:
                while state.step < total_steps:
                    # All ranks read numbers after the same steps, so that they go back from a bad one together.
                    reads = run.check_stop(
                        flag=bool(self.pending) and self.meter.elapsed_seconds > SYNC_SECONDS
                    )
                    self.call_actions(
                        [action for action in self.actions if action.is_due(state.step)]
                    )
                    if run.is_out_of_patience:
                        self.report_early_stop()
                        break
                    self.saver.commit_if_written()
                    if not self.pending:
                        run.begin("step")  # on a GPU not until its queue is empty
                        self.meter.start()  # leaves the actions out of the step's time
                    with self.stragglers.data:
                        batch = batches.get(state.batch)
                    self.sampled.append(batches.metrics)
                    self.pending.append(train_step_async(state, run.step_config, run.device, batch))
                    is_checked = self.is_checked_after(state.step)
                    if reads or is_checked or self.reads_every_step:
                        self.sync_metrics()  # after a bad step it goes back
                    if is_checked:
                        self.recovery.check_replicas()  # likewise
            self.saver.try_save()  # written while the last actions compute: a run that is killed there loses no step
            self.call_actions([action for action in self.actions if action.at_end])
        except StopRequested:
            code = ExitCode.STOPPED
            self.sync_metrics()
            self.recovery.check_replicas()
        run.begin("finish")
        self.saver.save_last()
        self.saver.finish_mirror()
        return code

    def report_early_stop(self) -> None:
        """Log and show that the validation loss has not fallen for `evaluate.patience` validations."""
        run = self.run
        best = run.best_of(run.val_losses)
        lowest = (
            f"{run.val_losses[best]:.4f} at step {best}" if best is not None else "never finite"
        )
        message = f"the validation loss, {lowest}, has not fallen for {run.config.evaluate.patience} validations"
        run.write("event", what="early stop", message=message)
        run.console.print(f"step {self.state.step}: {message}: the run ends")

    def is_checked_after(self, step: int) -> bool:
        """Whether the weights of a step are used for more than the next one: an action is due, or it is the last."""
        is_last = step == self.run.step_config.total_steps
        return (
            is_last
            or is_due(REPLICA_CHECK_STEPS, step)
            or any(action.is_due(step) for action in self.actions)
        )

    def call_actions(self, actions: Sequence[Action]) -> None:
        """Call actions one after another, each unless the time limit comes before its end."""
        for action in actions:
            self.run.check_stop(action.seconds)
            start = time.monotonic()
            action.call()
            self.run.comm.barrier()  # rank 0 may have worked alone for longer than the groups of gradients wait
            action.seconds = max(action.seconds, time.monotonic() - start)

    def sync_metrics(self) -> None:
        """Wait for the pending steps; log and show them. After a bad one, `state.step` has gone back."""
        if not self.pending:
            return
        metrics, n_pending = wait_for_steps(self.state, self.pending), len(self.pending)
        tokens_before = self.run.step_config.tokens_before
        tokens = tokens_before(self.pending[-1].step) - tokens_before(self.pending[0].step - 1)
        sampled = list(self.sampled)
        self.pending.clear()
        self.sampled.clear()
        speed = self.meter.read(tokens, n_pending)
        now, seconds = self.run.log.elapsed_seconds, speed["seconds"] or 0.0
        self.run.preemption.observe(seconds * n_pending)
        self.report_stragglers()
        for number, (step, known) in enumerate(zip(metrics, sampled, strict=False), start=1):
            if step.bad:
                self.recovery.skip(step)
            else:
                self.recovery.accept(step)
                self.log_step(
                    step, {**known, **speed}, elapsed_seconds=now - (n_pending - number) * seconds
                )

    def report_stragglers(self) -> None:
        """Log and show the ranks that have become slower than the others."""
        for slow in self.stragglers.find():
            self.run.write(
                "event", what="slow rank", rank=slow.rank, phase=slow.phase, message=str(slow)
            )
            self.run.console.warn(str(slow))

    def log_step(
        self, step: StepMetrics, speed: dict[str, float | None], elapsed_seconds: float
    ) -> None:
        """Log and show a step."""
        run = self.run
        row = {
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            **step.values,
            **speed,
        }
        last = step.step == run.step_config.total_steps
        to_file = last or is_due(self.log_every, step.step)
        run.write("train", step=step.step, to_file=to_file, elapsed_seconds=elapsed_seconds, **row)
        if step.overflowed:
            run.write(
                "event",
                what="step skipped",
                message="fp16 gradients overflowed; loss scale lowered",
            )
        memory, left = run.device.peak_memory_bytes(), self.meter.remaining_seconds(step.step)
        run.log.progress(
            step=step.step,
            loss=step.loss,
            tokens_per_second=speed["tokens_per_second"],
            eta_seconds=round(left, 1),
        )
        total_steps = run.step_config.total_steps
        line = format_step({"step": step.step, **row}, total_steps, memory, left)
        run.console.step(line, share=step.step / total_steps, last=last)

    def finish(self, code: ExitCode) -> None:
        """Write the final status, draw the curves, print what to type next."""
        run, step = self.run, self.state.step
        done = code == ExitCode.DONE
        reason = "" if done else run.preemption.stop_requested or "another rank"
        run.log.status(
            state="done" if done else "stopped",
            phase="",
            exit_code=int(code),
            step=step,
            message=reason,
        )
        if not done:
            left = format_duration(self.meter.remaining_seconds(step))
            saved = f"stopped by {reason} at step {step}, all saved ({left} left)"
            run.console.print(
                f"{saved}; the same command, or megatoken train {shlex.quote(str(run.out))}, goes on"
            )
            return
        if self.expectation and self.meter.total_tokens:
            batches = self.meter.total_tokens / run.step_config.batch_tokens
            memory = run.device.peak_memory_bytes()
            run.console.print(
                f"plan     {self.expectation.describe_error(batches, self.meter.total_seconds, memory)}"
            )
        if run.config.log.plots:
            run.console.print(draw_run(run.out, pictures=run.config.log.pictures))
        best = self.saver.find_best()
        if best not in (None, step):
            run.console.print(
                f"best: {run.out / BEST} of step {best:,}, validation loss {run.val_losses[best]:.4f}"
            )
        out, start = shlex.quote(str(run.out)), shlex.quote(run.config.model.init or "RUN")
        ppo = f"train ppo --init {start} data.path=PROMPTS objective.reward={out}"
        use = {"pretrain": f'sample {out} "your prompt"', "reward": ppo}
        run.console.print(
            f"done: {run.out}; next: megatoken {use.get(run.config.objective.name, f'chat {out}')}"
        )
