"""Time things side by side: contenders take turns, so that all of them see the same machine.

Out: a Timing each, as median and quartiles, because shared machines are noisy and one number hides it.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

SHORTEST_SECONDS = 0.01  # of a turn: shorter ones are mostly clock
WARM_SECONDS = 1.0  # a first call that took longer warmed up enough


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each repeat of one thing, in the order measured."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The middle half of the repeats lies between these; the extremes when there are fewer than four."""
        if len(self.seconds) < 4:
            return min(self.seconds), max(self.seconds)
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        low, high = self.quartiles
        return (high - low) / self.median

    def rate(self, amount: float) -> dict[str, Any]:
        """`amount` a second as a record says it: median, quartiles (low, high) and the number of repeats."""
        low, high = self.quartiles
        return {
            "median": amount / self.median,
            "low": amount / high,
            "high": amount / low,
            "repeats": len(self.seconds),
        }


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 1,
    before: Callable[[str], object] = lambda name: None,
    synchronize: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda said: None,
) -> dict[str, Timing]:
    """Time each call `repeats` times, A B C A B C ..., after `warmup` untimed rounds; `tell` hears how far it is.

    before: done, untimed, with a call's name when its turn comes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warmup, repeats):
        tell(f"round {turn + 1} of {repeats}" if turn >= 0 else "warming up")
        for name, call in calls.items():
            before(name)
            synchronize()
            began = time.perf_counter()
            call()
            synchronize()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def time_calls(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    longest: float = math.inf,
    fewest: int = 2,
    before: Callable[[str], object] = lambda name: None,
    synchronize: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda said: None,
) -> dict[str, Timing]:
    """Seconds of one call of each, in turns, warm: a short call is repeated within its turn.

    There are fewer rounds, but not less than `fewest`, where `repeats` of them would take more than `longest` seconds.
    """
    times: dict[str, int] = {}
    seconds = 0.0  # of one turn of all
    tell("warming up")
    for name, call in calls.items():
        before(name)
        once = time_once(call, synchronize)
        if once < WARM_SECONDS:
            once = time_once(call, synchronize)
        times[name] = max(1, math.ceil(SHORTEST_SECONDS / once))
        seconds += times[name] * once
    rounds = min(repeats, max(fewest, int(min(longest / seconds, repeats))))
    turns = {name: partial(_repeat, call, times[name]) for name, call in calls.items()}
    measured = take_turns(turns, repeats=rounds, warmup=0, before=before, synchronize=synchronize, tell=tell)
    return {name: Timing(tuple(s / times[name] for s in timing.seconds)) for name, timing in measured.items()}


def time_once(call: Callable[[], object], synchronize: Callable[[], None] = lambda: None) -> float:
    """Seconds of a single call."""
    synchronize()
    began = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - began


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()
