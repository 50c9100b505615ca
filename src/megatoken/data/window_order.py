"""Endless lists of windows, from which batches are cut. Entry i depends only on i."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from megatoken.data.permutation import GOLDEN, feistel_permutation, make_key
from megatoken.data.vocabulary import Ints

_CHUNK_WINDOWS = 4096  # windows computed at once, to amortize numpy's overhead
_FIRST_SOURCE_KEY = 2**32  # above the keys of epochs
_ONE = 2**64  # 1.0 in units of 2**-64


class WindowOrder(Protocol):
    """An endless list of window numbers, which goes through 0 to n - 1 again and again."""

    def windows(self, first: int, size: int) -> Ints:
        """Return entries [first, first + size) of the endless list."""
        ...


class SequentialOrder:
    """Windows 0, 1, ..., n - 1, 0, 1, ..."""

    def __init__(self, n_windows: int) -> None:
        self._n_windows = n_windows

    def windows(self, first: int, size: int) -> Ints:
        return np.arange(first, first + size, dtype=np.int64) % self._n_windows


class ShuffledOrder:
    """Every window once per epoch, in an order keyed by (seed, epoch)."""

    def __init__(self, n_windows: int, seed: int) -> None:
        self._n_windows = n_windows
        self._seed = seed

    def windows(self, first: int, size: int) -> Ints:
        parts = [np.empty(0, np.int64)]
        while size:
            epoch, start = divmod(first, self._n_windows)
            index = np.arange(start, min(start + size, self._n_windows), dtype=np.int64)
            parts.append(feistel_permutation(index, self._n_windows, make_key(self._seed, epoch)))
            first += len(index)
            size -= len(index)
        return np.concatenate(parts)


class MixedOrder:
    """Windows of several sources in proportion to their weights; each source is shuffled.

    The interval [0, 1) is divided among the sources by weight. Entry i comes from the source whose
    part contains the point frac(i x golden ratio + key) (Weyl 1916). These points are so evenly
    spread that in any stretch of entries, each source's share is right to within a few entries.

    Entry i takes the next window of its source, so it needs the number of earlier entries of that
    source. This is computed from i alone, as a sum of floors, in as few steps as Euclid's algorithm
    takes.
    """

    def __init__(self, n_windows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        ends = list(accumulate(map(Fraction, weights)))
        self._share_ends = [0, *(round(end / ends[-1] * _ONE) for end in ends)]
        self._key = make_key(seed, _FIRST_SOURCE_KEY - 1)
        self._sources = [
            ShuffledOrder(count, make_key(seed, _FIRST_SOURCE_KEY + number))
            for number, count in enumerate(n_windows)
        ]
        self._first_windows = np.cumsum([0, *n_windows])

    def windows(self, first: int, size: int) -> Ints:
        index = np.arange(size, dtype=np.uint64)
        points = index * np.uint64(GOLDEN) + np.uint64((first * GOLDEN + self._key) % _ONE)
        sources = np.searchsorted(np.array(self._share_ends[1:-1], np.uint64), points, side="right")
        drawn_before = [self._count_below(first, end) for end in self._share_ends]
        out = np.empty(size, np.int64)
        for number, source in enumerate(self._sources):
            chosen = np.flatnonzero(sources == number)
            start = drawn_before[number + 1] - drawn_before[number]
            out[chosen] = source.windows(start, len(chosen)) + self._first_windows[number]
        return out

    def _count_below(self, count: int, end: int) -> int:
        """Return how many of the first `count` entries have a point below `end`.

        Points and `end` are integers in units of 2**-64. The point of an entry is x mod 2**64 for
        x = i * GOLDEN + key. The difference floor(x / 2**64) - floor((x - end) / 2**64) is 1 if the
        point is below `end`, else 0, so the differences are summed.
        """
        above = floor_sum(count, _ONE, GOLDEN, self._key + _ONE - end)
        return floor_sum(count, _ONE, GOLDEN, self._key) - above + count


class CachedOrder:
    """Caches the most recently computed chunk of another order."""

    def __init__(self, order: WindowOrder, chunk: int) -> None:
        size = self._size = min(_CHUNK_WINDOWS, chunk)
        self._read = lru_cache(1)(lambda number: order.windows(number * size, size))

    def windows(self, first: int, size: int) -> Ints:
        assert first >= 0
        numbers = range(first // self._size, (first + size - 1) // self._size + 1)
        start = first - numbers[0] * self._size
        return np.concatenate([self._read(number) for number in numbers])[start : start + size]


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum of floor((a k + b) / m) over k in [0, n), for a, b >= 0, in O(log m) steps."""
    total = 0
    while n:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        highest = a * n + b  # from here, count lattice points along the other axis
        if highest < m:
            break
        n, m, a, b = highest // m, a, m, highest % m
    return total
