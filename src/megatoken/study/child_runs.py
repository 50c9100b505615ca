"""Run `megatoken train` in child processes for `sweep` and `race`.

When the command is stopped, the child processes save and stop as well.
"""

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from megatoken.base.system.atomic_write import storage_errors
from megatoken.base.system.process import Child
from megatoken.distributed.local_launch import COMMAND
from megatoken.distributed.signals import handle_signals

POLL_SECONDS = 0.5


def stop_on_signal(stopping: threading.Event) -> AbstractContextManager[None]:
    """Set `stopping` on SIGTERM and SIGINT inside the context."""
    return handle_signals(("SIGTERM", "SIGINT"), lambda *_: stopping.set())


def train(folder: Path, words: Sequence[str], should_stop: Callable[[], bool]) -> int:
    """Run `megatoken train WORDS --out FOLDER` and return its exit code.

    Its output is appended to FOLDER.log.

    should_stop: called every POLL_SECONDS and once after the end. When it returns True, the run is
    told to save and stop.
    """
    log = find_log(folder)
    command = [*COMMAND, "train", "--out", str(folder), *words]
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Detached, so that Ctrl-C here becomes SIGTERM there.
        child = Child(command, stdout=log, stderr=log, detached=True)
    is_stopping = False
    while True:
        exit_code = child.wait(POLL_SECONDS)
        must_stop = should_stop()
        if exit_code is not None:
            return exit_code
        if must_stop and not is_stopping:
            is_stopping = True  # a second SIGTERM would end it before it has saved
            child.send(signal.SIGTERM)


def find_log(folder: Path) -> Path:
    """Return the file to which the output of the run in `folder` is appended."""
    return folder.with_name(f"{folder.name}.log")


def read_error(folder: Path) -> str:
    """Return the last error in a run's output; without an error, say where the output is."""
    log = find_log(folder)
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else f"see {log}"
