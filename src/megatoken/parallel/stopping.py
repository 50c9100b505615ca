"""A stop that schedulers understand: before a run has begun, and under a launcher that knows only success and failure.

In: signals, a file to write. Out: exit codes. Absent: a run under way, which the guard watches (train/guard.py).
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatoken.errors import Exit

EARLY = ("SIGTERM", "SIGUSR1", "SIGHUP")  # Ctrl-C still says that it interrupted


@contextmanager
def stopping_at_once(note: Path | None = None) -> Iterator[None]:
    """Until a guard watches, these signals end the process as a stop: nothing was begun, so nothing is lost."""

    def stop(*_: object) -> None:
        os._exit(note_stop(note))

    mine = threading.current_thread() is threading.main_thread()  # only there Python lets signals be handled
    numbers = [number for name in EARLY if mine and (number := getattr(signal, name, None))]
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def note_stop(note: Path | None) -> Exit:
    """The exit code of a stop. With a file to note it in the code says success: torchrun would take anything else for a
    failure, and start the process again."""
    if note is None:
        return Exit.STOPPED
    note.write_text(str(int(Exit.STOPPED)))
    return Exit.DONE
