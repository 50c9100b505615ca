"""Detect ranks that are slower than others at loading data or computing.

A step takes equally long on all ranks, because they wait for the slowest one. So each rank times
two phases in which it does not wait for others: `data`, the wait for the batch, and `compute`, from
a step's first collective until the rank's gradients are ready to be reduced. If weights are
sharded, ranks wait for each other at every layer, and only `data` is meaningful.
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
MIN_SECONDS = 0.005  # per step; smaller differences are noise


@dataclass
class PhaseTimer:
    """Context manager that times one phase in each of the last WINDOW steps.

    On CUDA it records events, so that the host does not wait.
    """

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
        """Return the seconds of each step since the last call. These steps must be finished."""
        if self.device_type == "cuda":
            seconds = [1e-3 * begin.elapsed_time(end) for begin, end in self._steps]
        else:
            seconds = [end - begin for begin, end in self._steps]
        self._steps.clear()
        return seconds

    def __len__(self) -> int:
        return len(self._steps)


@dataclass(frozen=True)
class Straggler:
    """A rank that takes `ratio` times as long for a phase as the others do.

    seconds, others: seconds per step of this rank, and the median of the others.
    """

    rank: int
    phase: str
    ratio: float
    seconds: float
    others: float

    def __str__(self) -> str:
        times = f"{1e3 * self.seconds:.3g} ms per step, others {1e3 * self.others:.3g}"
        return f"rank {self.rank} is {self.ratio:.1f} times as slow in {self.phase}: {times}"


class StragglerDetector:
    """Compares the phases of all ranks every WINDOW steps."""

    def __init__(self, comm: Comm, device_type: str) -> None:
        self._comm = comm
        self.data = PhaseTimer("cpu", not comm.is_single_process)
        self.compute = PhaseTimer(device_type, not comm.is_single_process)
        self._slow: set[tuple[int, str]] = set()

    def find(self) -> list[Straggler]:
        """Return the ranks that are slow now and were not at the last comparison.

        Returns an empty list until WINDOW steps have been timed. All ranks must call it after the
        same steps, which the device must have finished.
        """
        if len(self.compute) < WINDOW:
            return []
        half = WINDOW // 2
        medians = {}
        for phase, timer in (("data", self.data), ("compute", self.compute)):
            seconds = timer.read()
            medians[phase] = (median(seconds[:half]), median(seconds[half:]))
        stragglers = find_stragglers(self._comm.gather(medians))
        new = [slow for slow in stragglers if (slow.rank, slow.phase) not in self._slow]
        self._slow = {(slow.rank, slow.phase) for slow in stragglers}
        return new


def find_stragglers(reports: Sequence[Mapping[str, Sequence[float]]]) -> list[Straggler]:
    """Return a Straggler for each rank and phase that is much slower than on the other ranks.

    reports: for every rank, a dict from phase to seconds per step, with one number for each half of
    the window. A rank must be slow in both halves.
    """
    stragglers = []
    for rank, report in enumerate(reports):
        other_reports = [*reports[:rank], *reports[rank + 1 :]]
        for phase, seconds in report.items():
            others = [
                median(half)
                for half in zip(*(other[phase] for other in other_reports), strict=True)
            ]
            if all(
                own > RATIO * other and own - other > MIN_SECONDS
                for own, other in zip(seconds, others, strict=True)
            ):
                ratio = seconds[-1] / max(others[-1], 1e-6)
                stragglers.append(Straggler(rank, phase, ratio, seconds[-1], others[-1]))
    return stragglers
