"""The slice of a full tensor that a process has: ranges of rows (the first dimension) and a range of columns."""

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
    """Ranges of rows in the order in which they are stored, and one range of columns; None for vectors and scalars."""

    rows: tuple[Range, ...]
    columns: Range | None = None

    @classmethod
    def full(cls, shape: Sequence[int]) -> "TensorSlice":
        """All of a tensor; a scalar has one row."""
        return cls(((0, shape[0] if shape else 1),), (0, shape[1]) if len(shape) > 1 else None)

    @property
    def n_rows(self) -> int:
        return sum(end - start for start, end in self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it holds; a scalar has one row."""
        return (self.n_rows, self.columns[1] - self.columns[0]) if self.columns else (self.n_rows,)

    def cut_rows(self, first: int, last: int) -> "TensorSlice":
        """The stored rows from `first` to before `last`."""
        rows, before = [], 0
        for start, end in self.rows:
            a, b = start + max(first - before, 0), start + min(last - before, end - start)
            if a < b:
                rows.append((a, b))
            before += end - start
        return replace(self, rows=tuple(rows))

    def cut_columns(self, first: int, last: int) -> "TensorSlice":
        """The columns from `first` to before `last` of these."""
        assert self.columns is not None
        return replace(self, columns=(self.columns[0] + first, self.columns[0] + last))

    def take(self, full: Tensor) -> Tensor:
        """This slice of a full tensor; a view if it is one range of rows."""
        if not full.dim():
            return full
        rows = [full[start:end] for start, end in self.rows]
        local = rows[0] if len(rows) == 1 else torch.cat([full[:0], *rows])
        return local if self.columns is None else local[:, slice(*self.columns)]

    def put(self, full: Tensor, local: Tensor) -> None:
        """Write a local tensor into the full one: the inverse of `take`."""
        row = 0
        for start, end in self.rows if full.dim() else ():
            target = (
                full[start:end] if self.columns is None else full[start:end, slice(*self.columns)]
            )
            target.copy_(local[row : row + end - start])
            row += end - start

    def overlaps(self, other: "TensorSlice") -> Iterator[tuple[int, int, int, Range]]:
        """The overlap with another slice: (row in this, row in other, number of rows, columns of the full tensor)."""
        columns = self.columns or (0, 1), other.columns or (0, 1)
        shared = max(columns[0][0], columns[1][0]), min(columns[0][1], columns[1][1])
        if shared[0] >= shared[1]:
            return
        row = 0
        for start, end in self.rows:
            other_row = 0
            for other_start, other_end in other.rows:
                a, b = max(start, other_start), min(end, other_end)
                if a < b:
                    yield row + a - start, other_row + a - other_start, b - a, shared
                other_row += other_end - other_start
            row += end - start


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether torch has split a tensor. Where nothing is split, its code for that is not loaded: half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def chunk(size: int, chunks: int, index: int) -> Range:
    """The range of a chunk of torch.chunk: all equally long, the last ones shorter or empty."""
    length = -(-size // chunks)
    return min(index * length, size), min((index + 1) * length, size)
