"""Orders of windows: exact shares of several sources, each in its own permutation, at any entry."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.data.window_order import (
    CachedOrder,
    MixedOrder,
    SequentialOrder,
    ShuffledOrder,
    floor_sum,
    make_shuffled,
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


@pytest.mark.parametrize("span", [None, (60, 7)])
def test_each_source_is_shuffled_and_repeated_on_its_own(span: tuple[int, int] | None):
    windows = MixedOrder(SIZES, WEIGHTS, 3, span).windows(0, 30_000)
    found = sources_of(windows)
    for number, size in enumerate(SIZES):
        order = windows[found == number] - sum(SIZES[:number])
        epochs = order[: len(order) // size * size].reshape(-1, size)
        assert (np.sort(epochs) == np.arange(size)).all()
        if number == 1:
            assert not np.array_equal(epochs[0], epochs[1])
        if size > 1:
            assert not np.array_equal(epochs[0], np.arange(size))


@pytest.mark.parametrize("span", [None, (60, 7)])
def test_entries_do_not_depend_on_where_one_begins(span: tuple[int, int] | None):
    order = MixedOrder(SIZES, WEIGHTS, 9, span)
    chunked = CachedOrder(order, 64)
    for origin in (0, 10**12):
        whole = order.windows(origin, 1000)
        for first, size in ((0, 1), (1, 999), (500, 300), (999, 1), (63, 130)):
            for each in (order, chunked):
                windows = each.windows(origin + first, size)
                assert np.array_equal(windows, whole[first : first + size])
        counts = np.bincount(sources_of(whole), minlength=3)
        assert counts == pytest.approx([600, 300, 100], abs=20 if span else 4)  # batches are sorted


def test_seeds_differ_and_weights_need_no_sum():
    one, other = (MixedOrder(SIZES, WEIGHTS, seed).windows(0, 100) for seed in (1, 2))
    assert not np.array_equal(one, other)
    assert np.array_equal(one, MixedOrder(SIZES, (6, 3, 1), 1).windows(0, 100))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 30_000),
    st.sampled_from([24, 60, 512]),
    st.integers(1, 60),
    st.integers(0, 2**63),
)
def test_spans(n_windows: int, batch: int, longest: int, seed: int):
    """Every window once per epoch; each of three ranks reads only the spans of its own slots."""
    order = make_shuffled(n_windows, seed, (batch, longest))
    (size,), slots = order.span_windows, order.slots
    if isinstance(order, ShuffledOrder):
        assert n_windows < 512 + batch
        return
    n_spans = -(-n_windows // (slots * longest)) * slots
    assert size <= longest
    assert slots % batch == 0 <= slots < 512 + batch
    for epoch in range(2):
        windows = order.windows(epoch * n_windows, n_windows)
        assert np.array_equal(np.sort(windows), np.arange(n_windows))
        rank = (np.arange(n_windows) % batch) // (batch // 3)
        reads = len(np.unique(np.stack([rank, windows // size]), axis=1).T)
        n_moved = n_spans * size - n_windows
        assert reads <= n_windows // size + 1 + max(0, n_moved)
    in_use = [len(np.unique(order.windows(at, slots) // size)) for at in range(0, n_windows, slots)]
    assert max(in_use) <= slots


def test_spans_of_a_mixture_stay_with_their_ranks():
    """Each of 8 ranks reads little more than an eighth of the spans that are in use."""
    n_windows, batch, longest = (400_000, 250_000), 512, 64
    order = MixedOrder(n_windows, (0.7, 0.3), 5, (batch, longest))
    windows = order.windows(0, batch * 300).reshape(300, 8, -1)
    spans = windows // min(order.span_windows)
    each = [len(np.unique(spans[:, rank])) for rank in range(8)]
    assert sum(each) < 1.25 * len(np.unique(spans))


def test_sequential_repeats():
    assert SequentialOrder(4).windows(3, 6).tolist() == [3, 0, 1, 2, 3, 0]
    assert sorted(ShuffledOrder(4, 0).windows(4, 4).tolist()) == [0, 1, 2, 3]
