"""What a run does between steps, each action at its own interval: validate, score tasks, sample, save."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.checkpoint.commit import list_steps, prune, step_folder
from megatoken.checkpoint.save import AsyncSave
from megatoken.console import SHOWN_FIRST
from megatoken.data.chat_dataset import open_rows
from megatoken.data.chat_template import Message, find_stop_ids, find_template
from megatoken.data.dataloader import Batch, evaluation_rows, evaluation_windows, separate_documents
from megatoken.data.dataset import Dataset
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.errors import CheckpointError, MegatokenError, NumericsError, StorageError
from megatoken.eval.multiple_choice import compute_metrics, format_metrics, score_examples
from megatoken.eval.val_loss import to_batch, validation_loss
from megatoken.redact import redact
from megatoken.sampling.choose import Sampling
from megatoken.sampling.generate import generate_ids
from megatoken.system.device import is_out_of_memory
from megatoken.system.torch_compat import uncompiled
from megatoken.train.live_mirror import Mirror
from megatoken.train.run_context import RunContext
from megatoken.train.run_folder import CHECKPOINTS, CONFIG, TOKENIZER
from megatoken.train.state import gather_model

RULE = "\n" + "-" * 40 + "\n"  # between samples
DEFAULT_QUESTION = "Hello."  # of samples where sample.prompt is empty
BEST = "best"  # the link to the best checkpoint
LAST_SAVE_RETRY_SECONDS = (
    5.0,
    15.0,
    60.0,
    120.0,
)  # before the last save, which failed, is tried again


@dataclass(slots=True)
class Action:
    """A call made before every step whose number is a multiple of `every` (0: never), and perhaps at the end.

    seconds: the longest that a call has taken.
    """

    every: int
    call: Callable[[], None]
    at_start: bool = True
    at_end: bool = True
    seconds: float = 0.0

    def is_due(self, step: int) -> bool:
        return is_due(self.every, step) and (step > 0 or self.at_start)


def is_due(every: int, step: int) -> bool:
    """Whether something with the interval `every` (0: never) falls on `step`."""
    return every > 0 and step % every == 0


def list_actions(run: RunContext, saver: "CheckpointSaver") -> list[Action]:
    """The actions of a run with their intervals in steps, in the order in which they are called.

    A save comes first, to be written while the others compute. They hear a request to stop between batches.
    """

    def poll() -> None:
        run.check_stop()
        saver.commit_if_written()

    def validate_and_save() -> None:
        validate(run, poll)
        if config.save.keep_best and run.best_of(run.val_losses) == run.state.step:
            saver.try_save()

    config, steps = run.config, run.step_config.steps
    sample_every = steps(config.sample.every)
    return [
        Action(steps(config.save.every), saver.try_save, at_start=False, at_end=False),
        Action(steps(config.evaluate.every), validate_and_save),
        Action(
            steps(config.evaluate.tasks_every) if run.tasks else 0, partial(score_tasks, run, poll)
        ),
        Action(
            sample_every,
            partial(sample, run),
            at_start=config.sample.at_start,
            at_end=sample_every > 0,
        ),
    ]


def validate(run: RunContext, poll: Callable[[], None]) -> None:
    """Measure the validation loss, unless nothing is held out or this step's is logged already.

    Of a mixture: of each dataset, and their mean weighted as in training. poll: called on all ranks before each batch;
    may raise StopRequested.
    """
    state = run.state
    parts = [part for part in run.dataset.parts if len(part.dataset.val)]
    if not parts or not run.config.evaluate.tokens or ("val", state.step) in run.logged:
        return
    run.begin("validate")
    if run.validation is not None:
        measured = run.validation(poll)
        run.val_losses[state.step] = measured["loss"]
        run.write("val", **measured)
        values = [
            f"{SHOWN_FIRST.get(name, name).replace('_', ' ')} {value:.4g}"
            for name, value in measured.items()
        ]
        run.console.print(f"step {state.step}: held out: {', '.join(values)}")
        return
    found = {part.name: _measure_loss(run, part.dataset, poll) for part in parts}
    if len(parts) == 1:
        (row,) = found.values()
    else:
        total = sum(part.share for part in parts)
        row = {
            key: sum(part.share / total * found[part.name][key] for part in parts)
            for key in ("loss", "bits_per_byte")
        }
        row |= {
            "target_tokens": sum(each["target_tokens"] for each in found.values()),
            "sources": found,
        }
    run.val_losses[state.step] = row["loss"]
    run.write("val", **row)
    each = (
        "".join(f", {name} {values['loss']:.4f}" for name, values in found.items())
        if len(parts) > 1
        else ""
    )
    bits = (
        f", {row['bits_per_byte']:.4f} bits per byte" if math.isfinite(row["bits_per_byte"]) else ""
    )
    n_targets = f"{row['target_tokens']:,}"
    run.console.print(
        f"step {state.step}: validation loss {row['loss']:.4f}{bits} over {n_targets} tokens{each}"
    )


def _measure_loss(run: RunContext, dataset: Dataset, poll: Callable[[], None]) -> dict[str, Any]:
    """loss (nats), target_tokens and bits_per_byte of a held-out split, over at most `evaluate.tokens`."""
    state, limit_tokens, documents = (
        run.state,
        run.config.evaluate.tokens,
        run.loader.document_start,
    )
    if run.loader.has_marks:
        windows: Any = evaluation_rows(open_rows(dataset, "val"), limit_tokens=limit_tokens)
    else:
        windows = evaluation_windows(
            dataset.val, seq_len=run.loader.seq_len, limit_tokens=limit_tokens
        )
    # Each forward has the same windows for any number of ranks, which take turns; every rank takes as many.
    size, dims = run.step_config.micro_batch, state.dims
    starts = range(dims.dp_rank * size, len(windows) + dims.dp_rank * size, dims.dp_size * size)

    def batches() -> Iterator[np.ndarray | Batch]:
        for start in starts:
            poll()
            rows = windows.rows(start, size)
            yield rows if documents is None else separate_documents(to_batch(rows), documents)

    with uncompiled(state.model) as model:
        metrics = validation_loss(
            model,
            batches(),
            run.device,
            chunk=run.step_config.loss_chunk,
            comm=run.comm,
            count_bytes=run.tokenizer.count_bytes,
            dims=dims,
            softmax_cross_entropy=state.cross_entropy_fn,
        )
    return {key: metrics[key] for key in ("loss", "target_tokens", "bits_per_byte")}


def score_tasks(run: RunContext, poll: Callable[[], None]) -> None:
    """Score the tasks whose scores at this step are not logged already.

    A tensor-parallel model is gathered on rank 0, which scores alone: `poll` is then called between tasks only.
    """
    state = run.state
    tasks = {
        task: examples
        for task, examples in run.tasks.items()
        if (task, state.step) not in run.logged
    }
    if not tasks:
        return
    run.begin("tasks")
    gathered = state.dims.tp_size > 1
    model, comm = (gather_model(state), Comm(DistEnv())) if gathered else (state.model, run.comm)
    for task, examples in tasks.items():
        poll()
        run.logged.add((task, state.step))
        if model is None:
            continue
        on_batch = None if gathered else poll
        metrics = compute_metrics(score_examples(model, examples, run.device, comm, on_batch))
        run.write("eval", task=task, **metrics)
        run.console.print(f"step {state.step}: {task} {format_metrics(metrics)}")


def sample(run: RunContext) -> None:
    """Generate from the prompt of the config, or answer it, and keep the text; a split model is gathered on rank 0."""
    step, config = run.state.step, run.config.sample
    if ("sample", step) in run.logged:
        return
    run.begin("sample")
    model = gather_model(run.state, run.device.dtype)
    run.logged.add(("sample", step))
    if model is None:
        return
    prompt_ids = run.tokenizer.encode(config.prompt).tolist()
    prompt, before = run.tokenizer.start_ids(prompt_ids), config.prompt
    if run.config.objective.name != "pretrain":
        template, question = find_template(run.tokenizer), config.prompt or DEFAULT_QUESTION
        prompt = prompt_ids = template.encode([Message("user", question)], reply=True)[0]
        before = f"user: {question}\nassistant: "
    try:
        sequences = generate_ids(
            model,
            prompt,
            Sampling(
                config.tokens,
                config.temperature,
                config.top_k,
                seed=run.config.seed,
                stop_ids=find_stop_ids(run.tokenizer),
            ),
            num_samples=config.num_samples,
            device=run.device,
        )
    except NumericsError as error:  # of rank 0 alone; that of a step is raised by all
        run.console.warn(f"no sample: {error}")
        return
    except (RuntimeError, MemoryError) as error:  # a sample must not end a run
        if not is_out_of_memory(error):
            raise
        run.console.warn(
            "no sample: out of memory — sample — lower sample.num_samples or sample.tokens"
        )
        return
    texts = [redact(before) + run.tokenizer.decode_after(prompt_ids, ids) for ids in sequences]
    file = run.out / "samples" / f"step-{step:08d}.txt"
    try:
        file.parent.mkdir(exist_ok=True)
        file.write_text(RULE.join(texts) + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        run.console.warn(f"sample not kept: {error.strerror} — {file}")
    run.write("sample", text=texts)
    run.console.fence(f"step {step}: sample", texts)


class CheckpointSaver:
    """Writes checkpoints in the background, commits them, and prunes old ones."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._keep_every = run.step_config.steps(run.config.save.keep_every)
        self._pending: AsyncSave | None = None
        self.mirror = Mirror(run)
        self.mirror.start()  # a run that was killed may not have copied its newest
        self._prune()  # a run that was killed after a commit left one too many

    def save(self) -> None:
        """Begin a checkpoint of this step, after committing the pending one. Raises StorageError."""
        run, step = self._run, self._run.state.step
        if ("save", step) in run.logged:
            return
        self.try_commit()  # its failure is no reason to leave out this one
        with run.during("save", step):
            self._begin(step)

    def _begin(self, step: int) -> None:
        run = self._run
        meta: dict[str, Any] = {
            "dataset": run.dataset.fingerprint,
            "tokenizer": run.tokenizer.fingerprint,
        }
        meta |= {
            "skipped_batches": [*run.state.skipped_batches],
            "recent_steps": list(run.state.recent.values),
        }
        meta["elapsed_seconds"] = run.log.elapsed_seconds
        run.log.sync()  # a checkpoint counts on the rows before it
        config, tokenizer = run.out / CONFIG, run.out / TOKENIZER
        self._pending = AsyncSave(
            run.out / CHECKPOINTS, run.state, config=config, tokenizer=tokenizer, meta=meta
        )
        run.logged.add(("save", step))

    def commit_pending(self) -> None:
        """Commit the pending checkpoint, if there is one, then prune old ones. Raises StorageError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._run.during("save", pending.step):
                self._commit(pending)

    def _commit(self, pending: AsyncSave) -> None:
        run = self._run
        try:
            folder = pending.finish(partial(run.heartbeat.beat, "save", pending.step))
        except MegatokenError:
            run.logged.discard(("save", pending.step))
            raise
        seconds, stall_seconds = pending.writing_seconds, pending.stall_seconds
        run.preemption.observe(save_seconds=seconds + stall_seconds)
        values: dict[str, Any] = {
            "checkpoint": folder.name,
            "seconds": seconds,
            "stall_seconds": stall_seconds,
        }
        run.write(
            "save", step=pending.step, elapsed_seconds=pending.meta["elapsed_seconds"], **values
        )
        run.verified[folder] = pending.files
        self._link_best()
        self.mirror.start()
        with run.during("prune", pending.step):  # may hash old checkpoints, once
            self._prune()

    def finish_mirror(self) -> None:
        """Wait until the newest checkpoint is in `save.mirror`, or cannot be copied."""
        if self._run.config.save.mirror:
            if self.mirror.finish():
                self._prune_here()
            self._run.comm.barrier()

    def _prune(self) -> None:
        self._prune_here()
        self._run.comm.barrier()  # rank 0 may have read old checkpoints for longer than the groups of gradients wait

    def _prune_here(self) -> None:
        run, save = self._run, self._run.config.save
        if run.is_main:
            try:
                root, keep = run.out / CHECKPOINTS, [self.find_best(), self.mirror.step]
                prune(
                    root,
                    keep_last=save.keep_last,
                    keep_every=self._keep_every,
                    keep=keep,
                    verified=run.verified,
                )
            except MegatokenError as error:
                run.write("event", what="old checkpoints not removed", message=str(error))

    def find_best(self) -> int | None:
        """The step of the best checkpoint, where it is to be kept."""
        run = self._run
        return run.best_of(list_steps(run.out / CHECKPOINTS)) if run.config.save.keep_best else None

    def _link_best(self) -> None:
        """Let RUN/best point to the best checkpoint; the link is replaced atomically."""
        run, step = self._run, self.find_best()
        if not run.is_main or step is None:
            return
        link, new = run.out / BEST, run.out / f".{BEST}.new"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(step_folder(Path(CHECKPOINTS), step))
            new.replace(link)
        except (OSError, NotImplementedError) as error:  # a disk without links
            run.write(
                "event",
                what="no link to the best checkpoint",
                message=f"{error}: it is step {step}",
            )

    def save_last(self) -> None:
        """Save and commit this step, after which the run ends: a failure may be mended in LAST_SAVE_RETRY_SECONDS.

        Raises StorageError.
        """
        for pause in (*LAST_SAVE_RETRY_SECONDS, None):
            try:
                self.save()
                return self.commit_pending()
            except StorageError as error:
                if pause is None:
                    raise
                self._run.console.warn(
                    f"checkpoint not saved: {error} (tried again in {pause:g} s)"
                )
                time.sleep(pause)

    def try_save(self) -> None:
        """`save`, where a failure is logged and training goes on: earlier checkpoints are whole."""
        self._try(self.save)

    def try_commit(self) -> None:
        """`commit_pending`, where a failure is logged."""
        self._try(self.commit_pending)

    def try_commit_alone(self) -> None:
        """`try_commit` by rank 0 when another rank is lost: without sharding it has written all the files."""
        run = self._run
        if self._pending is not None and run.is_main and run.state.dims.is_unsharded:
            run.comm = self._pending.comm = Comm(DistEnv())
            self.try_commit()

    def commit_if_written(self) -> None:
        """Commit the pending checkpoint once every process has written its part; log an upload that has ended."""
        self.mirror.report()
        if self._pending is not None and self._pending.is_written():
            self.try_commit()

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (StorageError, CheckpointError) as error:  # others, as a lost rank, end the run
            self._run.console.warn(f"checkpoint not saved: {error}")
            self._run.write("event", what="save failed", message=str(error))
