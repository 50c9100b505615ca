"""Timing of calls: how often each is called."""

import time

import pytest

from megatoken.base.system.timing import time_calls


@pytest.mark.parametrize(("is_warm", "calls"), [(False, 2 + 3), (True, 3)])
def test_a_long_call_that_is_warm_is_called_no_more_than_it_is_timed(is_warm: bool, calls: int):
    called = []

    def wait():
        called.append(0)
        time.sleep(0.02)

    timings = time_calls(
        {"wait": wait}, repeats=50, longest=0.0, is_warm=is_warm, synchronize=lambda: None
    )
    assert len(called) == calls
    assert len(timings["wait"].seconds) == 3
