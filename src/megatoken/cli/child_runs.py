"""`megatoken train` in processes of a command that needs many runs: `sweep` and `race`. They end with it, saved."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatoken.launch.local import COMMAND
from megatoken.system.atomic_write import storage_errors
from megatoken.system.process import Child

POLL_SECONDS = 0.5


@contextmanager
def stop_on_signal(stopping: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stopping`, which asks all runs to save and stop."""
    before = {
        number: signal.signal(number, lambda *_: stopping.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(folder: Path, words: Sequence[str], should_stop: Callable[[], bool]) -> int:
    """Run `megatoken train WORDS --out FOLDER`, its output added to FOLDER.log; return its exit code.

    should_stop: called twice a second, and once after the end; the run is asked to save and stop when it says so.
    """
    log = find_log(folder)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Detached: a Ctrl-C here becomes one SIGTERM there.
        child = Child(
            [*COMMAND, "train", "--out", str(folder), *words], stdout=log, stderr=log, detached=True
        )
    asked = False
    while True:
        exit_code = child.wait(POLL_SECONDS)
        must_stop = should_stop()
        if exit_code is not None:
            return exit_code
        if must_stop and not asked:
            asked = True  # a second SIGTERM would end it before it has saved
            child.send(signal.SIGTERM)


def find_error(folder: Path) -> str:
    """The last error in the log of a run; nothing where there is none."""
    with suppress(OSError):
        lines = find_log(folder).read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.startswith("error: ")), "")
    return ""


def find_log(folder: Path) -> Path:
    """Where the output of a run goes."""
    return folder.with_name(f"{folder.name}.log")
