"""A live run: what set-up built, and what changes while it trains."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import Config, EvalConfig
from megatoken.base.console import Console
from megatoken.base.system.device import Device
from megatoken.base.system.metrics_log import MetricsLogger
from megatoken.data.dataloader import DataLoader
from megatoken.data.mixture import Mixture
from megatoken.data.vocabulary import Vocabulary
from megatoken.distributed.comm import Comm
from megatoken.distributed.heartbeat import Heartbeat
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.distributed.preemption import PreemptionHandler, StopRequested
from megatoken.store.manifest import FileEntry
from megatoken.train.state import StepConfig, TrainState

Observer = Callable[[dict[str, Any]], bool | None]


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Where a run trains: its folder, this process and its device.

    console: prints nothing on ranks other than 0.
    """

    out: Path
    console: Console
    device: Device
    comm: Comm
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def is_main(self) -> bool:
        return self.comm.dist_env.is_main_process


@dataclass
class History:
    """What a run has logged and saved so far. Weights and position are in TrainState.

    logged: a (kind, step) pair for each row in the metrics log. In the pair of a task score, the
        task's name replaces the kind.
    val_losses: validation loss in nats by step.
    verified: checkpoint files that this process has hashed, by checkpoint folder.
    in_use: steps of checkpoints that observers are reading, which are not pruned.
    """

    logged: set[tuple[str, int]] = field(default_factory=set)
    val_losses: dict[int, float] = field(default_factory=dict)
    verified: dict[Path, Mapping[str, FileEntry]] = field(default_factory=dict)
    in_use: set[int] = field(default_factory=set)

    def best_step(self, steps: Iterable[int]) -> int | None:
        """Return which of `steps` has the lowest validation loss, or None if none was validated.

        The earliest wins a tie.
        """
        measured = [s for s in sorted(steps) if math.isfinite(self.val_losses.get(s, math.nan))]
        return min(measured, key=self.val_losses.__getitem__, default=None)

    def explain_early_stop(self, evaluate: EvalConfig) -> str:
        """Return why the validation losses end the run before its last step; "" if they do not."""
        best = self.best_step(self.val_losses)
        lowest = "never finite" if best is None else f"{self.val_losses[best]:.4f} at step {best:,}"
        n_worse = sum(best is None or step > best for step in self.val_losses)
        if 0 < evaluate.patience <= n_worse:
            return f"the validation loss has not improved on {lowest} for {n_worse} validations"
        if best is not None and self.val_losses[best] <= evaluate.target_loss != 0:
            return f"the validation loss has reached {lowest}"
        return ""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The dataset and model shape of a run.

    loader, epoch_tokens: what `Objective.open_data` returned. fills_context, is_chat: as in
    `Objective`.
    """

    dataset: Mixture
    model_config: ModelConfig
    loader: DataLoader | None
    epoch_tokens: int
    fills_context: bool
    is_chat: bool

    @property
    def vocabulary(self) -> Vocabulary:
        return self.dataset.vocabulary


@dataclass(frozen=True, kw_only=True)
class RunPlan(RunContext):
    """All that is known about a run before its model is built.

    config: the run's config, after turning off machine settings that the chosen sharding does not
    support.
    log_file: the metrics log; the run folder is locked while it is open.
    """

    config: Config
    data: RunData
    step_config: StepConfig
    dims: ParallelDims
    log_file: MetricsLogger
    stop: PreemptionHandler


@dataclass(frozen=True, kw_only=True)
class Run(RunPlan):
    """A run whose model is built. Only the contents of `state` and `history` change.

    step_config: its micro-batch and loss are placeholders until set-up has ended. observers: called
    with a dict for every row (kind, step, tokens, elapsed_seconds and values); one that returns
    True stops the run. Three kinds of rows are not logged: `start` (micro_batch, compiled) before
    the first step, `finish` after the last save, and `end` (exit_code, message) with the final
    status.
    """

    state: TrainState
    history: History
    observers: Sequence[Observer]

    @property
    def is_at_end(self) -> bool:
        """Whether no step is left, or the validation losses end the run early."""
        is_last = self.state.step >= self.step_config.total_steps
        return is_last or bool(self.history.explain_early_stop(self.config.evaluate))

    def write(
        self, kind: str, *, step: int | None = None, to_file: bool = True, **values: Any
    ) -> None:
        """Log a row of `values` at `step`, by default the current one, and pass it to observers.

        to_file: whether to write the row to the log; if False, only observers get it.
        """
        step = self.state.step if step is None else step
        tokens = self.step_config.tokens_trained(replace(self.state.position, step=step))
        values = {"elapsed_seconds": self.log_file.elapsed_seconds, **values}
        if to_file:
            self.log_file.write(kind, step, tokens, **values)
            self.history.logged.add((values.get("task", kind), step))
        for observer in self.observers:
            if observer({"kind": kind, "step": step, "tokens": tokens, **values}):
                self.stop.request_stop("callback")

    def event(self, what: str, **values: Any) -> None:
        """Log an event by `write`."""
        self.write("event", what=what, **values)

    def begin(self, phase: str) -> None:
        """Report the current phase to the watchdog and status.json."""
        self.heartbeat.beat(phase, self.state.step)
        self.log_file.begin(phase)

    @contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """Report `phase` inside the context, then the surrounding phase again."""
        with self.heartbeat.during(phase, step):
            outer = self.log_file.begin(phase)
            try:
                yield
            finally:
                self.log_file.begin(outer)

    def check_stop(self, next_seconds: float = 0.0) -> None:
        """Raise StopRequested on all ranks if any of them has to save and stop.

        All ranks must call it. A stop waits for a step from which the objective can resume.

        next_seconds: expected duration of what comes next, which must fit in the time limit.
        """
        self.stop_if(self.comm.any(bool(self.stop.stop_before(next_seconds))))

    def stop_if(self, must_stop: bool) -> None:
        """Raise StopRequested if `must_stop` and the objective can resume from this step."""
        if must_stop and self.state.step % self.stop.steps == 0:
            raise StopRequested
