"""What a live run consists of: config, data, model, log, and the rows that it writes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatoken.checkpoint.manifest import FileEntry
from megatoken.config.load import Change
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import Config
from megatoken.console import Console
from megatoken.data.dataloader import Batch, DataLoader
from megatoken.data.mixture import Mixture
from megatoken.data.tokenizer import Tokenizer
from megatoken.distributed.comm import Comm
from megatoken.eval.multiple_choice import EncodedExample
from megatoken.launch.heartbeat import Heartbeat
from megatoken.system.device import Device
from megatoken.train.metrics_log import MetricsLogger
from megatoken.train.preemption import PreemptionHandler, StopRequested
from megatoken.train.state import StepConfig, TrainState

Callback = Callable[[dict[str, Any]], bool | None]


class BatchSource(Protocol):
    """Gives this process's share of the batch of a number. metrics: what is to be logged of the last one."""

    metrics: dict[str, float]

    def get(self, step: int) -> Batch:
        """The batch, on the device."""

    def close(self) -> None:
        """End what works in the background."""


@dataclass(slots=True, kw_only=True)
class RunContext:
    """Everything that a live run consists of, filled in while it is set up.

    callbacks: called with every row (`kind`, `step`, `tokens`, `elapsed_seconds` and the values; train rows at every
    step); one that returns True asks the run to save and stop. logged: (kind, step) of the rows in the metrics log; of
    an evaluation (task, step). val_losses: the validation loss of each step in the log. verified: the files of the
    checkpoints that this process has hashed, so that pruning hashes nothing twice. changes: what differs from the run's
    last start.
    """

    config: Config
    out: Path
    console: Console
    device: Device
    comm: Comm
    is_main: bool
    callbacks: Sequence[Callback] = ()
    allow_changes: bool = False
    changes: list[Change] = field(default_factory=list)
    logged: set[tuple[str, int]] = field(default_factory=set)
    val_losses: dict[int, float] = field(default_factory=dict)
    verified: dict[Path, Mapping[str, FileEntry]] = field(default_factory=dict)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    dataset: Mixture = field(init=False)
    model_config: ModelConfig = field(init=False)
    tasks: dict[str, list[EncodedExample]] = field(init=False)
    loader: DataLoader = field(init=False)
    batches: BatchSource = field(init=False)
    validation: Callable[[Callable[[], None]], dict[str, Any]] | None = (
        None  # where it is not that of text
    )
    log: MetricsLogger = field(init=False)
    preemption: PreemptionHandler = field(init=False)
    state: TrainState = field(init=False)
    step_config: StepConfig = field(init=False)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.dataset.tokenizer

    def best_of(self, steps: Iterable[int]) -> int | None:
        """The one of these steps with the lowest validation loss, the first of equal ones; None where none has any."""
        measured = [
            step for step in sorted(steps) if math.isfinite(self.val_losses.get(step, math.nan))
        ]
        return min(measured, key=self.val_losses.__getitem__, default=None)

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last `evaluate.patience` validations have not lowered the loss."""
        best, patience = self.best_of(self.val_losses), self.config.evaluate.patience
        since = sum(best is None or step > best for step in self.val_losses)
        return 0 < patience <= since

    @property
    def is_at_end(self) -> bool:
        """Whether no step is left, or the run stops early."""
        return self.state.step >= self.step_config.total_steps or self.is_out_of_patience

    def write(
        self, kind: str, *, step: int | None = None, to_file: bool = True, **values: Any
    ) -> None:
        """Add a row at `step` (None: the current one) to the metrics log and pass it to the callbacks.

        to_file: False for train rows between those that are logged.
        """
        step = self.state.step if step is None else step
        tokens = self.state.tokens_trained(self.step_config, step)
        values = {"elapsed_seconds": self.log.elapsed_seconds, **values}
        if to_file:
            self.log.write(kind, step, tokens, **values)
            self.logged.add((values.get("task", kind), step))
        for callback in self.callbacks:
            if callback({"kind": kind, "step": step, "tokens": tokens, **values}):
                self.preemption.request_stop("callback")

    def begin(self, phase: str) -> None:
        """Note what this process does from now on, for the one that watches it and in status.json."""
        self.heartbeat.beat(phase, self.state.step)
        self.log.begin(phase)

    @contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """Context of a phase within another one, which goes on after it."""
        with self.heartbeat.during(phase, step):
            outer = self.log.begin(phase)
            try:
                yield
            finally:
                self.log.begin(outer)

    def check_stop(self, next_seconds: float = 0.0, *, flag: bool = False) -> bool:
        """Raise StopRequested on all ranks when one of them has to save and stop; all must call it.

        Between the updates on the same answers it waits: a resume samples them from the weights that were saved.
        next_seconds: how long that which comes next took before. Return whether any rank has set `flag`.
        """
        stop, flag = self.comm.any_of_each([bool(self.preemption.stop_before(next_seconds)), flag])
        if stop and self.state.step % self.config.objective.rollout_steps == 0:
            raise StopRequested
        return flag
