"""A split's token ids as one long row: memory-mapped shards joined end to end.

In: mapped shards. Out: copies of any stretch or of many windows at once. Each block's hash and range of ids is
checked when it is first touched, so no damaged token is ever trained on and nothing is checked twice.
Deliberately absent: opening files (dataset.py) and the order of reading (loader.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatoken.data.shards import BLOCK_BYTES, Shard, hash_block
from megatoken.errors import Exit, Fault

Ids = NDArray[np.uint16] | NDArray[np.uint32]

_ROWS_A_SHARD = 8  # below this many windows a shard, copying row by row is faster than grouping them


@dataclass(frozen=True, slots=True)
class MappedShard:
    """A shard in memory's reach: its row of the manifest, its file, where its tokens start and the tokens."""

    shard: Shard
    path: Path
    offset: int  # bytes before the first token
    ids: Ids  # (tokens,), memory-mapped


class Tokens:
    """The token ids of one split, its shards joined end to end, checked block by block at first touch."""

    def __init__(self, shards: list[MappedShard], dtype: str, vocab_size: int) -> None:
        self.dtype = np.dtype(dtype)
        self.vocab_size = vocab_size
        self._shards = shards
        self._block_tokens = BLOCK_BYTES // self.dtype.itemsize
        sizes = np.array([len(mapped.ids) for mapped in shards], dtype=np.int64)
        self._bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        counts = -(-sizes // self._block_tokens)
        self._first_block = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._checked = np.zeros(int(counts.sum()), dtype=np.bool_)
        self._all_checked = False

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def limit_ids(self, vocab_size: int) -> None:
        """Sets the vocabulary that ids are checked against and forgets earlier checks."""
        self.vocab_size = vocab_size
        self._checked[:] = False
        self._all_checked = False

    def read(self, start: int, count: int) -> Ids:
        """A copy of tokens [start, start + count) as (count,) in the shards' dtype.

        Fault(Exit.DATA) when a block touched for the first time is damaged or holds an id outside the vocabulary.
        """
        assert 0 <= start <= start + count <= len(self)
        if not self._all_checked and count:
            self._check_ranges(np.array([start]), count)
        out = np.empty(count, dtype=self.dtype)
        if count:
            number = int(np.searchsorted(self._bounds, start, side="right")) - 1
            self._copy(number, start - int(self._bounds[number]), out)
        return out

    def gather(self, starts: NDArray[np.int64], length: int) -> Ids:
        """Windows of `length` tokens at `starts` (n,), copied into (n, length); Faults as in `read`."""
        out = np.empty((len(starts), length), dtype=self.dtype)
        if not out.size:
            return out
        assert starts.min() >= 0
        assert starts.max() + length <= len(self)
        if not self._all_checked:
            self._check_ranges(starts, length)
        if len(self._shards) == 1:
            return _view_windows(self._shards[0].ids, length)[starts]
        first = np.searchsorted(self._bounds, starts, side="right") - 1
        local = starts - self._bounds[first]
        by_row = starts + length > self._bounds[first + 1]  # windows that cross into the next shard
        if len(starts) < _ROWS_A_SHARD * len(self._shards):
            by_row[:] = True
        rows = np.flatnonzero(by_row)
        for row, number, start in zip(rows.tolist(), first[rows].tolist(), local[rows].tolist(), strict=True):
            self._copy(number, start, out[row])
        if len(rows) == len(starts):
            return out
        rows = np.flatnonzero(~by_row)
        rows = rows[np.argsort(first[rows], kind="stable")]
        numbers, cuts = np.unique(first[rows], return_index=True)
        for number, part in zip(numbers.tolist(), np.split(rows, cuts[1:]), strict=True):
            out[part] = _view_windows(self._shards[number].ids, length)[local[part]]
        return out

    def check_all(self) -> Iterator[Fault]:
        """Checks every block, checked before or not, and yields what is wrong with each bad one."""
        for number in range(len(self._checked)):
            try:
                self._check_block(number)
            except Fault as fault:
                yield fault

    def _copy(self, number: int, local: int, out: Ids) -> None:
        """Fills `out` from token `local` of shard `number`, going on in the shards after it."""
        piece = self._shards[number].ids[local : local + len(out)]
        out[: len(piece)] = piece
        while (done := len(piece)) < len(out):
            out, number = out[done:], number + 1
            piece = self._shards[number].ids[: len(out)]
            out[: len(piece)] = piece

    def _find_blocks(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        number = np.searchsorted(self._bounds, positions, side="right") - 1
        return self._first_block[number] + (positions - self._bounds[number]) // self._block_tokens

    def _check_ranges(self, starts: NDArray[np.int64], length: int) -> None:
        """Checks the blocks under windows of `length` at `starts` that were not checked before.

        Two threads may check the same block at once, which costs time and changes nothing.
        """
        first, last = self._find_blocks(starts), self._find_blocks(starts + length - 1)
        for step in range(int((last - first).max()) + 1):
            blocks = np.minimum(first + step, last)
            for number in np.unique(blocks[~self._checked[blocks]]):
                self._check_block(int(number))
                self._checked[number] = True
        self._all_checked = bool(self._checked.all())

    def _check_block(self, number: int) -> None:
        index = int(np.searchsorted(self._first_block, number, side="right")) - 1
        mapped, local = self._shards[index], number - int(self._first_block[index])
        start = local * self._block_tokens
        ids = mapped.ids[start : start + self._block_tokens]
        byte = mapped.offset + local * BLOCK_BYTES
        if mapped.shard.blocks and (actual := hash_block(ids)) != (expected := mapped.shard.blocks[local]):
            what = f"shard is damaged: block {local} has hash {actual}, expected {expected}"
            where = f"{mapped.path}, {ids.nbytes:,} bytes from offset {byte:,} (token {start:,})"
            raise Fault(Exit.DATA, what, where, "restore it from a copy or prepare the dataset again")
        if int(ids.max()) >= self.vocab_size:
            at = int(np.argmax(ids >= self.vocab_size))
            what = f"token id {int(ids[at])} is outside the vocabulary of {self.vocab_size:,}"
            where = f"{mapped.path}, byte offset {byte + at * ids.itemsize:,} (token {start + at:,})"
            raise Fault(Exit.DATA, what, where, "these shards belong to another tokenizer, or are damaged")


def _view_windows(ids: Ids, length: int) -> Ids:
    """All windows of `length` as rows, without a copy: sliding_window_view without its 10 microseconds."""
    shape = (len(ids) - length + 1, length)
    return np.ndarray(shape, ids.dtype, ids, 0, (ids.itemsize, ids.itemsize))
