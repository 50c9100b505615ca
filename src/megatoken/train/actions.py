"""Actions that run between steps, each at its own interval: validate, score tasks, sample, save."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatoken.base.console import SHOWN_FIRST
from megatoken.base.errors import NumericsError
from megatoken.base.redact import redact
from megatoken.base.system.device import is_out_of_memory
from megatoken.base.system.torch_compat import uncompiled
from megatoken.data.dataloader import Batch, evaluation_rows, evaluation_windows, separate_documents
from megatoken.data.dataset import Dataset
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.inference.choose import Sampling
from megatoken.inference.generate import generate_ids
from megatoken.inference.multiple_choice import compute_metrics, format_metrics, score_examples
from megatoken.posttrain.batches import Poll
from megatoken.text.chat_dataset import open_rows
from megatoken.text.chat_template import Message, find_stop_ids, find_template
from megatoken.train.checkpoint_saver import CheckpointSaver
from megatoken.train.run import Run
from megatoken.train.state import gather_model
from megatoken.train.val_loss import to_batch, validation_loss

RULE = "\n" + "-" * 40 + "\n"  # between samples
DEFAULT_QUESTION = "Hello."  # for chat samples if sample.prompt is empty


@dataclass
class Action:
    """A function to call before every step whose number is a multiple of `every`; 0 disables it.

    at_start: whether to call it before step 0, too. at_end: whether to call it after the last step.
    seconds: duration of the longest call so far.
    """

    every: int
    call: Callable[[], None]
    at_start: bool = True
    at_end: bool = True
    seconds: float = 0.0

    def is_due(self, step: int) -> bool:
        return is_due(self.every, step) and (step > 0 or self.at_start)


def is_due(every: int, step: int) -> bool:
    """Return whether `step` is a multiple of `every`; always False if `every` is 0."""
    return every > 0 and step % every == 0


def list_actions(run: Run, saver: CheckpointSaver) -> list[Action]:
    """Return the run's actions in the order in which they are called.

    Saving comes first: its files are then written in the background during the other actions.
    """

    def poll() -> None:
        run.check_stop()
        saver.commit_if_written()

    def validate_and_save() -> None:
        validate(run, poll)
        is_best = run.progress.best_step(run.progress.val_losses) == run.state.step
        if config.save.keep_best and is_best:
            saver.try_save()

    config = run.config
    steps = run.step_config.steps
    sample_every = steps(config.sample.every)
    tasks_every = steps(config.evaluate.tasks_every) if run.data.tasks else 0
    return [
        Action(steps(config.save.every), saver.try_save, at_start=False, at_end=False),
        Action(steps(config.evaluate.every), validate_and_save),
        Action(tasks_every, partial(score_tasks, run, poll)),
        Action(
            sample_every,
            partial(sample, run),
            at_start=config.sample.at_start,
            at_end=sample_every > 0,
        ),
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
            count_bytes=dataset.byte_counter("val", run.data.tokenizer),
            dims=dims,
            softmax_cross_entropy=state.cross_entropy_fn,
        )
    return {key: metrics[key] for key in ("loss", "target_tokens", "bits_per_byte")}


def score_tasks(run: Run, poll: Poll) -> None:
    """Score the model on each multiple-choice task that has no logged score for this step.

    A tensor-parallel model is gathered on rank 0, which scores it while the other ranks wait.

    poll: called on all ranks before each task. Unless the model is tensor-parallel, it is also
    called before each batch of a task.
    """
    state = run.state
    logged = run.progress.logged
    tasks = [task for task in run.data.tasks if (task, state.step) not in logged]
    if not tasks:
        return
    run.log.begin("tasks")
    is_gathered = state.dims.tp_size > 1
    model = gather_model(state) if is_gathered else state.model
    comm = Comm(DistEnv()) if is_gathered else run.comm
    for task in tasks:
        poll()
        logged.add((task, state.step))
        if model is None:
            continue
        on_batch = None if is_gathered else poll
        scores = score_examples(model, run.data.tasks[task], run.device, comm, on_batch)
        metrics = compute_metrics(scores)
        run.log.write("eval", task=task, **metrics)
        run.console.print(f"step {state.step}: {task} {format_metrics(metrics)}")


def sample(run: Run) -> None:
    """Generate text on rank 0, print it, and save it in RUN/samples.

    `sample.prompt` is continued if the objective is `pretrain`. With any other objective, it is
    answered as a chat message. A sharded model is first gathered on rank 0.
    """
    step = run.state.step
    if ("sample", step) in run.progress.logged:
        return
    run.log.begin("sample")
    model = gather_model(run.state, run.device.dtype)
    run.progress.logged.add(("sample", step))
    if model is None:
        return
    config = run.config.sample
    tokenizer = run.data.tokenizer
    if run.config.objective.name == "pretrain":
        prompt_ids = tokenizer.encode(config.prompt).tolist()
        ids = tokenizer.start_ids(prompt_ids)
        shown_prompt = config.prompt
    else:
        question = config.prompt or DEFAULT_QUESTION
        template = find_template(tokenizer)
        ids = prompt_ids = template.encode([Message("user", question)], reply=True)[0]
        shown_prompt = f"user: {question}\nassistant: "
    try:
        sequences = generate_ids(
            model,
            ids,
            Sampling(
                config.tokens,
                config.temperature,
                config.top_k,
                seed=run.config.seed,
                stop_ids=find_stop_ids(tokenizer),
            ),
            num_samples=config.num_samples,
            device=run.device,
        )
    except NumericsError as error:  # on rank 0 only; bad steps raise on all ranks
        run.console.warn(f"no sample: {error}")
        return
    except (RuntimeError, MemoryError) as error:  # a sample must not end a run
        if not is_out_of_memory(error):
            raise
        run.console.warn("no sample: out of memory; lower sample.num_samples or sample.tokens")
        return
    texts = [redact(shown_prompt) + tokenizer.decode_after(prompt_ids, s) for s in sequences]
    file = run.out / "samples" / f"step-{step:08d}.txt"
    try:
        file.parent.mkdir(exist_ok=True)
        file.write_text(RULE.join(texts) + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        run.console.warn(f"sample not saved: {error.strerror} — {file}")
    run.log.write("sample", text=texts)
    run.console.fence(f"step {step}: sample", texts)
