"""Write what this rank does to a file, which the launcher reads to find ranks that hang."""

import faulthandler
import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatoken.base.system.environment import heartbeat_file

# Smallest limits of silence in seconds, by phase. Storage may stall; a save reports its progress.
MIN_LIMIT_SECONDS = defaultdict(lambda: 300.0, step=8.0)
LIMIT_FACTOR = 5.0  # limit divided by the longest of the last RECENT times
RECENT = 64
MIN_MEASURED = {"step": 3, "save": 0}  # to set a limit; the first steps compile


class Heartbeat:
    """Writes the heartbeats of this rank. Does nothing if no launcher reads them."""

    def __init__(self) -> None:
        file = heartbeat_file()
        self._file = None if file is None else os.open(file, os.O_WRONLY | os.O_CREAT)
        if file is not None:
            # The signal handler is in C, so it dumps stacks even while a library holds the GIL.
            self._stacks = stacks_file(file).open("w")
            faulthandler.register(signal.SIGQUIT, self._stacks)
        self._now = ("setup", 0, 0)
        self._since = time.monotonic()
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def beat(self, phase: str, step: int, done: int = 0) -> None:
        """Report the current phase and step, and set the limit of silence until the next report.

        The limit is a multiple of how long the phase took recently, and infinite until the phase
        has been timed. Only a save has a limit from the start, because it reports progress.

        done: progress within the phase; each new value counts as a new report.
        """
        if self._file is None or (phase, step, done) == self._now:
            return
        now = time.monotonic()
        self._seconds[self._now[0]].append(now - self._since)
        self._now = (phase, step, done)
        self._since = now
        seconds = self._seconds[phase]
        limit = float("inf")
        if len(seconds) >= MIN_MEASURED.get(phase, 1):
            limit = max(MIN_LIMIT_SECONDS[phase], LIMIT_FACTOR * max(seconds, default=0.0))
        line = f"{limit:.1f} {step} {phase} {done}"
        with suppress(OSError):  # a full disk must not stop training
            os.pwrite(self._file, line.ljust(64).encode(), 0)  # one call: never half a line

    @contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """Report `phase` inside the context, then the surrounding phase again."""
        outer = self._now
        self.beat(phase, step)
        try:
            yield
        finally:
            self.beat(*outer)


def stacks_file(heartbeat: Path) -> Path:
    """Return the file to which a rank dumps its stacks. heartbeat: its heartbeat file."""
    return heartbeat.with_suffix(".stacks")
