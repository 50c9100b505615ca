"""The endless lists of windows that batches are cut from: which window entry i is, as a function of i alone."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatoken.data.permutation import GOLDEN, feistel_permutation, make_key

_CHUNK_WINDOWS = (
    4096  # an order is computed for this many entries at a time, to spread numpy's overhead
)
_FIRST_SOURCE_KEY = 2**32  # keys of sources lie above those of epochs
_ONE = 2**64  # the interval [0, 1) in integers


class WindowOrder(Protocol):
    """An order of the windows [0, n)."""

    def windows(self, first: int, size: int) -> NDArray[np.int64]:
        """Entries [first, first + size) of the endless list."""
        ...


class SequentialOrder:
    """Windows 0, 1, ..., again from 0 after the last."""

    def __init__(self, n_windows: int) -> None:
        self._n_windows = n_windows

    def windows(self, first: int, size: int) -> NDArray[np.int64]:
        """Entries [first, first + size) of the endless list."""
        return np.arange(first, first + size, dtype=np.int64) % self._n_windows


class ShuffledOrder:
    """Epoch e visits every window once, in an order keyed by (seed, e)."""

    def __init__(self, n_windows: int, seed: int) -> None:
        self._n_windows, self._seed = n_windows, seed

    def windows(self, first: int, size: int) -> NDArray[np.int64]:
        """Entries [first, first + size) of the endless list."""
        parts = [np.empty(0, np.int64)]
        while size:
            epoch, start = divmod(first, self._n_windows)
            index = np.arange(start, min(start + size, self._n_windows), dtype=np.int64)
            parts.append(feistel_permutation(index, self._n_windows, make_key(self._seed, epoch)))
            first, size = first + len(index), size - len(index)
        return np.concatenate(parts)


class MixedOrder:
    """Windows of several sources, each shuffled and repeated on its own, in the proportion of their weights.

    Entry i is of the source in whose share of [0, 1) the number frac(i x golden ratio + a key) lies (Weyl 1916). The
    points spread so evenly that among any entries in a row each source has its share to within a few. How many of
    the first i entries are of a source is a sum of floors, which takes as many steps as Euclid's algorithm.
    """

    def __init__(self, n_windows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        *_, total = shares = list(accumulate(map(Fraction, weights)))
        self._share_ends = [0, *(round(share / total * _ONE) for share in shares)]
        self._key = make_key(seed, _FIRST_SOURCE_KEY - 1)
        self._sources = [
            ShuffledOrder(count, make_key(seed, _FIRST_SOURCE_KEY + number))
            for number, count in enumerate(n_windows)
        ]
        self._first_windows = np.cumsum([0, *n_windows])

    def windows(self, first: int, size: int) -> NDArray[np.int64]:
        """Entries [first, first + size) of the endless list."""
        index = np.arange(size, dtype=np.uint64)
        points = index * np.uint64(GOLDEN) + np.uint64((first * GOLDEN + self._key) % _ONE)
        sources = np.searchsorted(np.array(self._share_ends[1:-1], np.uint64), points, side="right")
        drawn_before = [
            self._count_below(first, end) for end in self._share_ends
        ]  # of the sources up to each end
        out = np.empty(size, np.int64)
        for number, source in enumerate(self._sources):
            chosen = np.flatnonzero(sources == number)
            start = drawn_before[number + 1] - drawn_before[number]
            out[chosen] = source.windows(start, len(chosen)) + self._first_windows[number]
        return out

    def _count_below(self, count: int, end: int) -> int:
        """How many of the first `count` points, in units of 2**-64, are below `end`: x mod 2**64 < end is
        floor(x / 2**64) - floor((x - end) / 2**64)."""
        key = self._key
        return (
            floor_sum(count, _ONE, GOLDEN, key)
            - floor_sum(count, _ONE, GOLDEN, key + _ONE - end)
            + count
        )


class CachedOrder:
    """Another order, of which the chunk that was last asked for is kept."""

    def __init__(self, order: WindowOrder, chunk: int) -> None:
        self._order, self._size = order, min(_CHUNK_WINDOWS, chunk)
        self._chunk: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def windows(self, first: int, size: int) -> NDArray[np.int64]:
        """Entries [first, first + size) of the endless list."""
        assert first >= 0
        per_chunk = self._size
        parts = []
        for number in range(first // per_chunk, (first + size - 1) // per_chunk + 1):
            chunk = self._chunk  # read once: another thread may replace it
            if chunk[0] != number:
                chunk = self._chunk = (number, self._order.windows(number * per_chunk, per_chunk))
            parts.append(
                chunk[1][max(0, first - number * per_chunk) : first + size - number * per_chunk]
            )
        return np.concatenate(parts)


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of floor((a k + b) / m) over k in [0, n), for a, b >= 0, in O(log m) steps as Euclid's algorithm."""
    total = 0
    while n:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        highest = a * n + b  # lattice points below the line, counted along the other axis from here
        if highest < m:
            break
        n, m, a, b = highest // m, a, m, highest % m
    return total
