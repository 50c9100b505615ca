"""Find ranks that hang by the heartbeats that they write (heartbeat.py).

A rank that waits for a hung rank is silent as well. So a run counts as hung once every rank has
been silent for longer than its limit. The hung rank is then found by the stacks: it is not waiting
in a collective, or is waiting in a different one than the others.
"""

import re
import signal
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from megatoken.base.system.process import Child
from megatoken.distributed.heartbeat import stacks_file

DUMP_SECONDS = 1.0  # to wait for ranks to dump their stacks
MAX_POLL_GAP = 1.0  # between two polls; if it was longer, the launcher itself was suspended


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

        Call it often: the time between two calls counts as at most MAX_POLL_GAP seconds of silence.
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
        main_stacks = {rank: split_threads(text)[-1] for rank, text in stacks.items()}
        counts = Counter(main_stacks.values())

        def order(rank: int) -> tuple[bool, bool, int, int]:
            text = stacks[rank]
            return (
                bool(text),
                waits_in_collective(text),
                counts[main_stacks[rank]],
                self.read(rank)[1],
            )

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


def waits_in_collective(stacks: str) -> bool:
    """Return whether a dump has a thread inside torch.distributed or megatoken.distributed."""
    threads = split_threads(stacks)
    return any("/distributed/" in "".join(thread.splitlines()[:3]) for thread in threads)


def split_threads(stacks: str) -> list[str]:
    """Split a dump into one stack per thread, without the lines that begin each stack.

    A stack begins with the innermost call.
    """
    return [thread.strip() for thread in re.split(r"^.*hread 0x.*$", stacks, flags=re.MULTILINE)]
