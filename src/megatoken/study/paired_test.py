"""Student's t-test of paired differences (Student 1908), between runs with the same seeds.

It assumes that differences are normally distributed, so a few pairs can suffice; with three pairs,
a sign or permutation test cannot give p < 0.25.
"""

import math
import statistics
from collections.abc import Sequence


def compute_p_value(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of the hypothesis that the mean difference is 0.

    Return None for fewer than two differences.
    """
    if len(differences) < 2:
        return None
    mean = statistics.fmean(differences)
    deviation = statistics.stdev(differences)
    if not deviation:
        return 0.0 if mean else 1.0
    return two_sided(mean / deviation * math.sqrt(len(differences)), len(differences) - 1)


def two_sided(t: float, freedom: int) -> float:
    """Return P(|T| >= |t|) for Student's distribution with `freedom` degrees of freedom.

    Computes the finite sums 26.7.3 and 26.7.4 of Abramowitz & Stegun 1964.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cos = math.cos(angle)
    is_odd = freedom % 2
    term = cos if is_odd else 1.0
    total = 0.0
    for k in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= cos * cos * (k - 1) / k
    total *= math.sin(angle)
    if is_odd:
        total = 2 / math.pi * (angle + total)
    return max(0.0, 1 - total)
