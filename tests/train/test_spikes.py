"""The limit above which a loss or gradient norm is a spike."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.train.spikes import DEVIATIONS, MAD_TO_STD, upper_limit


def test_the_limit_is_measured_in_median_deviations():
    values = [1.0, 16.0, 2.0, 8.0, 2.0]  # logs to base 2: 0, 4, 1, 3, 1, so median and MAD are 1
    assert math.log2(upper_limit(values, 1.5)) == pytest.approx(1 + DEVIATIONS * MAD_TO_STD)
    assert upper_limit([2.0] * 5, 1.5) == pytest.approx(3.0)


@settings(deadline=None)
@given(st.lists(st.floats(-1e38, 1e38), min_size=1, max_size=128))
def test_only_values_with_logarithms_have_a_limit(values: list[float]):
    limit = upper_limit(values, 1.5)
    if min(values) < 0 or sorted(values)[len(values) // 2] == 0:
        assert limit == math.inf
    else:
        assert limit >= min(1.49 * sorted(values)[len(values) // 2], 1e300)
