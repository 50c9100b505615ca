"""Fetch a run from `save.mirror` at its start, and copy it there during training. Rank 0 only."""

import time

from megatoken.base.console import format_duration, format_quantity
from megatoken.base.errors import StorageError
from megatoken.store.commit import list_steps
from megatoken.store.mirror import check_owner, fetch_run
from megatoken.store.mirror_uploads import MirrorUploads
from megatoken.store.objects import ObjectStore
from megatoken.train.run import RunContext, RunLog
from megatoken.train.run_folder import CHECKPOINTS

RETRY_SECONDS = (5.0, 20.0)  # pauses before retrying the last upload of a run


def fetch_from_mirror(mirror: str, context: RunContext) -> bool:
    """Fetch the mirror's newest complete checkpoint if the run folder has none.

    Returns whether a checkpoint was fetched. Raises ConfigError if the mirror belongs to another
    run or is ahead of the checkpoints in the run folder. Raises StorageError if the mirror cannot
    be read; if the run folder has a checkpoint, only warns instead.
    """
    if not mirror:
        return False
    start = time.monotonic()
    try:
        folder = fetch_run(context.out, mirror, context.console.warn)
    except StorageError as error:
        if not list_steps(context.out / CHECKPOINTS):
            raise
        context.console.warn(f"cannot read save.mirror, continuing from local checkpoints: {error}")
        return False
    if folder is None:
        return False
    duration = format_duration(time.monotonic() - start)
    context.console.print(f"fetched {folder.name} from {mirror} in {duration}")
    return True


def check_mirror(mirror: str, step: int, context: RunContext) -> None:
    """Check that `save.mirror` is writable and belongs to this run.

    Raises ConfigError if it belongs to another run. If it is not writable, raises StorageError for
    a new run (`step` 0), but only warns when a run resumes.
    """
    if not mirror:
        return
    try:
        check_owner(context.out, ObjectStore(mirror))
    except StorageError as error:
        if not step:
            raise
        context.console.warn(f"cannot write to save.mirror now: {error}")


class Mirror:
    """Uploads a run's checkpoints to `save.mirror` in the background, from rank 0.

    Does nothing on other ranks or if `save.mirror` is empty. A failed upload never stops training.
    """

    def __init__(self, log: RunLog) -> None:
        plan = log.plan
        save = plan.config.save
        self._save = save
        self._log = log
        self._console = plan.console
        self._uploads: MirrorUploads | None = None
        if plan.is_main and save.mirror:
            keep_every = plan.step_config.steps(save.keep_every)
            self._uploads = MirrorUploads(
                plan.out, save.mirror, keep_last=save.keep_last, keep_every=keep_every
            )

    @property
    def step(self) -> int | None:
        """The step of the checkpoint being uploaded, which must not be pruned."""
        return self._uploads.step if self._uploads else None

    def start(self) -> None:
        """Upload the newest checkpoint, after the current upload if one is running."""
        if self._uploads is None:
            return
        progress = self._log.progress
        best = progress.best_step(progress.val_losses) if self._save.keep_best else None
        try:
            self._uploads.start(best)
        except (OSError, StorageError) as error:
            self._console.warn(f"not copied to save.mirror: {error}")

    def report(self, *, wait: bool = False) -> bool:
        """Log the end of an upload, if one has ended since the last call.

        Returns True if one has ended and succeeded, else False.

        wait: whether to wait for the current upload to end.
        """
        answer = self._uploads.poll(wait=wait) if self._uploads else None
        if answer is None:
            return False
        if "error" in answer:
            self._console.warn(f"not copied to save.mirror: {answer['error']}")
            self._log.event("not mirrored", message=answer["error"])
            return False
        if answer["uploaded"]:
            size = format_quantity(answer["bytes"], "B")
            duration = format_duration(answer["seconds"])
            names = ", ".join(answer["uploaded"])
            message = f"{names} copied to {self._save.mirror}: {size} in {duration}"
            self._log.event("mirrored", message=message, **answer)
        return True

    def finish(self) -> bool:
        """Upload the newest checkpoint and wait for it, with retries.

        Returns False if this rank does not upload: if it is not rank 0 or `save.mirror` is empty.
        Otherwise returns True, even if every attempt failed.
        """
        if self._uploads is None:
            return False
        self._console.print(f"copying to {self._save.mirror}")
        for pause in (*RETRY_SECONDS, None):
            self.start()
            is_done = self.step is None  # no checkpoint
            while self.step is not None:
                is_done = self.report(wait=True)
            if is_done or pause is None:
                break
            time.sleep(pause)
        return True
