"""Write checkpoints in the background, commit them, prune old ones and link the best."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatoken.base.errors import CheckpointError, MegatokenError, StorageError
from megatoken.distributed.comm import SINGLE_PROCESS
from megatoken.store.commit import list_steps, prune, step_folder
from megatoken.store.run_folder import CHECKPOINTS, CONFIG, TOKENIZER
from megatoken.store.save import AsyncSave
from megatoken.train.run import Run

BEST = "best"  # the link to the best checkpoint
LAST_SAVE_RETRY_SECONDS = (5.0, 15.0, 60.0, 120.0)  # pauses before retrying the last save


class CheckpointSaver:
    """Saves, commits and prunes the checkpoints of a run. All ranks must make the same calls."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._comm = run.comm
        self._root = run.out / CHECKPOINTS
        self._keep_every = run.step_config.steps(run.config.save.keep_every)
        self._pending: AsyncSave | None = None
        self._prune()  # a run killed after a commit may have left one too many

    def save(self) -> None:
        """Start writing a checkpoint of the current step, unless this step was already saved.

        The pending checkpoint, if any, is committed first. Raises StorageError.
        """
        run = self._run
        step = run.state.step
        if ("save", step) in run.history.logged:
            return
        self.try_commit()  # if that fails, this save still starts
        with run.during("save", step):
            meta = {
                "dataset": run.data.dataset.fingerprint,
                "tokenizer": run.data.vocabulary.fingerprint,
                "skipped_batches": run.state.position.skipped_batches,
                "recent_steps": run.state.position.recent.values,
                "elapsed_seconds": run.log_file.elapsed_seconds,
            }
            run.log_file.sync()  # a checkpoint relies on the rows before it
            config, tokenizer = run.out / CONFIG, run.out / TOKENIZER
            self._pending = AsyncSave(
                self._root, run.state, config=config, tokenizer=tokenizer, meta=meta
            )
            run.history.logged.add(("save", step))

    def commit_pending(self) -> None:
        """Wait for the pending checkpoint, if any, commit it, and prune old ones.

        Raises StorageError.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            with self._run.during("save", pending.step):
                self._commit(pending)

    def _commit(self, pending: AsyncSave) -> None:
        run = self._run
        try:
            folder = pending.finish(partial(run.heartbeat.beat, "save", pending.step))
        except MegatokenError:
            run.history.logged.discard(("save", pending.step))
            raise
        run.stop.observe(save_seconds=pending.writing_seconds + pending.stall_seconds)
        run.write(
            "save",
            step=pending.step,
            elapsed_seconds=pending.meta["elapsed_seconds"],
            checkpoint=folder.name,
            seconds=pending.writing_seconds,
            stall_seconds=pending.stall_seconds,
        )
        run.history.verified[folder] = pending.files
        self._link_best()
        with run.during("prune", pending.step):  # may hash files that have changed
            self._prune()

    def finish(self) -> None:
        """Let observers finish reading checkpoints, and prune those that they kept."""
        self._run.write("finish", to_file=False)
        self._prune()

    def _prune(self) -> None:
        # Others wait here: rank 0 may need longer than the timeout of device collectives.
        self._comm.run_on_rank0(self._prune_here)

    def _prune_here(self) -> None:
        run = self._run
        try:
            prune(
                self._root,
                keep_last=run.config.save.keep_last,
                keep_every=self._keep_every,
                keep=[self.find_best(), *run.history.in_use],
                verified=run.history.verified,
            )
        except MegatokenError as error:
            run.event("old checkpoints not removed", message=str(error))

    def find_best(self) -> int | None:
        """Return the step of the checkpoint with the lowest validation loss.

        Returns None if `save.keep_best` is off or no checkpoint has a validation loss.
        """
        if not self._run.config.save.keep_best:
            return None
        return self._run.history.best_step(list_steps(self._root))

    def _link_best(self) -> None:
        """Atomically point the symlink RUN/best at the best checkpoint."""
        run = self._run
        step = self.find_best()
        if not run.is_main or step is None:
            return
        link = run.out / BEST
        new_link = run.out / f".{BEST}.new"
        try:
            new_link.unlink(missing_ok=True)
            new_link.symlink_to(step_folder(Path(CHECKPOINTS), step))
            new_link.replace(link)
        except (OSError, NotImplementedError) as error:  # no symlinks on this file system
            message = f"{error}: it is step {step}"
            run.event("no link to the best checkpoint", message=message)

    def save_last(self) -> None:
        """Save and commit the current step, retrying with pauses of LAST_SAVE_RETRY_SECONDS.

        Raises StorageError if the last attempt fails.
        """
        for pause in (*LAST_SAVE_RETRY_SECONDS, None):
            try:
                self.save()
                self.commit_pending()
                return
            except StorageError as error:
                if pause is None:
                    raise
                self._run.console.warn(f"checkpoint not saved: {error} (retrying in {pause:g} s)")
                time.sleep(pause)

    def try_save(self) -> None:
        """Call `save`, but log a storage failure instead of raising it."""
        self._try(self.save)

    def try_commit(self) -> None:
        """Call `commit_pending`, but log a storage failure instead of raising it."""
        self._try(self.commit_pending)

    def try_commit_alone(self) -> None:
        """Commit the pending checkpoint without the other ranks, after one of them was lost.

        Possible only on rank 0 and for an unsharded model, whose files are all written by rank 0;
        otherwise does nothing.
        """
        run = self._run
        if self._pending is not None and run.is_main and run.state.dims.is_unsharded:
            self._comm = self._pending.comm = SINGLE_PROCESS
            self.try_commit()

    def commit_if_written(self) -> None:
        """Commit the pending checkpoint if all ranks have written it, without waiting for them."""
        if self._pending is not None and self._pending.is_written():
            self.try_commit()

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (StorageError, CheckpointError) as error:  # others, such as a lost rank, end the run
            self._run.console.warn(f"checkpoint not saved: {error}")
            self._run.event("save failed", message=str(error))
