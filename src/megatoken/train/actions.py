"""Actions that run between steps, each at its own interval: save and validate.

Rooms add others as entries of the kind "action": functions of the config, the data and the context
of a run, which check the settings of the action before the model is built, and return it or None.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatoken.base.config.fields import Duration
from megatoken.train.checkpoint_saver import CheckpointSaver
from megatoken.train.objective import BatchSource, Poll
from megatoken.train.run import Run


@dataclass
class Action:
    """A function to call before every step whose number is a multiple of `every`; 0 disables it.

    call: gets the run, and a function to call on all ranks between parts of long work, which may
    raise StopRequested. at_start: whether to call it before step 0, too. at_end: whether to call it
    after the last step. seconds: duration of the longest call so far.
    """

    every: Duration
    call: Callable[[Run, Poll], None]
    at_start: bool = True
    at_end: bool = True
    seconds: float = 0.0

    def is_due(self, run: Run) -> bool:
        step = run.state.step
        return is_due(run.step_config.steps(self.every), step) and (step > 0 or self.at_start)


def is_due(every: int, step: int) -> bool:
    """Return whether `step` is a multiple of `every`; always False if `every` is 0."""
    return every > 0 and step % every == 0


def list_actions(
    run: Run, batches: BatchSource, saver: CheckpointSaver, added: Sequence[Action]
) -> list[Action]:
    """Return the run's actions in the order in which they are called.

    Saving comes first: its files are then written in the background during the other actions.
    """

    def validate_and_save(run: Run, poll: Poll) -> None:
        validate(run, batches, poll)
        is_best = run.history.best_step(run.history.val_losses) == run.state.step
        if run.config.save.keep_best and is_best:
            saver.try_save()

    return [
        Action(run.config.save.every, lambda *_: saver.try_save(), at_start=False, at_end=False),
        Action(run.config.evaluate.every, validate_and_save),
        *added,
    ]


def validate(run: Run, batches: BatchSource, poll: Poll) -> None:
    """Measure, log and print the validation loss of the current step.

    Does nothing without held-out data, or if the loss of this step is already in the log.

    poll: called on all ranks before each batch; may raise StopRequested.
    """
    step = run.state.step
    is_logged = ("val", step) in run.history.logged
    if is_logged or not run.data.dataset.n_val or not run.config.evaluate.tokens:
        return
    run.begin("validate")
    row, text = batches.validate(poll)
    run.history.val_losses[step] = row["loss"]
    run.write("val", **row)
    run.console.print(f"step {step:,}: {text}")


def call_actions(run: Run, actions: Sequence[Action], poll: Poll) -> None:
    """Call actions in order. Raises StopRequested before one that may exceed the time limit."""
    for action in actions:
        run.check_stop(action.seconds)
        start = time.monotonic()
        action.call(run, poll)
        run.comm.barrier()  # rank 0 may have worked for longer than the timeout of collectives
        action.seconds = max(action.seconds, time.monotonic() - start)
