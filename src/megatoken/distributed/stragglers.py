"""Finds ranks that are slower than the others, by the time that each spends alone: waiting for data, or computing.

A step takes as long on every rank, because they wait for the slowest. So each measures what lies between collectives:
`data` is the wait for the batch, `compute` goes from the first collective of a step until the rank has its gradients
and waits for those of the others. Where weights are sharded every layer waits for the others, so only `data` tells.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from megatoken.distributed.comm import Comm

WINDOW = 50  # steps between comparisons; a rank must be slow in both halves
RATIO = 1.5
MIN_SECONDS = 0.005  # a step; what differs by less is noise


@dataclass(slots=True)
class PhaseTimer:
    """Times one phase of the last WINDOW steps; on CUDA by events, so that the host never waits."""

    device_type: str = "cpu"
    enabled: bool = False
    _begin: Any = None
    _steps: deque[tuple[Any, Any]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def __enter__(self) -> None:
        if self.enabled:
            self._begin = self._now()

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            self._steps.append((self._begin, self._now()))

    def _now(self) -> Any:
        if self.device_type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def read(self) -> list[float]:
        """Seconds of the steps so far, which have ended on the device; empties the timer."""
        on_cuda = self.device_type == "cuda"
        seconds = [
            1e-3 * begin.elapsed_time(end) if on_cuda else end - begin for begin, end in self._steps
        ]
        self._steps.clear()
        return seconds

    def __len__(self) -> int:
        return len(self._steps)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that takes `ratio` times as long in a phase as the median of the others; seconds of a step."""

    rank: int
    phase: str
    ratio: float
    seconds: float
    others: float

    def __str__(self) -> str:
        times = f"{1e3 * self.seconds:.3g} ms a step against {1e3 * self.others:.3g}"
        return f"rank {self.rank} takes {self.ratio:.1f} times as long as the others in {self.phase}: {times}"


class StragglerDetector:
    """Compares the phases of all ranks every WINDOW steps; a rank is reported once while it stays slow."""

    def __init__(self, comm: Comm, device_type: str) -> None:
        self._comm, several = comm, not comm.is_single_process
        self.data, self.compute = PhaseTimer("cpu", several), PhaseTimer(device_type, several)
        self._slow: set[tuple[int, str]] = set()

    def find(self) -> list[Straggler]:
        """Those that have become slow. All ranks must call it after the same steps, which have ended on the device."""
        if len(self.compute) < WINDOW:
            return []
        half, own = WINDOW // 2, {}
        for phase, timer in (("data", self.data), ("compute", self.compute)):
            seconds = timer.read()
            own[phase] = median(seconds[:half]), median(seconds[half:])
        slow = find_stragglers(self._comm.gather(own))
        new = [each for each in slow if (each.rank, each.phase) not in self._slow]
        self._slow = {(each.rank, each.phase) for each in slow}
        return new


def find_stragglers(reports: Sequence[Mapping[str, Sequence[float]]]) -> list[Straggler]:
    """Ranks that are slow in every part of the window, given each rank's seconds by phase: one number a part."""
    found = []
    for rank, own in enumerate(reports):
        for phase, seconds in own.items():
            rest = [report[phase] for number, report in enumerate(reports) if number != rank]
            others = [median(part) for part in zip(*rest, strict=True)]
            pairs = list(zip(seconds, others, strict=True))
            if all(mine > RATIO * theirs and mine - theirs > MIN_SECONDS for mine, theirs in pairs):
                mine, theirs = pairs[-1]
                found.append(Straggler(rank, phase, mine / max(theirs, 1e-6), mine, theirs))
    return found
