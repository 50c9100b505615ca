"""Actions that run between steps, each at its own interval: save and validate.

Rooms add others as entries of the kind "action": functions of the config, the data and the context
of a run, which check the settings of the action before the model is built, and return it or None.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatoken.base.config.fields import Duration
from megatoken.base.console import SHOWN_FIRST
from megatoken.base.system.torch_compat import uncompiled
from megatoken.data.dataloader import Batch, evaluation_rows, evaluation_windows, separate_documents
from megatoken.data.dataset import Dataset
from megatoken.text.chat_dataset import open_rows
from megatoken.train.checkpoint_saver import CheckpointSaver
from megatoken.train.run import Run
from megatoken.train.val_loss import to_batch, validation_loss

Poll = Callable[[], None]


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


def list_actions(run: Run, saver: CheckpointSaver, added: Sequence[Action]) -> list[Action]:
    """Return the run's actions in the order in which they are called.

    Saving comes first: its files are then written in the background during the other actions.
    """

    def validate_and_save(run: Run, poll: Poll) -> None:
        validate(run, poll)
        is_best = run.progress.best_step(run.progress.val_losses) == run.state.step
        if run.config.save.keep_best and is_best:
            saver.try_save()

    return [
        Action(run.config.save.every, lambda *_: saver.try_save(), at_start=False, at_end=False),
        Action(run.config.evaluate.every, validate_and_save),
        *added,
    ]


def validate(run: Run, poll: Poll) -> None:
    """Measure, log and print the validation loss of the current step.

    Does nothing without held-out data, or if the loss of this step is already in the log.

    poll: called on all ranks before each batch; may raise StopRequested.
    """
    step = run.state.step
    parts = [part for part in run.data.dataset.parts if len(part.dataset.val)]
    if not parts or not run.config.evaluate.tokens or ("val", step) in run.progress.logged:
        return
    run.log.begin("validate")
    if run.validation is not None:
        row = run.validation(poll)
        values = [
            f"{SHOWN_FIRST.get(name, name).replace('_', ' ')} {value:.4g}"
            for name, value in row.items()
        ]
        text = f"held out: {', '.join(values)}"
    else:
        row = _validate_text(run, poll)
        text = f"validation loss {row['loss']:.4f}"
        if math.isfinite(row["bits_per_byte"]):
            text += f", {row['bits_per_byte']:.4f} bits per byte"
        text += f" over {row['target_tokens']:,} tokens"
        for name, values in row.get("sources", {}).items():
            text += f", {name} {values['loss']:.4f}"
    run.progress.val_losses[step] = row["loss"]
    run.log.write("val", **row)
    run.console.print(f"step {step}: {text}")


def _validate_text(run: Run, poll: Poll) -> dict[str, Any]:
    """Return a dict with loss (nats), bits_per_byte and target_tokens of the held-out text.

    For a mixture, loss and bits_per_byte are means over the datasets, weighted by their shares of
    the training tokens, and target_tokens is the total. `sources` then holds the dict of each
    dataset, by name.
    """
    parts = [part for part in run.data.dataset.parts if len(part.dataset.val)]
    sources = {part.name: _measure_loss(run, part.dataset, poll) for part in parts}
    if len(parts) == 1:
        return sources[parts[0].name]
    total_share = sum(part.share for part in parts)

    def average(key: str) -> float:
        return float(sum(part.share / total_share * sources[part.name][key] for part in parts))

    return {
        "loss": average("loss"),
        "bits_per_byte": average("bits_per_byte"),
        "target_tokens": sum(values["target_tokens"] for values in sources.values()),
        "sources": sources,
    }


def _measure_loss(run: Run, dataset: Dataset, poll: Poll) -> dict[str, Any]:
    """Return loss, target_tokens and bits_per_byte of one dataset's held-out split.

    At most `evaluate.tokens` tokens are read.
    """
    state = run.state
    loader = run.data.loader
    assert loader is not None
    limit_tokens = run.config.evaluate.tokens
    if loader.marks is not None:
        windows: Any = evaluation_rows(open_rows(dataset, "val"), limit_tokens=limit_tokens)
    else:
        windows = evaluation_windows(dataset.val, seq_len=loader.seq_len, limit_tokens=limit_tokens)
    # Each forward gets the same windows for any number of ranks; all ranks run equally many.
    size = run.step_config.micro_batch
    dims = state.dims
    starts = range(dims.dp_rank * size, len(windows) + dims.dp_rank * size, dims.dp_size * size)

    def batches() -> Iterator[np.ndarray | Batch]:
        for start in starts:
            poll()
            rows = windows.rows(start, size)
            if loader.document_start is None:
                yield rows
            else:
                yield separate_documents(to_batch(rows), loader.document_start)

    with uncompiled(state.model) as model:
        metrics = validation_loss(
            model,
            batches(),
            run.device,
            chunk=run.step_config.loss_chunk,
            comm=run.comm,
            count_bytes=dataset.byte_counter("val", run.data.vocabulary),
            dims=dims,
            output_layer=state.output_layer,
        )
    return {key: metrics[key] for key in ("loss", "target_tokens", "bits_per_byte")}


def call_actions(run: Run, actions: Sequence[Action], poll: Poll) -> None:
    """Call actions in order. Raises StopRequested before one that may exceed the time limit."""
    for action in actions:
        run.check_stop(action.seconds)
        start = time.monotonic()
        action.call(run, poll)
        run.comm.barrier()  # rank 0 may have worked for longer than collectives wait
        action.seconds = max(action.seconds, time.monotonic() - start)
