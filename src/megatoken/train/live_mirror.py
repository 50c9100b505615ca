"""`save.mirror` of a live run, on rank 0: fetched from at the start, copied to beside training."""

import time

from megatoken.checkpoint.commit import list_steps
from megatoken.checkpoint.mirror import check_owner, fetch_run
from megatoken.checkpoint.mirror_uploads import MirrorUploads
from megatoken.console import format_duration, format_quantity
from megatoken.errors import StorageError
from megatoken.system.object_store import ObjectStore
from megatoken.train.run_context import RunContext
from megatoken.train.run_folder import CHECKPOINTS

RETRY_SECONDS = (5.0, 20.0)  # before the last upload of a run, which failed, is tried again


def fetch_from_mirror(run: RunContext) -> bool:
    """Fetch the newest whole checkpoint from `save.mirror` where the folder has none; whether there was one.

    Raises ConfigError when the copy is another run's or ahead, StorageError when it cannot be read and the folder has
    none.
    """
    mirror, start = run.config.save.mirror, time.monotonic()
    if not mirror:
        return False
    try:
        folder = fetch_run(run.out, mirror, run.console.warn)
    except StorageError as error:
        if not list_steps(run.out / CHECKPOINTS):
            raise
        run.console.warn(f"save.mirror cannot be read, going on with the checkpoints here: {error}")
        return False
    if folder is not None:
        run.console.print(
            f"fetched {folder.name} from {mirror} in {format_duration(time.monotonic() - start)}"
        )
    return folder is not None


def check_mirror(run: RunContext) -> None:
    """Check that `save.mirror` can be written and is this run's.

    Raises ConfigError when it is another run's, StorageError when it cannot be written before the first step.
    """
    if run.config.save.mirror:
        try:
            check_owner(run.out, ObjectStore(run.config.save.mirror))
        except StorageError as error:
            if not run.state.step:
                raise
            run.console.warn(f"save.mirror cannot be used now: {error}")


class Mirror:
    """The uploads of a run; does nothing without `save.mirror` and on other ranks. No failure ends training."""

    def __init__(self, run: RunContext) -> None:
        self._run, save = run, run.config.save
        self._uploads: MirrorUploads | None = None
        if run.is_main and save.mirror:
            keep_every = run.step_config.steps(save.keep_every)
            self._uploads = MirrorUploads(
                run.out, save.mirror, keep_last=save.keep_last, keep_every=keep_every
            )

    @property
    def step(self) -> int | None:
        """The checkpoint that is being uploaded, which has to stay."""
        return self._uploads.step if self._uploads else None

    def start(self) -> None:
        """Begin to upload the newest checkpoint, when the upload that goes on has ended."""
        run = self._run
        if self._uploads:
            try:
                self._uploads.start(
                    run.best_of(run.val_losses) if run.config.save.keep_best else None
                )
            except (OSError, StorageError) as error:  # no memory for another process, or no folder
                run.console.warn(f"not copied to save.mirror: {error}")

    def report(self, *, wait: bool = False) -> bool:
        """Log the upload that has ended. wait: for its end. Return whether one has succeeded."""
        run = self._run
        if self._uploads is None or (answer := self._uploads.poll(wait=wait)) is None:
            return False
        if "error" in answer:
            run.console.warn(f"not copied to save.mirror: {answer['error']}")
            run.write("event", what="not mirrored", message=answer["error"])
            return False
        if answer["uploaded"]:
            size, duration = (
                format_quantity(answer["bytes"], "B"),
                format_duration(answer["seconds"]),
            )
            message = f"{', '.join(answer['uploaded'])} copied to {run.config.save.mirror}: {size} in {duration}"
            run.write("event", what="mirrored", message=message, **answer)
        return True

    def finish(self) -> bool:
        """Wait until the newest checkpoint is there, trying again after RETRY_SECONDS; False without `save.mirror`."""
        if self._uploads is None:
            return False
        self._run.console.print(f"copying to {self._run.config.save.mirror}")
        for pause in (*RETRY_SECONDS, None):
            self.start()
            done = self.step is None  # no checkpoint
            while self.step is not None:
                done = self.report(wait=True)
            if done or pause is None:
                break
            time.sleep(pause)
        return True
