"""Describe the slice of a tensor that a process has: rows (dimension 0) and columns."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Range = tuple[int, int]  # start, end (exclusive)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Ranges of rows in stored order, and one range of columns; None for vectors and scalars."""

    rows: tuple[Range, ...]
    columns: Range | None = None

    @classmethod
    def full(cls, shape: Sequence[int]) -> "TensorSlice":
        """Return the slice that is the full tensor. A scalar has one row."""
        return cls(((0, shape[0] if shape else 1),), (0, shape[1]) if len(shape) > 1 else None)

    @property
    def n_rows(self) -> int:
        return sum(end - start for start, end in self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice. A scalar has one row."""
        return (self.n_rows, self.columns[1] - self.columns[0]) if self.columns else (self.n_rows,)

    def cut_rows(self, first: int, last: int) -> "TensorSlice":
        """Return the part of this slice with stored rows [first, last)."""
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
        """Return the part of this slice with its columns [first, last)."""
        assert self.columns is not None
        return replace(self, columns=(self.columns[0] + first, self.columns[0] + last))

    def take(self, full: Tensor) -> Tensor:
        """Return this slice of a full tensor, a view if it is one range of rows."""
        if not full.dim():
            return full
        rows = [full[start:end] for start, end in self.rows]
        local = rows[0] if len(rows) == 1 else torch.cat([full[:0], *rows])
        return local if self.columns is None else local[:, slice(*self.columns)]

    def put(self, full: Tensor, local: Tensor) -> None:
        """Copy a local tensor to its place in the full one: the inverse of `take`."""
        row = 0
        for start, end in self.rows if full.dim() else ():
            target = full[start:end]
            if self.columns is not None:
                target = target[:, slice(*self.columns)]
            target.copy_(local[row : row + end - start])
            row += end - start

    def overlaps(self, other: "TensorSlice") -> Iterator[tuple[int, int, int, Range]]:
        """Yield overlaps with another slice: (row here, row there, rows, columns)."""
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
    """Return whether a tensor is a DTensor, without the half second of importing DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def chunk(size: int, chunks: int, index: int) -> Range:
    """Return the range of a chunk of torch.chunk: equal lengths, the last ones shorter or empty."""
    length = -(-size // chunks)
    return min(index * length, size), min((index + 1) * length, size)
