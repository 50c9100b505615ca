"""Student's t-test of paired differences (Student 1908): whether runs of the same seeds differ by more than chance.

Of few pairs it can say more than a sign or permutation test, whose smallest p-value for three pairs is 0.25; for that
it assumes that the differences are normal.
"""

import math
import statistics
from collections.abc import Sequence


def compute_p_value(differences: Sequence[float]) -> float | None:
    """Two-sided p-value of the hypothesis that their mean is 0; None of fewer than two."""
    if len(differences) < 2:
        return None
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if not deviation:
        return 0.0 if mean else 1.0
    return two_sided(mean / deviation * math.sqrt(len(differences)), len(differences) - 1)


def two_sided(t: float, freedom: int) -> float:
    """P(|T| >= |t|) of Student's distribution with a whole number of degrees of freedom.

    Finite sums: Abramowitz & Stegun 1964, 26.7.3 and 26.7.4.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cos, odd = math.cos(angle), freedom % 2
    term, total = (cos, 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cos * cos * (k - 1) / k
    total *= math.sin(angle)
    return max(0.0, 1 - (2 / math.pi * (angle + total) if odd else total))
