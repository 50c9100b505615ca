"""Orders of windows: exact shares of several sources, each in its own permutation, at any place."""

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
    found, first = sources_of(windows), np.concatenate([[0], np.cumsum(SIZES)])
    orders = [windows[found == number] - first[number] for number in range(3)]
    for order, size in zip(orders, SIZES, strict=True):
        for epoch in range(len(order) // size):
            visited = order[epoch * size : (epoch + 1) * size]
            assert np.array_equal(np.sort(visited), np.arange(size))
    assert not np.array_equal(orders[1][:37], orders[1][37:74])
    assert not np.array_equal(orders[0][:5000], np.arange(5000))


def test_entries_do_not_depend_on_where_one_begins():
    order, chunked = MixedOrder(SIZES, WEIGHTS, 9), CachedOrder(MixedOrder(SIZES, WEIGHTS, 9), 64)
    whole = order.windows(0, 1000)
    for first, size in ((0, 1), (1, 999), (500, 300), (999, 1), (63, 130)):
        assert np.array_equal(order.windows(first, size), whole[first : first + size])
        assert np.array_equal(chunked.windows(first, size), whole[first : first + size])
    far = order.windows(10**12, 200)
    assert np.array_equal(order.windows(10**12 + 100, 100), far[100:])
    assert np.bincount(sources_of(far), minlength=3) == pytest.approx([120, 60, 20], abs=4)


def test_seeds_differ_and_weights_need_no_sum():
    one, other = (MixedOrder(SIZES, WEIGHTS, seed).windows(0, 100) for seed in (1, 2))
    assert not np.array_equal(one, other)
    assert np.array_equal(one, MixedOrder(SIZES, (6, 3, 1), 1).windows(0, 100))


def test_sequential_repeats():
    assert SequentialOrder(4).windows(3, 6).tolist() == [3, 0, 1, 2, 3, 0]
    assert sorted(ShuffledOrder(4, 0).windows(4, 4).tolist()) == [0, 1, 2, 3]
