"""Which part of a whole tensor a process keeps, and taking one out of the other.

A part is rows and columns of the whole: runs of rows, in the order in which they are kept, and one range of columns.
Rows are the first dimension, columns the second; a vector has no columns, a scalar neither.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Range = tuple[int, int]  # from, to (exclusive)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns of a whole tensor."""

    rows: tuple[Range, ...]
    columns: Range | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Part":
        """All of a tensor; a scalar is one row."""
        return cls(((0, shape[0] if shape else 1),), (0, shape[1]) if len(shape) > 1 else None)

    @property
    def n_rows(self) -> int:
        return sum(end - start for start, end in self.rows)

    def cut_rows(self, first: int, last: int) -> "Part":
        """Of these rows, those from the `first` kept to before the `last`."""
        cut, before = [], 0
        for start, end in self.rows:
            a, b = start + max(first - before, 0), start + min(last - before, end - start)
            if a < b:
                cut.append((a, b))
            before += end - start
        return replace(self, rows=tuple(cut))

    def cut_columns(self, first: int, last: int) -> "Part":
        """Of these columns, those from the `first` kept to before the `last`."""
        assert self.columns is not None
        return replace(self, columns=(self.columns[0] + first, self.columns[0] + last))

    def take(self, whole: Tensor) -> Tensor:
        """This part of a whole tensor; a view where it is one run of rows."""
        if not whole.dim():
            return whole
        rows = [whole[start:end] for start, end in self.rows]
        part = rows[0] if len(rows) == 1 else torch.cat([whole[:0], *rows])
        return part if self.columns is None else part[:, slice(*self.columns)]

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write a kept part to its place in a whole tensor: the inverse of `take`."""
        row = 0
        for start, end in self.rows if whole.dim() else ():
            target = whole[start:end] if self.columns is None else whole[start:end, slice(*self.columns)]
            target.copy_(part[row : row + end - start])
            row += end - start

    def overlaps(self, other: "Part") -> Iterator[tuple[int, int, int, Range]]:
        """What two parts of one tensor share: (row here, row there, number of rows, columns of the whole)."""
        columns = self.columns or (0, 1), other.columns or (0, 1)
        shared = max(columns[0][0], columns[1][0]), min(columns[0][1], columns[1][1])
        if shared[0] >= shared[1]:
            return
        here = 0
        for start, end in self.rows:
            there = 0
            for start2, end2 in other.rows:
                a, b = max(start, start2), min(end, end2)
                if a < b:
                    yield here + a - start, there + a - start2, b - a, shared
                there += end2 - start2
            here += end - start


def chunk(size: int, pieces: int, index: int) -> Range:
    """The place of the piece that torch.chunk makes: as large as the others, the last ones smaller or empty."""
    length = -(-size // pieces)
    return min(index * length, size), min((index + 1) * length, size)
