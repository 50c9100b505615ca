"""The limit above which a loss or gradient norm is a spike."""

import math

import pytest

from megatoken.train.spikes import DEVIATIONS, MAD_TO_STD, upper_limit


def test_the_limit_is_measured_in_median_deviations():
    values = [1.0, 16.0, 2.0, 8.0, 2.0]  # logs to base 2: 0, 4, 1, 3, 1, so median and MAD are 1
    assert math.log2(upper_limit(values, 1.5)) == pytest.approx(1 + DEVIATIONS * MAD_TO_STD)
    assert upper_limit([2.0] * 5, 1.5) == pytest.approx(3.0)
