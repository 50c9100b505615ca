"""`megatoken train` in processes of a command that needs many runs: `sweep` and `race`. They end with it, saved."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megatoken.errors import StorageError
from megatoken.launch.local import COMMAND, at_parent_death
from megatoken.system.atomic_write import storage_errors

POLL_SECONDS = 0.5


@contextmanager
def hold_folder(folder: Path, command: str) -> Iterator[None]:
    """Make the folder of a command's runs and keep others out. Raises StorageError when one is in it."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        what = f"another {command} is using this folder"
        raise StorageError(what, str(folder), "wait for it, or name another --out") from None
    try:
        yield
    finally:
        lock.release()


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
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        output = find_log(folder).open("ab")
    command = [*COMMAND, "train", "--out", str(folder), *words]
    asked = False
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    # It ends with this process, or the next start would meet it in its folder; Ctrl-C reaches it from here alone.
    how |= {"preexec_fn": at_parent_death(signal.SIGTERM), "process_group": 0}
    with output, subprocess.Popen(command, **how) as process:
        while process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
            if should_stop() and process.returncode is None and not asked:
                asked = True  # a second SIGTERM would end it before it has saved
                process.terminate()
    return process.returncode


def find_error(folder: Path) -> str:
    """The last error in the log of a run; nothing where there is none."""
    with suppress(OSError):
        lines = find_log(folder).read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.startswith("error: ")), "")
    return ""


def find_log(folder: Path) -> Path:
    """Where the output of a run goes."""
    return folder.with_name(f"{folder.name}.log")
