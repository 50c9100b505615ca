"""Detect loss and gradient-norm spikes.

A value is a spike if its log is far above the median of recent steps, measured in median absolute
deviations. Logs, because gradient norms are roughly log-normal; medians, because they are robust to
trends and outliers.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WINDOW = 128  # steps
MIN_STEPS = 64  # steps before detection starts
# A spike is both: this many standard deviations (of a normal distribution with the same MAD) above the median, ...
DEVIATIONS = 15.0
# ... and this many times the median, because a calm window has hardly any deviation.
LOSS_RATIO, GRAD_NORM_RATIO = 1.5, 3.0
_MAD_TO_STD = 1.4826
_TINY = 1e-30  # in place of a loss of 0


@dataclass(slots=True)
class RecentSteps:
    """(loss, gradient norm) of the last accepted steps, oldest first."""

    values: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def load(self, values: Iterable[Sequence[float]]) -> None:
        """Load a saved window."""
        self.values.clear()
        self.values.extend((loss, grad_norm) for loss, grad_norm in values)

    def limits(self) -> tuple[float, float]:
        """The largest loss and gradient norm that the next step may have; infinite while there are too few steps."""
        if len(self.values) < MIN_STEPS:
            return math.inf, math.inf
        losses, grad_norms = zip(*self.values, strict=True)
        return upper_limit(losses, LOSS_RATIO), upper_limit(grad_norms, GRAD_NORM_RATIO)


def upper_limit(values: Sequence[float], min_ratio: float) -> float:
    """What lies DEVIATIONS robust standard deviations above the median, but at least `min_ratio` times the median."""
    logs = sorted(math.log(max(value, _TINY)) for value in values)
    middle = len(logs) // 2
    deviation = sorted(abs(log - logs[middle]) for log in logs)[middle]
    return math.exp(logs[middle] + max(DEVIATIONS * _MAD_TO_STD * deviation, math.log(min_ratio)))
