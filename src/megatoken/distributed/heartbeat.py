"""Find ranks that hang: each rank writes its phase and step to a file, which the launcher reads.

A rank that waits for a hung rank is just as silent. So a run counts as hung once every rank has
been silent for longer than its limit. The hung rank is then found by the stacks: it is not waiting
in a collective, or is waiting in a different one than the others.
"""

import faulthandler
import os
import re
import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from megatoken.base.system.environment import heartbeat_file
from megatoken.base.system.process import Child

# Smallest limits of silence in seconds, by phase. Storage may stall; a save reports its progress.
MIN_LIMIT_SECONDS = defaultdict(lambda: 300.0, step=8.0)
LIMIT_FACTOR = 5.0  # limit divided by the longest of the last RECENT times
RECENT = 64
MIN_MEASURED = {"step": 3, "save": 0}  # to set a limit; the first steps compile
DUMP_SECONDS = 1.0  # to wait for ranks to dump their stacks
MAX_POLL_GAP = 1.0  # between two polls; if it was longer, the launcher itself was suspended


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


class Watchdog:
    """Reads the heartbeats of the ranks on this machine, from a file per rank in `folder`."""

    def __init__(self, folder: Path, ranks: Collection[int], world_size: int) -> None:
        self.files = {rank: folder / f"rank-{rank}" for rank in ranks}
        self._latest = dict.fromkeys(ranks, ("", 0.0))  # heartbeat, and when it came by `_clock`
        self._has_others = len(ranks) < world_size
        self._clock = 0.0
        self._polled_at = time.monotonic()

    def read(self, rank: int) -> tuple[float, int, str]:
        """Return a rank's last heartbeat: its limit of silence in seconds, step and phase."""
        line = self.files[rank].read_text() if self.files[rank].exists() else ""
        if line != self._latest[rank][0]:
            self._latest[rank] = (line, self._clock)
        limit, step, phase, *_ = (self._latest[rank][0] or "inf 0 start").split()
        return float(limit), int(step), phase

    def all_silent(self, ranks: Collection[int]) -> bool:
        """Read the heartbeats of `ranks`; return whether all were silent beyond their limits.

        It must be called regularly, because the seconds of silence are counted between calls.
        """
        now = time.monotonic()
        self._clock += min(now - self._polled_at, MAX_POLL_GAP)
        self._polled_at = now
        limits = {rank: self.read(rank)[0] for rank in ranks}
        return all(self.silent_seconds(rank) > limit for rank, limit in limits.items())

    def describe(self, rank: int) -> str:
        """Format the phase and step of a rank's last heartbeat; "" before the first."""
        _, step, phase = self.read(rank)
        return f" in phase '{phase}' after step {step}" if self._latest[rank][0] else ""

    def silent_seconds(self, rank: int) -> float:
        """Return the seconds since a rank's last heartbeat."""
        return self._clock - self._latest[rank][1]

    def find_hung(self, processes: Mapping[int, Child]) -> tuple[str, str]:
        """Return a message that names the hung rank, and a text with the stacks of all ranks.

        The hung rank is one that does not answer, or else one that is not in a collective, or else
        the one with the rarest stack, or else the one at the earliest step. If every rank of this
        machine waits in a collective, the hung rank may be on another machine, whose own watchdog
        reports it.
        """
        stacks = self._dump_stacks(processes)
        # The main thread is the last.
        places = {rank: split_threads(text)[-1] for rank, text in stacks.items()}
        counts = Counter(places.values())

        def order(rank: int) -> tuple[bool, bool, int, int]:
            text = stacks[rank]
            return bool(text), waits_in_collective(text), counts[places[rank]], self.read(rank)[1]

        rank = min(processes, key=order)
        what = f"rank {rank} hangs"
        if self._has_others and waits_in_collective(stacks[rank]):
            what = f"all ranks of this machine wait, perhaps for another machine; rank {rank} is"
        silent = "no answer: stopped by a signal, or blocked in a system call\n"
        return (
            f"{what}, silent for {self.silent_seconds(rank):.0f} s{self.describe(rank)}",
            "".join(f"rank {rank}:\n{text or silent}\n" for rank, text in stacks.items()),
        )

    def _dump_stacks(self, processes: Mapping[int, Child]) -> dict[int, str]:
        """Ask the ranks for the stacks of their threads; return "" for one that does not answer."""
        files = {rank: stacks_file(self.files[rank]) for rank in processes}
        for rank, file in files.items():
            if file.exists():
                processes[rank].send(signal.SIGQUIT)
        time.sleep(DUMP_SECONDS)
        return {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}


def stacks_file(heartbeat: Path) -> Path:
    """Return the file to which a rank dumps its stacks. heartbeat: its heartbeat file."""
    return heartbeat.with_suffix(".stacks")


def waits_in_collective(stacks: str) -> bool:
    """Return whether a dump has a thread inside torch.distributed or megatoken.distributed."""
    threads = split_threads(stacks)
    return any("/distributed/" in "".join(thread.splitlines()[:3]) for thread in threads)


def split_threads(stacks: str) -> list[str]:
    """Split a dump into one stack per thread, without the lines that begin each stack.

    A stack begins with the innermost call.
    """
    return [thread.strip() for thread in re.split(r"^.*hread 0x.*$", stacks, flags=re.MULTILINE)]
