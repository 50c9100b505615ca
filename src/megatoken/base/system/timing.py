"""Time functions in turn, as in A B C A B C, so that noise of the machine affects all equally."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

MIN_SECONDS = 0.01  # of a measurement; the clock's error dominates shorter ones
WARM_SECONDS = 1.0  # a slower first call needs no second warm-up


@dataclass(frozen=True)
class Timing:
    """The seconds of each repeat of a function, in the order of measurement."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile; with fewer than four repeats, the minimum and maximum."""
        if len(self.seconds) < 4:
            return min(self.seconds), max(self.seconds)
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def rate(self, amount: float) -> dict[str, Any]:
        """Return a dict with the median and quartiles of `amount` per second, and the repeats."""
        low, high = self.quartiles
        return {
            "median": amount / self.median,
            "low": amount / high,
            "high": amount / low,
            "repeats": len(self.seconds),
        }


def time_interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 1,
    before: Callable[[str], object] = lambda name: None,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time functions in `repeats` rounds. Each round calls every function once.

    warmup: number of untimed rounds at the start. before: called with the function's name before
    each timed call. synchronize: waits for the device.
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
    """Time functions in rounds after warming them up, and return seconds per call.

    A function that takes less than MIN_SECONDS is called several times per measurement.

    repeats, longest, fewest: there are `repeats` rounds. If these would take more than `longest`
        seconds, there are fewer, but at least `fewest`.
    is_warm: whether each function was called before, so that its first call may be a measurement.
    before: called with the function's name before each measurement. synchronize: waits for the
        device.
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
    timings = time_interleaved(
        {name: partial(repeat, name) for name in calls},
        repeats=rounds,
        warmup=0,
        before=before,
        synchronize=synchronize,
    )
    return {
        name: Timing((*first[name], *(seconds / counts[name] for seconds in timing.seconds)))
        for name, timing in timings.items()
    }


def time_once(call: Callable[[], object], synchronize: Callable[[], None] = lambda: None) -> float:
    """Return how many seconds one call takes. synchronize: waits for the device."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start
