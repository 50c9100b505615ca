"""Fetch a run from `save.mirror` at its start, and copy it there while it trains.

Each upload is a process of low priority, so that no failure of it can affect training.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatoken.base.config.schema import Config
from megatoken.base.console import Console, format_duration, format_memory
from megatoken.base.errors import MegatokenError, StorageError
from megatoken.base.redact import redact
from megatoken.base.system.environment import python_command
from megatoken.base.system.process import NULL, Child, at_parent_death
from megatoken.distributed.signals import FORWARDED
from megatoken.store.commit import list_steps
from megatoken.store.mirror import check_owner, fetch_run, update_mirror
from megatoken.store.objects import ObjectStore
from megatoken.store.run_folder import CHECKPOINTS

RETRY_SECONDS = (5.0, 20.0)  # pauses before retrying the last upload of a run
NICENESS = 10
PROGRAM = "from megatoken.store.live_mirror import main; main(sys.argv[1:])"


def fetch_from_mirror(config: Config, context: Any) -> bool:
    """Fetch the mirror's newest complete checkpoint if the run folder has none. Rank 0 only.

    Returns whether a checkpoint was fetched. Raises ConfigError if the mirror belongs to another
    run or is ahead of the checkpoints in the run folder. Raises StorageError if the mirror cannot
    be read; if the run folder has a checkpoint, only warns instead.

    context: a RunContext of train/run.py.
    """
    mirror = config.save.mirror
    if not mirror:
        return False
    start = time.monotonic()
    folder = None
    what = "cannot read save.mirror, continuing from local checkpoints"
    with _allow_failure(bool(list_steps(context.out / CHECKPOINTS)), context.console, what):
        folder = fetch_run(context.out, mirror, context.console.warn)
    if folder is None:
        return False
    duration = format_duration(time.monotonic() - start)
    context.console.print(f"fetched {folder.name} from {mirror} in {duration}")
    return True


def open_mirror(run: Any) -> "Mirror | None":
    """Return an observer that copies a run to `save.mirror`, on rank 0; None if that is empty.

    Raises ConfigError on all ranks if the mirror belongs to another run. If it is not writable,
    raises StorageError for a new run, but only warns when a run resumes.

    run: a Run of train/run.py.
    """
    save = run.config.save
    if not save.mirror:
        return None

    def check() -> None:
        with _allow_failure(run.state.step > 0, run.console, "cannot write to save.mirror now"):
            check_owner(run.out, ObjectStore(save.mirror))

    def choose_rules() -> dict[str, Any]:
        best = run.history.best_step(run.history.val_losses) if save.keep_best else None
        keep_every = run.step_config.steps(save.keep_every)
        return {"keep_last": save.keep_last, "keep_every": keep_every, "best": best}

    run.comm.run_on_rank0(check)
    if not run.is_main:
        return None
    in_use = run.history.in_use
    return Mirror(run.out, save.mirror, choose_rules, in_use, run.console, run.event)


@contextmanager
def _allow_failure(allowed: bool, console: Console, what: str) -> Iterator[None]:
    """Turn StorageError into a warning, if that is allowed."""
    try:
        yield
    except StorageError as error:
        if not allowed:
            raise
        console.warn(f"{what}: {error}")


class Mirror:
    """Observer that uploads the newest checkpoint after each save, one upload at a time.

    A failed upload never stops training.
    """

    def __init__(
        self,
        run: Path,
        address: str,
        choose_rules: Callable[[], Mapping[str, Any]],
        in_use: set[int],
        console: Console,
        event: Callable[..., object],
    ) -> None:
        """choose_rules: returns what to keep at the address, as arguments of `update_mirror`.

        in_use: gets the step of the checkpoint that is being uploaded. event: logs an event.
        """
        self._run = run
        self._address = address
        self._choose_rules = choose_rules
        self._in_use = in_use
        self._console = console
        self._event = event
        self._child: Child | None = None
        self._lines: list[str] = []
        self._is_waiting = False

    def __call__(self, row: Mapping[str, Any]) -> None:
        if row["kind"] in ("start", "save"):  # a killed run may have left its newest one uncopied
            self.start()
        elif row["kind"] == "train":
            self.report()
        elif row["kind"] == "finish":
            self.finish()

    def start(self) -> None:
        """Start uploading the newest checkpoint, or do so later if an upload is running."""
        self._is_waiting = self._child is not None
        if self._is_waiting:
            return
        self._lines = []
        rules = json.dumps(self._choose_rules())
        try:
            steps = list_steps(self._run / CHECKPOINTS)
            if steps:
                self._child = Child(
                    [*python_command(PROGRAM), str(self._run), self._address, rules],
                    stdout=self._lines.append,
                    stderr=NULL,
                    death_signal=None,  # set by `main`: setting it here would fork a large process
                )
                self._in_use.add(steps[-1])
        except (OSError, StorageError) as error:
            self._console.warn(f"not copied to save.mirror: {error}")

    def report(self, *, wait: bool = False) -> bool:
        """Log the end of an upload, if one has ended since the last call.

        Returns True if one has ended and succeeded, else False.

        wait: whether to wait for the current upload to end.
        """
        exit_code = self._child.wait(None if wait else 0) if self._child else None
        if exit_code is None:
            return False
        lines = self._lines
        self._child = None
        self._in_use.clear()
        if self._is_waiting:
            self.start()
        result: dict[str, Any] = {"error": f"the upload ended with code {exit_code}"}
        if lines:
            result = json.loads(lines[-1])
        if "error" in result:
            self._console.warn(f"not copied to save.mirror: {result['error']}")
            self._event("not mirrored", message=result["error"])
            return False
        if result["uploaded"]:
            size = format_memory(result["bytes"])
            duration = format_duration(result["seconds"])
            names = ", ".join(result["uploaded"])
            message = f"{names} copied to {self._address}: {size} in {duration}"
            self._event("mirrored", message=message, **result)
        return True

    def finish(self) -> None:
        """Upload the newest checkpoint and wait for it, with retries."""
        self._console.print(f"copying to {self._address}")
        for pause in (*RETRY_SECONDS, None):
            self.start()
            is_done = self._child is None  # no checkpoint
            while self._child is not None:
                is_done = self.report(wait=True)
            if is_done or pause is None:
                break
            time.sleep(pause)


def main(arguments: Sequence[str]) -> None:
    """Run one upload and print its report as JSON; on Linux, end when the parent process does."""
    # Terminals and schedulers signal the whole group, but the training process decides.
    for name in FORWARDED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    set_death_signal = at_parent_death(signal.SIGKILL)
    if set_death_signal:
        set_death_signal()
    os.nice(NICENESS)
    run, address, rules = arguments
    try:
        report = update_mirror(Path(run), address, **json.loads(rules))
    except MegatokenError as error:
        report = {"error": str(error)}
    except Exception as error:
        report = {"error": redact(f"{type(error).__name__}: {error}")}
    json.dump(report, sys.stdout)
    print(flush=True)
