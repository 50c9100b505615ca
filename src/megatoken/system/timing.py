"""Interleaved timing: calls are timed in rounds A B C A B C, so that all of them see the same noise of the machine."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

MIN_SECONDS = 0.01  # of a measurement: shorter ones are mostly the clock's error
WARM_SECONDS = 1.0  # a first call that took longer needs no second warm-up


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each repeat, in the order measured."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile; the extremes of fewer than four repeats."""
        if len(self.seconds) < 4:
            return min(self.seconds), max(self.seconds)
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def rate(self, amount: float) -> dict[str, Any]:
        """`amount` per second for a record: median, quartiles (low, high), number of repeats."""
        low, high = self.quartiles
        rates = {"median": amount / self.median, "low": amount / high, "high": amount / low}
        return {**rates, "repeats": len(self.seconds)}


def time_interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 1,
    before: Callable[[str], object] = lambda name: None,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time each call `repeats` times in rounds, after `warmup` untimed rounds.

    before: called untimed with a call's name before it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + repeats):
        for name, call in calls.items():
            before(name)
            seconds[name].append(time_once(call, synchronize))
    return {name: Timing(tuple(values[warmup:])) for name, values in seconds.items()}


def time_calls(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    longest: float,
    fewest: int = 3,
    is_warm: bool = False,
    before: Callable[[str], object] = lambda name: None,
    synchronize: Callable[[], None],
) -> dict[str, Timing]:
    """Seconds of one call of each, warm and interleaved; a short call is repeated within its measurement.

    There are fewer rounds, but at least `fewest`, where `repeats` of them would take more than `longest` seconds.
    is_warm: each has been called before, so that a long call's first measurement here is its first round.
    """
    counts: dict[str, int] = {}
    first: dict[str, tuple[float, ...]] = {}
    round_seconds = 0.0
    for name, call in calls.items():
        before(name)
        once = time_once(call, synchronize)
        if once < WARM_SECONDS and not is_warm:
            once = time_once(call, synchronize)
        counts[name] = max(1, math.ceil(MIN_SECONDS / once))
        first[name] = (once,) if is_warm and counts[name] == 1 else ()
        round_seconds += counts[name] * once

    def repeat(name: str) -> None:
        for _ in range(counts[name]):
            calls[name]()

    rounds = min(repeats, max(fewest, int(longest / round_seconds))) - min(map(len, first.values()))
    repeated = {name: partial(repeat, name) for name in calls}
    timings = time_interleaved(
        repeated, repeats=rounds, warmup=0, before=before, synchronize=synchronize
    )
    return {
        name: Timing((*first[name], *(s / counts[name] for s in timing.seconds)))
        for name, timing in timings.items()
    }


def time_once(call: Callable[[], object], synchronize: Callable[[], None] = lambda: None) -> float:
    """Seconds of a single call."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start
