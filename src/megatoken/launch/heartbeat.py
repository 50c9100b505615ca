"""Finds ranks that hang: each rank writes its phase and step to a file, which the process that started the ranks reads.

A rank that waits for another writes as little as one that hangs. So a run hangs when every rank has written nothing for
longer than its limit; the stacks then show which rank is not waiting in a collective, or waits in another one.
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

from megatoken.system.environment import heartbeat_file
from megatoken.system.process import Child

# Seconds without a heartbeat that every phase may take. A storage may stall; a save that writes has heartbeats.
MIN_LIMIT_SECONDS = defaultdict(lambda: 300.0, step=8.0)
LIMIT_FACTOR = 5.0  # times the longest of the last RECENT ones
RECENT = 64
MEASURED_FIRST = {"step": 3, "save": 0}  # the first steps compile and allocate
DUMP_SECONDS = 1.0  # for a rank to dump its stacks
MAX_POLL_GAP = 1.0  # between two looks; in a longer one the watching process was suspended itself


class Heartbeat:
    """Written by a rank. Does nothing where no process reads it."""

    def __init__(self) -> None:
        file = heartbeat_file()
        self._file = None if file is None else os.open(file, os.O_WRONLY | os.O_CREAT)
        if file is not None:
            # At the signal the stacks are written in C, also while a library holds the interpreter's lock.
            self._stacks = stacks_file(file).open("w")
            faulthandler.register(signal.SIGQUIT, self._stacks)
        self._now, self._since = ("setup", 0, 0), time.monotonic()
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def beat(self, phase: str, step: int, done: int = 0) -> None:
        """Begin a phase at a step, or go on with it when `done` is another; call it for every step.

        A phase has no limit until it has been measured. A save has: it goes on as bytes are written.
        """
        if self._file is None or (phase, step, done) == self._now:
            return
        now = time.monotonic()
        self._seconds[self._now[0]].append(now - self._since)
        self._now, self._since = (phase, step, done), now
        seconds, limit = self._seconds[phase], float("inf")
        if len(seconds) >= MEASURED_FIRST.get(phase, 1):
            limit = max(MIN_LIMIT_SECONDS[phase], LIMIT_FACTOR * max(seconds, default=0.0))
        line = f"{limit:.1f} {step} {phase} {done}"
        with suppress(
            OSError
        ):  # a full disk: without heartbeats a hang is not found, but training goes on
            os.pwrite(self._file, line.ljust(64).encode(), 0)  # one call: never half a line

    @contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """Context of a phase within another one, which goes on after it."""
        outer = self._now
        self.beat(phase, step)
        try:
            yield
        finally:
            self.beat(*outer)


class Watchdog:
    """Reads the heartbeats of a machine's ranks, in the process that started them; `folder` holds a file for each."""

    def __init__(self, folder: Path, ranks: Collection[int], world_size: int) -> None:
        self.files = {rank: folder / f"rank-{rank}" for rank in ranks}
        self._seen = dict.fromkeys(ranks, ("", 0.0))  # heartbeat, and when it came by `_clock`
        self._has_others = len(ranks) < world_size
        self._clock, self._looked_at = 0.0, time.monotonic()

    def read(self, rank: int) -> tuple[float, int, str]:
        """(seconds of silence allowed, step, phase) of a rank, running or dead, by its last heartbeat."""
        line = self.files[rank].read_text() if self.files[rank].exists() else ""
        if line != self._seen[rank][0]:
            self._seen[rank] = line, self._clock
        limit, step, phase, *_ = (self._seen[rank][0] or "inf 0 start").split()
        return float(limit), int(step), phase

    def all_silent(self, ranks: Collection[int]) -> bool:
        """Read the heartbeats of the running ranks; return whether all have been silent beyond their limits."""
        now = time.monotonic()
        self._clock += min(now - self._looked_at, MAX_POLL_GAP)
        self._looked_at = now
        limits = {rank: self.read(rank)[0] for rank in ranks}
        return all(self.silent_seconds(rank) > limit for rank, limit in limits.items())

    def describe(self, rank: int) -> str:
        """Phase and step of a rank by its last heartbeat; "" before the first."""
        _, step, phase = self.read(rank)
        return f" in phase '{phase}' after step {step}" if self._seen[rank][0] else ""

    def silent_seconds(self, rank: int) -> float:
        """How long ago the last heartbeat of a rank came."""
        return self._clock - self._seen[rank][1]

    def find_hung(self, processes: Mapping[int, Child]) -> tuple[str, str]:
        """What is said about the rank that the others wait for, and the stacks of all, of the processes by rank.

        It is one that does not answer, else one outside a collective, else one with another stack than most, else the
        one at the earliest step. When all wait in collectives it may be on another machine, whose watchdog names it.
        """
        files = {
            rank: file for rank in processes if (file := stacks_file(self.files[rank])).exists()
        }
        for rank in files:
            processes[rank].send(signal.SIGQUIT)
        time.sleep(DUMP_SECONDS if files else 0)
        answers = {rank: files[rank].read_text() if rank in files else "" for rank in processes}
        places = {
            rank: split_threads(stacks)[-1] for rank, stacks in answers.items()
        }  # the main thread is the last
        count = Counter(places.values())

        def order(rank: int) -> tuple[bool, bool, int, int]:
            stacks = answers[rank]
            return (
                bool(stacks),
                waits_in_collective(stacks),
                count[places[rank]],
                self.read(rank)[1],
            )

        rank = min(processes, key=order)
        what = f"rank {rank} hangs"
        if self._has_others and waits_in_collective(answers[rank]):
            what = f"all ranks of this machine wait, perhaps for another machine's; rank {rank} is"
        silent = "no answer: stopped by a signal, or in a system call that does not end\n"
        return (
            f"{what}, silent for {self.silent_seconds(rank):.0f} s{self.describe(rank)}",
            "".join(f"rank {rank}:\n{stacks or silent}\n" for rank, stacks in answers.items()),
        )


def stacks_file(heartbeat: Path) -> Path:
    """Where a rank dumps its stacks."""
    return heartbeat.with_suffix(".stacks")


def waits_in_collective(stacks: str) -> bool:
    """Whether one of the threads' innermost calls belongs to torch.distributed or to this package's distributed."""
    return any(
        "/distributed/" in "".join(thread.splitlines()[:3]) for thread in split_threads(stacks)
    )


def split_threads(stacks: str) -> list[str]:
    """The stack of each thread, innermost call first, without its address."""
    return [thread.strip() for thread in re.split(r"^.*hread 0x.*$", stacks, flags=re.MULTILINE)]
