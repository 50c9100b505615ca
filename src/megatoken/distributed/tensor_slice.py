"""Describe which slice of a tensor a process holds: rows (dimension 0) and columns."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Range = tuple[int, int]  # start, end (exclusive)


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a full tensor.

    rows: ranges of the full tensor's rows, in the order in which the slice stores them.
    columns: range of its columns; None for vectors and scalars.
    """

    rows: tuple[Range, ...]
    columns: Range | None = None

    @classmethod
    def full(cls, shape: Sequence[int]) -> "TensorSlice":
        """Return the slice that covers a full tensor. A scalar counts as one row."""
        return cls(((0, shape[0] if shape else 1),), (0, shape[1]) if len(shape) > 1 else None)

    @property
    def n_rows(self) -> int:
        return sum(end - start for start, end in self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice. A scalar counts as one row, so its shape is (1,)."""
        return (self.n_rows, self.columns[1] - self.columns[0]) if self.columns else (self.n_rows,)

    def cut_rows(self, first: int, last: int) -> "TensorSlice":
        """Return the sub-slice of rows [first, last), counted within this slice."""
        rows = []
        offset = 0  # stored rows before this range
        for start, end in self.rows:
            new_start = start + max(first - offset, 0)
            new_end = start + min(last - offset, end - start)
            if new_start < new_end:
                rows.append((new_start, new_end))
            offset += end - start
        return replace(self, rows=tuple(rows))

    def cut_columns(self, first: int, last: int) -> "TensorSlice":
        """Return the sub-slice of columns [first, last), counted within this slice."""
        assert self.columns is not None
        return replace(self, columns=(self.columns[0] + first, self.columns[0] + last))

    def take(self, full: Tensor) -> Tensor:
        """Cut this slice out of a full tensor. The result is a view if the rows are one range."""
        if not full.dim():
            return full
        rows = [full[start:end] for start, end in self.rows]
        local = rows[0] if len(rows) == 1 else torch.cat([full[:0], *rows])
        return local if self.columns is None else local[:, slice(*self.columns)]

    def put(self, full: Tensor, local: Tensor) -> None:
        """Copy the contents of this slice into a full tensor: the inverse of `take`."""
        row = 0
        for start, end in self.rows if full.dim() else ():
            target = full[start:end]
            if self.columns is not None:
                target = target[:, slice(*self.columns)]
            target.copy_(local[row : row + end - start])
            row += end - start

    def overlaps(self, other: "TensorSlice") -> Iterator[tuple[int, int, int, Range]]:
        """Yield the overlaps with another slice of the same tensor.

        Each is (first row within this slice, first row within the other one, number of rows, range
        of columns in the full tensor).
        """
        first, last = self.columns or (0, 1)
        other_first, other_last = other.columns or (0, 1)
        columns = (max(first, other_first), min(last, other_last))
        if columns[0] >= columns[1]:
            return
        row = 0
        for start, end in self.rows:
            other_row = 0
            for other_start, other_end in other.rows:
                overlap_start = max(start, other_start)
                n_rows = min(end, other_end) - overlap_start
                if n_rows > 0:
                    other_offset = other_row + overlap_start - other_start
                    yield row + overlap_start - start, other_offset, n_rows, columns
                other_row += other_end - other_start
            row += end - start


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor, without importing DTensor, which is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def chunk(size: int, chunks: int, index: int) -> Range:
    """Return the range of chunk number `index`, as torch.chunk splits a dimension of `size`.

    All chunks are equally long, except that the last ones may be shorter or empty.
    """
    length = -(-size // chunks)
    return min(index * length, size), min((index + 1) * length, size)
