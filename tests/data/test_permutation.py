"""The keyed permutation is a bijection, the same everywhere, and looks like a shuffle."""

import numpy as np
import pytest

from megatoken.data.permutation import feistel_permutation, make_key

SIZES = [1, 2, 5, 10_000, *(2**power + offset for power in range(2, 15) for offset in (-1, 0, 1))]


@pytest.mark.parametrize("n", SIZES)
def test_bijection(n: int):
    for key in (0, 1, make_key(1337, 0), make_key(-(2**70), 2**40), 2**64 - 1):
        image = feistel_permutation(np.arange(n), n, key)
        assert image.dtype == np.int64
        assert np.array_equal(np.sort(image), np.arange(n))


def test_golden_values():
    """If these values change, the data order of every run changes."""
    assert make_key(0, 0) == 12035550249420947055
    assert make_key(1337, 2) == 15182249562775798649
    key = make_key(0, 0)
    image = feistel_permutation(np.arange(12), 12, key)
    assert str(image) == "[11  3  9  5  1  8  4  0  7  2  6 10]"
    key = make_key(1337, 2)
    image = feistel_permutation(np.arange(8), 1_000_003, key)
    assert str(image) == "[203183 629554 302648  64807 455166 119891 924504 441623]"
    image = feistel_permutation(np.array([0, 2**39, 2**40 - 1]), 2**40, make_key(42, 7))
    assert str(image) == "[247149086414 694771960454  73952433511]"
