"""Grow the batch over the first tokens of a run, as in GPT-3 (Brown et al. 2020, appendix B)."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """Batch sizes in tokens: `start`, then its multiples, finally `full`.

    The size grows from `start` to `full` over about the first `length` tokens. Each size has the
    same share of them, rounded up to full batches, so the tokens before batch n depend only on n.
    """

    start: int
    full: int
    length: int

    def before(self, batch: int) -> int:
        """Return the tokens before batch number `batch`, counted from 0."""
        first_batches, first_tokens, sizes = self.levels()
        level = bisect_right(first_batches, batch) - 1
        return first_tokens[level] + (batch - first_batches[level]) * sizes[level]

    def size(self, batch: int) -> int:
        """Return the tokens of this batch."""
        return self.before(batch + 1) - self.before(batch)

    def count(self, tokens: float) -> int:
        """Return how many batches, from the first, hold `tokens`, rounded."""
        first_batches, first_tokens, sizes = self.levels()
        level = bisect_right(first_tokens, tokens) - 1
        return first_batches[level] + round((tokens - first_tokens[level]) / sizes[level])

    def smaller(self, tokens: float) -> Iterator[tuple[int, float]]:
        """Yield each size below `full`, and how many of a run's `tokens` use it."""
        _, first_tokens, sizes = self.levels()
        for level, size in enumerate(sizes[:-1]):
            end = min(first_tokens[level + 1], tokens)
            yield size, max(0.0, end - first_tokens[level])

    def levels(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return for each size: its first batch, the tokens before that batch, and the size."""
        return _list_levels(self.start, self.full, self.length)


@cache
def _list_levels(
    start: int, full: int, length: int
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    sizes = [*range(start, full, start), full]
    first_batches = [0]
    first_tokens = [0]
    for level, size in enumerate(sizes[:-1], start=1):
        share = length * level // (len(sizes) - 1) - first_tokens[-1]
        count = max(0, -(-share // size))
        first_batches.append(first_batches[-1] + count)
        first_tokens.append(first_tokens[-1] + count * size)
    return first_batches, first_tokens, sizes
