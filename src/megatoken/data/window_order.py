"""Endless lists of windows, from which batches are cut. Entry i depends only on i."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from megatoken.data.permutation import GOLDEN, feistel_permutation, make_key
from megatoken.data.vocabulary import Ints

SPAN_TOKENS = 1 << 20  # consecutive tokens in a span, at most: 2 MiB of uint16
_SPANS = 512  # in use at a time, or as many as a batch has windows
_FEWEST_SPANS = 16  # of a source in a mixture
_CHUNK_WINDOWS = 4096  # windows computed at once, to amortize numpy's overhead
_FIRST_SOURCE_KEY = 2**32  # above the keys of epochs
_ONE = 2**64  # 1.0 in units of 2**-64


class WindowOrder(Protocol):
    """An endless list of window numbers, which goes through 0 to n - 1 again and again.

    span_windows: for each source, how many consecutive windows are used at about the same time.
    """

    span_windows: tuple[int, ...]

    def windows(self, first: int, size: int) -> Ints:
        """Return entries [first, first + size) of the endless list."""
        ...


class SequentialOrder:
    """Windows 0, 1, ..., n - 1, 0, 1, ..."""

    span_windows: tuple[int, ...] = (1,)

    def __init__(self, n_windows: int) -> None:
        self._n_windows = n_windows

    def windows(self, first: int, size: int) -> Ints:
        return np.arange(first, first + size, dtype=np.int64) % self._n_windows


class ShuffledOrder:
    """Every window once per epoch, in an order keyed by (seed, epoch)."""

    slots = 1
    span_windows: tuple[int, ...] = (1,)

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


class SpanOrder:
    """Every window once per epoch, such that windows used at about the same time are neighbors.

    The windows are cut into spans of G consecutive ones. K spans at a time are in use, each in a
    slot. Entry i takes a window from slot i mod K, and a slot takes another span once all G windows
    of its span were used. K is a multiple of the batch size, so that a row of the batch always
    takes from the same slots, and a process reads only the spans of its own rows. Spans are
    permuted among all slots, and windows within each span. At any time, the slots have used
    different numbers of windows, so only a few change spans in a batch.

    The formula describes an epoch of K x L x G entries, L spans per slot. Those that would be
    windows beyond the last one are mapped again, like in `feistel_permutation`; G and L are chosen
    such that there are few.
    """

    def __init__(self, n_windows: int, seed: int, slots: int, longest: int) -> None:
        """slots: K. longest: the most windows in a span."""
        self._n_windows = n_windows
        self._seed = seed
        self.slots = slots
        fewest = -(-n_windows // (slots * longest))
        sizes = {
            rows: -(-n_windows // (slots * rows)) for rows in range(fewest, fewest * 17 // 16 + 1)
        }
        self._rows = min(sizes, key=lambda rows: rows * sizes[rows])
        self._size = sizes[self._rows]
        self.span_windows: tuple[int, ...] = (self._size,)

    def windows(self, first: int, size: int) -> Ints:
        parts = [np.empty(0, np.int64)]
        while size:
            epoch, start = divmod(first, self._n_windows)
            key = make_key(self._seed, epoch)
            index = np.arange(start, min(start + size, self._n_windows), dtype=np.int64)
            first += len(index)
            size -= len(index)
            out = self._find(index, key)
            while (out >= self._n_windows).any():
                outside = out >= self._n_windows
                out[outside] = self._find(out[outside], key)
            parts.append(out)
        return np.concatenate(parts)

    def _find(self, index: Ints, key: int) -> Ints:
        """Return the windows of entries of an epoch; some may be beyond the last window."""
        turn, slot = np.divmod(index, self.slots)
        size = self._size
        fraction = slot.astype(np.uint64) * np.uint64(GOLDEN) >> np.uint64(32)  # in units of 2**-32
        used = (fraction * np.uint64(size) >> np.uint64(32)).astype(np.int64)
        row, in_span = np.divmod((turn + used) % (self._rows * size), size)
        span = feistel_permutation(row * self.slots + slot, self._rows * self.slots, key)
        windows: Ints = span * size + feistel_permutation(in_span, size, key ^ GOLDEN)
        return windows


def make_shuffled(
    n_windows: int, seed: int, span: tuple[int, int] | None, share: float = 1.0
) -> ShuffledOrder | SpanOrder:
    """Return the order of a source.

    span: batch size and longest span, for a SpanOrder. share: the source's part of each batch.
    """
    if span:
        batch_size, longest = span
        slots = batch_size * -(-_SPANS // batch_size)
        if share < 1:
            slots = max(_FEWEST_SPANS, round(share * slots))
        if n_windows > slots:
            return SpanOrder(n_windows, seed, slots, longest)
    return ShuffledOrder(n_windows, seed)


class MixedOrder:
    """Windows of several sources in proportion to their weights; each source has its own order.

    The interval [0, 1) is divided among the sources by weight. Entry i comes from the source whose
    part contains the point frac(i x golden ratio + key) (Weyl 1916). These points are so evenly
    spread that in any stretch of entries, each source's share is right to within a few entries.

    Entry i takes the next window of its source, so it needs the number of earlier entries of that
    source. This is computed from i alone, as a sum of floors, in as few steps as Euclid's algorithm
    takes.

    If the sources are SpanOrders, the windows of each batch are sorted by source and slot, so that
    a row takes from the same few slots in each batch.
    """

    def __init__(
        self,
        n_windows: Sequence[int],
        weights: Sequence[float],
        seed: int,
        span: tuple[int, int] | None = None,
    ) -> None:
        """span: batch size and longest span, if the sources are SpanOrders."""
        ends = list(accumulate(map(Fraction, weights)))
        self._share_ends = [0, *(round(end / ends[-1] * _ONE) for end in ends)]
        self._key = make_key(seed, _FIRST_SOURCE_KEY - 1)
        shares = [float(weight / ends[-1]) for weight in map(Fraction, weights)]
        self._sources = [
            make_shuffled(count, make_key(seed, _FIRST_SOURCE_KEY + number), span, share)
            for number, (count, share) in enumerate(zip(n_windows, shares, strict=True))
        ]
        self._first_windows = np.cumsum([0, *n_windows])
        self._batch_size = span[0] if span else 1
        self.span_windows = tuple(each.span_windows[0] for each in self._sources)

    def windows(self, first: int, size: int) -> Ints:
        skipped = first % self._batch_size
        end = skipped + size
        return self._find(first - skipped, end + -end % self._batch_size)[skipped:end]

    def _find(self, first: int, size: int) -> Ints:
        """Return the windows of whole batches."""
        index = np.arange(size, dtype=np.uint64)
        points = index * np.uint64(GOLDEN) + np.uint64((first * GOLDEN + self._key) % _ONE)
        sources = np.searchsorted(np.array(self._share_ends[1:-1], np.uint64), points, side="right")
        drawn_before = [self._count_below(first, end) for end in self._share_ends]
        out, slots = np.empty((2, size), np.int64)
        for number, source in enumerate(self._sources):
            chosen = np.flatnonzero(sources == number)
            start = drawn_before[number + 1] - drawn_before[number]
            out[chosen] = source.windows(start, len(chosen)) + self._first_windows[number]
            slots[chosen] = (start + np.arange(len(chosen))) % source.slots
        return out[np.lexsort((slots, sources, np.arange(size) // self._batch_size))]

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

    def __init__(self, order: WindowOrder, batch_size: int) -> None:
        size = self._size = batch_size * max(1, _CHUNK_WINDOWS // batch_size)
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
