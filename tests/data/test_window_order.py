"""Orders of windows: exact shares of several sources, each in its own permutation, at any entry."""

import numpy as np
import pytest

from megatoken.data.window_order import (
    CachedOrder,
    MixedOrder,
    SequentialOrder,
    ShuffledOrder,
    floor_sum,
)

SIZES, WEIGHTS = (5000, 37, 1), (0.6, 0.3, 0.1)


def test_floor_sum_is_the_sum_of_floors():
    rng = np.random.default_rng(0)
    for n, m, a, b in rng.integers(1, 60, (500, 4)).tolist():
        assert floor_sum(n, m, a, b) == sum((a * k + b) // m for k in range(n))


def sources_of(windows: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(SIZES), windows, side="right")


@pytest.mark.parametrize("seed", [0, 1337])
def test_every_stretch_has_the_shares_to_within_a_few(seed: int):
    found = sources_of(MixedOrder(SIZES, WEIGHTS, seed).windows(0, 20_000))
    for number, weight in enumerate(WEIGHTS):
        counts = np.concatenate([[0], np.cumsum(found == number)])
        excess = counts - weight * np.arange(len(counts))
        assert excess.max() - excess.min() < 5


def test_each_source_is_shuffled_and_repeated_on_its_own():
    windows = MixedOrder(SIZES, WEIGHTS, 3).windows(0, 30_000)
    found = sources_of(windows)
    for number, size in enumerate(SIZES):
        order = windows[found == number] - sum(SIZES[:number])
        epochs = order[: len(order) // size * size].reshape(-1, size)
        assert (np.sort(epochs) == np.arange(size)).all()
        if number == 1:
            assert not np.array_equal(epochs[0], epochs[1])
        if size > 1:
            assert not np.array_equal(epochs[0], np.arange(size))


def test_entries_do_not_depend_on_where_one_begins():
    order, chunked = MixedOrder(SIZES, WEIGHTS, 9), CachedOrder(MixedOrder(SIZES, WEIGHTS, 9), 64)
    for origin in (0, 10**12):
        whole = order.windows(origin, 1000)
        for first, size in ((0, 1), (1, 999), (500, 300), (999, 1), (63, 130)):
            for each in (order, chunked):
                windows = each.windows(origin + first, size)
                assert np.array_equal(windows, whole[first : first + size])
        counts = np.bincount(sources_of(whole), minlength=3)
        assert counts == pytest.approx([600, 300, 100], abs=4)


def test_seeds_differ_and_weights_need_no_sum():
    one, other = (MixedOrder(SIZES, WEIGHTS, seed).windows(0, 100) for seed in (1, 2))
    assert not np.array_equal(one, other)
    assert np.array_equal(one, MixedOrder(SIZES, (6, 3, 1), 1).windows(0, 100))


def test_sequential_repeats():
    assert SequentialOrder(4).windows(3, 6).tolist() == [3, 0, 1, 2, 3, 0]
    assert sorted(ShuffledOrder(4, 0).windows(4, 4).tolist()) == [0, 1, 2, 3]
