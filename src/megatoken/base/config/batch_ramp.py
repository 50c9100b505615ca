"""Grow the batch over the first tokens of a run, as in GPT-3 (Brown et al. 2020, appendix B)."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class BatchRamp:
    """Batch sizes in tokens that grow from `start` to `full`, through the multiples of `start`.

    Every size below `full` is used for an equal share of the first `length` tokens, rounded up to
    whole batches. So the number of a batch alone determines how many tokens precede it.
    """

    start: int
    full: int
    length: int

    def before(self, batch: int) -> int:
        """Return the total tokens of batches 0 to `batch` - 1."""
        first_batches, first_tokens, sizes = _list_levels(self)
        level = bisect_right(first_batches, batch) - 1
        return first_tokens[level] + (batch - first_batches[level]) * sizes[level]

    def size(self, batch: int) -> int:
        """Return the tokens in batch number `batch`; the first is 0."""
        return self.before(batch + 1) - self.before(batch)

    def count(self, tokens: float) -> int:
        """Return the number of batches, rounded, in a run of `tokens` tokens."""
        first_batches, first_tokens, sizes = _list_levels(self)
        level = bisect_right(first_tokens, tokens) - 1
        return first_batches[level] + round((tokens - first_tokens[level]) / sizes[level])

    def smaller(self, tokens: float) -> Iterator[tuple[int, float]]:
        """Yield each batch size below `full`, and how many of a run's `tokens` use that size."""
        _, first_tokens, sizes = _list_levels(self)
        for level, size in enumerate(sizes[:-1]):
            end = min(first_tokens[level + 1], tokens)
            yield size, max(0.0, end - first_tokens[level])


@cache
def _list_levels(ramp: BatchRamp) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return three lists with an entry per batch size, in ascending order.

    They hold the number of the first batch of that size, the tokens before it, and the size.
    """
    sizes = [*range(ramp.start, ramp.full, ramp.start), ramp.full]
    first_batches = [0]
    first_tokens = [0]
    for level, size in enumerate(sizes[:-1], start=1):
        share = ramp.length * level // (len(sizes) - 1) - first_tokens[-1]
        count = max(0, -(-share // size))
        first_batches.append(first_batches[-1] + count)
        first_tokens.append(first_tokens[-1] + count * size)
    return first_batches, first_tokens, sizes
