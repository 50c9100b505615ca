"""A batch that grows over the first tokens of a run, as in GPT-3 (Brown et al. 2020, appendix B)."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """Sizes of the batches of a run, in tokens: `start`, then its multiples, at last `full`.

    The size grows with the tokens trained on, from `start` to `full` over about the first `length` of them: each size
    has the same share, rounded up to whole batches. So batch n and the tokens before it are functions of n alone.
    """

    start: int
    full: int
    length: int

    def before(self, batch: int) -> int:
        """Tokens in the batches before this one; batches are counted from 0."""
        batches, tokens, sizes = self.levels()
        level = bisect_right(batches, batch) - 1
        return tokens[level] + (batch - batches[level]) * sizes[level]

    def size(self, batch: int) -> int:
        """Tokens of this batch."""
        return self.before(batch + 1) - self.before(batch)

    def count(self, tokens: float) -> int:
        """The number of first batches that hold about so many tokens, rounded to the nearest."""
        batches, before, sizes = self.levels()
        level = bisect_right(before, tokens) - 1
        return batches[level] + round((tokens - before[level]) / sizes[level])

    def smaller(self, tokens: float) -> Iterator[tuple[int, float]]:
        """Each size below `full`, and how many of a run's `tokens` are trained on in batches of it."""
        _, before, sizes = self.levels()
        for size, begin, end in zip(
            sizes, before, before[1:], strict=False
        ):  # the last size has no end
            yield size, max(0.0, min(end, tokens) - begin)

    def levels(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Of each size, in order: the first batch that has it, the tokens before that batch, and the size."""
        return _list_levels(self.start, self.full, self.length)


@cache
def _list_levels(
    start: int, full: int, length: int
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    sizes = [*range(start, full, start), full]
    batches, tokens = [0], [0]
    for level, size in enumerate(sizes[:-1], start=1):
        count = max(0, -(-(length * level // (len(sizes) - 1) - tokens[-1]) // size))
        batches.append(batches[-1] + count)
        tokens.append(tokens[-1] + count * size)
    return batches, tokens, sizes
