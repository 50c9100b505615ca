"""A live run: what set-up built, and what changes while it trains."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatoken.checkpoint.manifest import CheckpointManifest, FileEntry
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import Config
from megatoken.console import Console
from megatoken.data.dataloader import DataLoader
from megatoken.data.mixture import Mixture
from megatoken.data.tokenizer import Tokenizer
from megatoken.distributed.comm import Comm
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.eval.multiple_choice import EncodedExample
from megatoken.launch.heartbeat import Heartbeat
from megatoken.objectives.batches import BatchSource, Poll
from megatoken.system.device import Device
from megatoken.system.metrics_log import MetricsLogger
from megatoken.train.preemption import PreemptionHandler, StopRequested
from megatoken.train.state import StepConfig, TrainState

Callback = Callable[[dict[str, Any]], bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Where a run trains: its folder, this process and its device.

    console: quiet except on rank 0.
    """

    out: Path
    console: Console
    device: Device
    comm: Comm
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def is_main(self) -> bool:
        return self.comm.dist_env.is_main_process


@dataclass(slots=True)
class Progress:
    """What a run has logged and saved so far. Weights, step and skipped batches are in TrainState.

    logged: (kind, step) of the rows in the metrics log; (task, step) of an evaluation. val_losses:
    nats by step. verified: checkpoint files that this process has hashed, by folder.
    """

    logged: set[tuple[str, int]] = field(default_factory=set)
    val_losses: dict[int, float] = field(default_factory=dict)
    verified: dict[Path, Mapping[str, FileEntry]] = field(default_factory=dict)

    def best_step(self, steps: Iterable[int]) -> int | None:
        """Return the step with the lowest validation loss (the first on ties), or None."""
        measured = [s for s in sorted(steps) if math.isfinite(self.val_losses.get(s, math.nan))]
        return min(measured, key=self.val_losses.__getitem__, default=None)

    def is_out_of_patience(self, patience: int) -> bool:
        """Return whether the last `patience` validations (0: no limit) did not lower the loss."""
        best = self.best_step(self.val_losses)
        n_worse = sum(best is None or step > best for step in self.val_losses)
        return 0 < patience <= n_worse


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a run trains and evaluates on.

    loader: None for objectives that train on rows of conversations. epoch_tokens: targets in one
    pass over the training split. tasks: multiple-choice examples by task.
    """

    dataset: Mixture
    model_config: ModelConfig
    tasks: Mapping[str, list[EncodedExample]]
    loader: DataLoader | None
    epoch_tokens: int

    @property
    def tokenizer(self) -> Tokenizer:
        return self.dataset.tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(RunContext):
    """What a run trains, before its model exists.

    config: with the machine settings that its layout allows. log_file: locks the run folder.
    """

    config: Config
    data: RunData
    step_config: StepConfig
    dims: ParallelDims
    log_file: MetricsLogger
    stop: PreemptionHandler


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """Passes rows to the metrics log and the callbacks, and phases to the status and the watchdog.

    plan: before tuning; its micro-batch is a placeholder. callbacks: called with every row (kind,
    step, tokens, elapsed_seconds and values); a callback that returns True stops the run.
    """

    plan: RunPlan
    state: TrainState
    progress: Progress
    callbacks: Sequence[Callback] = ()

    @property
    def is_at_end(self) -> bool:
        """Whether no step is left, or the validation loss has stopped falling."""
        patience = self.plan.config.evaluate.patience
        is_last = self.state.step >= self.plan.step_config.total_steps
        return is_last or self.progress.is_out_of_patience(patience)

    def write(
        self, kind: str, *, step: int | None = None, to_file: bool = True, **values: Any
    ) -> None:
        """Add a row at `step` (default: the current step).

        to_file: False for train rows between those that are logged.
        """
        step = self.state.step if step is None else step
        tokens = self.state.tokens_trained(self.plan.step_config, step)
        values = {"elapsed_seconds": self.plan.log_file.elapsed_seconds, **values}
        if to_file:
            self.plan.log_file.write(kind, step, tokens, **values)
            self.progress.logged.add((values.get("task", kind), step))
        for callback in self.callbacks:
            if callback({"kind": kind, "step": step, "tokens": tokens, **values}):
                self.plan.stop.request_stop("callback")

    def begin(self, phase: str) -> None:
        """Report the current phase to the watchdog and status.json."""
        self.plan.heartbeat.beat(phase, self.state.step)
        self.plan.log_file.begin(phase)

    @contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """Report a nested phase, then the outer one again."""
        with self.plan.heartbeat.during(phase, step):
            outer = self.plan.log_file.begin(phase)
            try:
                yield
            finally:
                self.plan.log_file.begin(outer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunPlan):
    """A run that is ready to train. Only `progress` and `state` (weights, step) change.

    validation: measures held-out rows in place of held-out text. restore: loads the newest
    checkpoint into `state` and `progress`; returns its manifest, or None without a checkpoint.
    """

    state: TrainState
    progress: Progress
    log: RunLog
    is_compiled: bool
    batches: BatchSource
    validation: Callable[[Poll], dict[str, Any]] | None
    restore: Callable[[], CheckpointManifest | None]

    def check_stop(self, next_seconds: float = 0.0, *, flag: bool = False) -> bool:
        """Raise StopRequested on all ranks if one of them has to save and stop; all must call it.

        Stops wait for the last update on the same rollout. next_seconds: previous duration of what
        comes next. Returns whether any rank has set `flag`.
        """
        must_stop = bool(self.stop.stop_before(next_seconds))
        must_stop, flag = self.comm.any_of_each([must_stop, flag])
        if must_stop and self.state.step % self.config.objective.rollout_steps == 0:
            raise StopRequested
        return flag
