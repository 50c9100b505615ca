"""Handle the signals that ask a process to stop."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from megatoken.base.errors import ExitCode
from megatoken.base.system.environment import heartbeat_file

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")  # Ctrl-C stays an interrupt
FORWARDED = (*STOP_SIGNALS, "SIGINT")
END_WHEN_REPEATED = ("SIGTERM", "SIGINT")
COPY_SECONDS = 0.5  # signals this close are one: some launchers signal a process and its group
PARENT = os.getppid()


def not_ignored(names: Sequence[str]) -> list[str]:
    """Return the signals among `names` that are not ignored here.

    For example, a process that nohup starts ignores SIGHUP.
    """
    return [name for name in names if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]


@contextmanager
def handle_signals(
    names: Sequence[str], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Call `handler` for signals inside the context, except for those that the process ignores.

    Does nothing outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in not_ignored(names)] if is_main else []
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, signal.SIG_DFL if old_handler is None else old_handler)


class RepeatedSignal:
    """Tells whether a second SIGTERM or SIGINT is a new request or a copy of the first.

    Some launchers send a signal to both a process and its group. A new request ends the process
    without waiting for a save.
    """

    def __init__(self) -> None:
        self._first_at: float | None = None

    def is_repeated(self, number: int) -> bool:
        """Record a signal, and return whether it is a second request to stop."""
        if signal.Signals(number).name not in END_WHEN_REPEATED:
            return False
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at >= COPY_SECONDS


@contextmanager
def stop_at_once(marker: Path | None = None) -> Iterator[None]:
    """Inside the context, a signal ends the process with the exit code of a stopped run.

    It is for the time before distributed/preemption.py handles signals. marker: see
    `write_stop_marker`.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        text = f"stopped by {name_cause(number)} before the run began; nothing to save\n"
        with suppress(OSError):
            os.write(2, text.encode())
        os._exit(write_stop_marker(marker))

    with handle_signals(STOP_SIGNALS, stop):
        yield


def write_stop_marker(marker: Path | None) -> ExitCode:
    """Return the exit code for a stopped run.

    Under torchrun, that is 0, so that torchrun does not restart the run; the actual code is written
    to `marker`.

    marker: file for the code; None if the process was not started by torchrun.
    """
    if marker is None:
        return ExitCode.STOPPED
    marker.write_text(str(int(ExitCode.STOPPED)))
    return ExitCode.DONE


def name_cause(number: int) -> str:
    """Return why to stop: the launcher of this rank died, or a signal's name; "" for neither.

    number: of the signal; 0 for none. Only Linux sends one when the launcher dies.
    """
    if heartbeat_file() and os.getppid() != PARENT:
        return "the death of its launcher"
    return signal.Signals(number).name if number else ""
