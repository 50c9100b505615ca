"""Detect loss and gradient-norm spikes.

A value is a spike if its log is far above the median of recent steps, measured in median absolute
deviations. Logs are used because gradient norms are roughly log-normal, and medians because they
are robust to trends and outliers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 128  # steps
MIN_STEPS = 64  # before detection starts
# A spike is at least this many standard deviations (of a normal distribution with the same MAD)
# above the median. It is also a multiple of the median, because a calm window hardly deviates.
DEVIATIONS = 15.0
LOSS_RATIO = 1.5
GRAD_NORM_RATIO = 3.0
MAD_TO_STD = 1.4826
SMALLEST = 1e-30  # in place of a value of 0
LARGEST_LOG = 709.0  # of a float


@dataclass(frozen=True)
class RecentSteps:
    """A window of the last accepted steps: a (loss, gradient norm) pair for each, oldest first."""

    values: tuple[tuple[float, float], ...] = ()

    def add(self, loss: float, grad_norm: float) -> "RecentSteps":
        """Return the window after another step."""
        return RecentSteps((*self.values, (loss, grad_norm))[-WINDOW:])

    def limits(self) -> tuple[float, float]:
        """Return the largest loss and the largest gradient norm that are not spikes.

        Both are infinite until the window has MIN_STEPS steps.
        """
        if len(self.values) < MIN_STEPS:
            return math.inf, math.inf
        losses, grad_norms = zip(*self.values, strict=True)
        return upper_limit(losses, LOSS_RATIO), upper_limit(grad_norms, GRAD_NORM_RATIO)


def upper_limit(values: Sequence[float], min_ratio: float) -> float:
    """Return the largest value that is not a spike, given the recent values.

    Its log lies DEVIATIONS standard deviations above the median log, with the deviation estimated
    from the median absolute deviation. It is at least `min_ratio` times the median. It is infinite
    if a value is negative, as losses of policies are, or if the median is 0.
    """
    middle = len(values) // 2
    if min(values) < 0 or sorted(values)[middle] == 0:
        return math.inf
    logs = np.sort(np.log(np.maximum(values, SMALLEST)))
    median = logs[middle]
    deviation = np.sort(abs(logs - median))[middle]
    limit = median + max(DEVIATIONS * MAD_TO_STD * deviation, math.log(min_ratio))
    return math.exp(min(limit, LARGEST_LOG))
