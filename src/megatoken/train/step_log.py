"""Read losses and gradient norms from the device, log and show them."""

import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megatoken.base.console import format_duration, format_step
from megatoken.base.errors import ExitCode
from megatoken.base.rooms import list_entries
from megatoken.data.dataloader import Batch
from megatoken.distributed.stragglers import StragglerDetector
from megatoken.model.flops import describe_mfu
from megatoken.train.actions import is_due
from megatoken.train.checkpoint_saver import BEST, CheckpointSaver
from megatoken.train.run import Run
from megatoken.train.step import PendingStep, StepMetrics, wait_for_steps

Show = Callable[[Mapping[str, Any]], list[str]]  # Objective.show

SYNC_SECONDS = 1.0  # between reads of losses from a GPU; each read waits for all queued GPU work
MAX_READ_STEPS = 100  # between reads; if steps suddenly take longer, a stop has to wait for them


class StepLog:
    """Collects steps whose losses are still on the device, and reads and logs them together.

    All ranks must make the same calls.
    """

    def __init__(self, run: Run, show: Show) -> None:
        self._run = run
        self._show = show
        self._pending: list[tuple[PendingStep, dict[str, float]]] = []  # step, batch_values
        self._every = run.step_config.steps(run.config.log.every)
        # To skip spikes, each step is compared with limits computed from all steps before it.
        self._reads_each_step = run.device.type == "cpu" or run.step_config.skip_spikes
        self._read_every = 1  # steps
        self._start = time.perf_counter()  # of the steps that were not read
        self._full_seconds = 0.0  # of a full batch
        self.stragglers = StragglerDetector(run.comm, run.device.type)
        run.state.compute_timer = self.stragglers.compute

    @property
    def is_settled(self) -> bool:
        """Whether no steps are pending, so that the device has nothing queued."""
        return not self._pending

    @property
    def must_read(self) -> bool:
        """Whether to read after the current step: all ranks rewind together, so they agree."""
        return self._reads_each_step or is_due(self._read_every, self._run.state.step)

    def sum_targets(self, batch: Batch) -> Tensor | None:
        """Return the divisor of a step's loss; None while steps are pending, which it waits for.

        The same collective lets rank 0 choose when to read the next steps, and carries requests to
        stop: if any rank has to, StopRequested is raised on all.

        batch: this rank's share of the step's batch.
        """
        if not self.is_settled:
            return None
        run = self._run
        n_targets, must_stop, self._read_every = run.comm.sum_count(
            run.step_config.loss.count(run.state, batch),
            flag=bool(run.stop.stop_reason),
            value=self._read_every,
        )
        run.stop_if(must_stop)
        return n_targets

    def begin_step(self) -> None:
        """Start timing a step, unless steps are pending: their timing still runs."""
        if not self._pending:
            self._run.begin("step")
            self._start = time.perf_counter()  # leaves actions out of the step's time

    def add(self, step: PendingStep, batch_values: dict[str, float]) -> None:
        """Add a pending step. batch_values: values about its batch to log with it, by name."""
        self._pending.append((step, batch_values))

    def read(self) -> list[tuple[StepMetrics, dict[str, Any]]]:
        """Wait for the pending steps; return each with the values for `write`, up to the first bad.

        If there is a bad one, `state.step` goes back to before it.
        """
        if not self._pending:
            return []
        run = self._run
        steps, values = zip(*self._pending, strict=True)
        self._pending.clear()
        metrics = wait_for_steps(run.state, steps)
        before = run.step_config.tokens_before
        speed = self._measure(before(steps[-1].step) - before(steps[0].step - 1), len(steps))
        seconds = speed["seconds"] or 0.0
        run.stop.observe(seconds * len(steps))
        for slow in self.stragglers.find():
            run.event("slow rank", rank=slow.rank, phase=slow.phase, message=str(slow))
            run.console.warn(str(slow))
        start = run.log_file.elapsed_seconds - len(steps) * seconds
        rows = [
            {**batch_values, **speed, "elapsed_seconds": start + n * seconds}
            for n, batch_values in enumerate(values, start=1)
        ]
        return list(zip(metrics, rows, strict=False))

    def _measure(self, tokens: int, steps: int) -> dict[str, float | None]:
        """Return the speed since the start of these steps, and start timing the next ones.

        MFU is None if the devices' peak is unknown, or if rows are shorter than the context, which
        FLOPs are counted for.
        """
        run = self._run
        run.device.synchronize()
        now = time.perf_counter()
        elapsed = now - self._start
        self._start = now
        rate = tokens / elapsed
        # An exponential moving average, so that one slow step does not make the estimate jump.
        full = run.step_config.batch_tokens / rate
        self._full_seconds = 0.9 * (self._full_seconds or full) + 0.1 * full
        n_devices = run.comm.dist_env.world_size * run.data.fills_context
        peak = run.device.peak_flops * n_devices
        mfu = describe_mfu(rate, run.data.model_config, peak)
        seconds = elapsed / steps
        self._read_every = min(max(1, int(SYNC_SECONDS / seconds)), MAX_READ_STEPS)
        return {"seconds": seconds, "tokens_per_second": rate, **mfu}

    def estimate_left(self, step: int) -> float:
        """Return the estimated seconds from `step` to the end of the run at the recent speed."""
        steps = self._run.step_config
        tokens = steps.tokens_before(steps.total_steps) - steps.tokens_before(step)
        return tokens / steps.batch_tokens * self._full_seconds

    def write(self, step: StepMetrics, values: dict[str, Any]) -> None:
        """Log and show a good step. values: as returned by `read`."""
        run = self._run
        row = {
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "lr": step.lr,
            **step.values,
            **values,
        }
        total_steps = run.step_config.total_steps
        is_last = step.step == total_steps
        run.write("train", step=step.step, to_file=is_last or is_due(self._every, step.step), **row)
        if step.overflowed:
            message = "fp16 gradients overflowed; loss scale lowered"
            run.event("step skipped", message=message)
        left = self.estimate_left(step.step)
        run.log_file.progress(
            step=step.step,
            loss=step.loss,
            tokens_per_second=values["tokens_per_second"],
            eta_seconds=round(left, 1),
        )
        if is_last or run.console.is_step_due:
            memory = run.device.peak_memory_bytes()
            texts = self._show(row)
            line = format_step({"step": step.step, **row}, texts, total_steps, memory, left)
            run.console.step(line, share=step.step / total_steps, last=is_last)


def report_end(
    run: Run, code: ExitCode, steps: StepLog, saver: CheckpointSaver, next_command: str
) -> None:
    """Write the final status, tell the observers, and print the next command."""
    step = run.state.step
    console = run.console
    state = "done" if code == ExitCode.DONE else "stopped"
    reason = "" if code == ExitCode.DONE else run.stop.stop_reason or "another rank"
    end: dict[str, Any] = {"exit_code": int(code), "message": reason}
    run.log_file.status(state=state, phase="", step=step, **end)
    run.write("end", to_file=False, **end)
    if code != ExitCode.DONE:
        left = format_duration(steps.estimate_left(step))
        resume = f"the same command, or megatoken train {shlex.quote(str(run.out))}, resumes"
        console.print(f"stopped by {reason} at step {step:,}, all saved ({left} left); {resume}")
        return
    best = saver.find_best()
    if best is not None and best != step:
        loss = run.history.val_losses[best]
        console.print(f"best: {run.out / BEST}, step {best:,}, validation loss {loss:.4f}")
    is_here = next_command.split()[0] in list_entries("command")
    following = f"; next: megatoken {next_command}" if is_here else ""
    console.print(f"done: {run.out}{following}")
