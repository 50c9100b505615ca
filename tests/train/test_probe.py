"""The micro-batch: what is tried, and which of the measured sizes is taken."""

import pytest

from megatoken.train.probe import candidate_sizes, pick_micro_batch


@pytest.mark.parametrize(
    ("rates", "picked"),
    [
        ({1: 0.0}, 1),  # nothing measured: there was no choice
        ({1: 100.0, 2: 99.0, 4: 98.0}, 4),  # within the noise: the fewest forwards
        ({1: 100.0, 2: 120.0, 4: 110.0}, 2),  # clearly faster
        ({1: 50.0, 2: 90.0, 4: 100.0}, 4),
    ],
)
def test_larger_size_is_taken_unless_smaller_one_is_clearly_faster(rates: dict[int, float], picked: int) -> None:
    assert pick_micro_batch(rates) == picked


def test_sizes_divide_the_batch_and_stay_within_a_cpus_caches() -> None:
    assert candidate_sizes(16, 256, "cpu") == [1, 2, 4, 8, 16]
    assert candidate_sizes(48, 1024, "cpu") == [1, 2, 3, 6]
    assert candidate_sizes(12, 1024, "cuda") == [1, 2, 3, 6, 12]
    assert candidate_sizes(7, 1 << 20, "cpu") == [1]
