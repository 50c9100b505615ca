"""Upload a run's checkpoints in a low-priority process, so that failures cannot affect training."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatoken.base.errors import MegatokenError
from megatoken.base.redact import redact
from megatoken.base.system.environment import python_command
from megatoken.base.system.process import NULL, Child, at_parent_death
from megatoken.distributed.local_launch import FORWARDED
from megatoken.store.commit import list_steps
from megatoken.store.mirror import CHECKPOINTS, update_mirror

NICENESS = 10
PROGRAM = "from megatoken.store.mirror_uploads import main; main(sys.argv[1:])"


class MirrorUploads:
    """Uploads a run's checkpoints, one upload at a time, each in a child process.

    step: the checkpoint being uploaded, or None.
    """

    def __init__(self, run: Path, address: str, **rules: int) -> None:
        """Upload to `address`. rules: keep_last and keep_every, as in `update_mirror`."""
        self._run = run
        self._address = address
        self._rules = rules
        self._child: Child | None = None
        self._lines: list[str] = []
        self._is_waiting = False
        self._best: int | None = None
        self.step: int | None = None  # being uploaded: must not be pruned

    def start(self, best: int | None) -> None:
        """Start uploading the newest checkpoint, or do so later if an upload is running.

        best: step of another checkpoint to upload and keep, or None.
        """
        self._best = best
        self._is_waiting = self._child is not None
        steps = list_steps(self._run / CHECKPOINTS)
        if self._is_waiting or not steps:
            return
        self.step = steps[-1]
        self._lines = []
        rules = json.dumps({**self._rules, "best": best})
        self._child = Child(
            [*python_command(PROGRAM), str(self._run), self._address, rules],
            stdout=self._lines.append,
            stderr=NULL,
            death_signal=None,  # set by `main`: setting it here would fork a large process
        )

    def poll(self, *, wait: bool = False) -> dict[str, Any] | None:
        """Return the report of an upload that has just ended, or {"error": message} if it failed.

        Returns None if no upload has ended since the last call.

        wait: whether to wait for the current upload to end.
        """
        if self._child is None:
            return None
        exit_code = self._child.wait(None if wait else 0)
        if exit_code is None:
            return None
        lines = self._lines
        self._child = None
        self.step = None
        if self._is_waiting:
            self.start(self._best)
        if not lines:
            return {"error": f"the upload ended with code {exit_code}"}
        return dict(json.loads(lines[-1]))


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
