"""A split's tokens to shard files, stoppable at any moment.

In: arrays of ids in order. Out: `train_000000.bin` and so on, each hashed while it is written. Its state is
small and plain; a writer restored from it cuts the files back to what the state says, so whatever was written
later never was. Deliberately absent: when to save the state (prepare.py) and the form of a shard (shards.py).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.data.shards import BLOCK_BYTES, HEADER_BYTES, Shard, hash_block, make_header
from megatoken.errors import Exit, Fault


@dataclass(slots=True)
class SplitState:
    """What a split holds: finished shards, and of the one being written its tokens and whole blocks' hashes."""

    closed: list[Shard] = field(default_factory=list)
    tokens: int = 0
    blocks: list[str] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        """Tokens in all shards of the split."""
        return sum(shard.tokens for shard in self.closed) + self.tokens


class ShardWriter:
    """Appends tokens to one split of the dataset in `folder`. Raises OSError as the disk does.

    shard_tokens: tokens a shard, the last one may hold fewer. fingerprint: the tokenizer's, for the headers.
    """

    def __init__(
        self, folder: Path, split: str, dtype: str, shard_tokens: int, fingerprint: str, state: SplitState
    ) -> None:
        self._folder, self._split, self._dtype = folder, split, np.dtype(dtype).newbyteorder("<")
        self._shard_tokens, self._fingerprint = shard_tokens, fingerprint
        self._file: FileIO | None = None
        self._state = SplitState(list(state.closed), state.tokens, list(state.blocks))
        self._hasher, self._hashed_bytes = xxhash.xxh3_64(), 0  # of the block being filled
        self._restore()

    @property
    def tokens(self) -> int:
        """Tokens in the split so far."""
        return self._state.total_tokens

    def append(self, ids: NDArray[Any]) -> None:
        """Writes ids (n,) after those already there, going on in the next shard where one is full."""
        ids = ids.astype(self._dtype, copy=False)
        while len(ids):
            part = ids[: self._shard_tokens - self._state.tokens]
            self._write(part)
            ids = ids[len(part) :]
            if self._state.tokens == self._shard_tokens:
                self._close_shard()

    def sync(self) -> SplitState:
        """Makes everything so far durable and gives the state to restore it from."""
        if self._file:
            os.fsync(self._file.fileno())
        state = self._state
        return SplitState(list(state.closed), state.tokens, list(state.blocks))

    def finish(self) -> list[Shard]:
        """Closes the last shard; the shards in order."""
        if self._state.tokens:
            self._close_shard()
        return self._state.closed

    def close(self) -> None:
        """Lets go of the open file; what was not synced may be lost."""
        if self._file:
            self._file.close()
            self._file = None

    def read_from(self, start: int) -> Iterator[NDArray[Any]]:
        """The tokens from number `start` on, in arrays of at most 1 Mi."""
        sizes = [shard.tokens for shard in self._state.closed] + [self._state.tokens]
        for index, size in enumerate(sizes):
            for at in range(max(0, min(start, size)), size, 1 << 20):
                offset = HEADER_BYTES + at * self._dtype.itemsize
                count = min(1 << 20, size - at)
                yield np.fromfile(self._path(index), dtype=self._dtype, count=count, offset=offset)
            start -= size

    def state_at(self, tokens: int) -> SplitState:
        """The state in which only the first `tokens` had been written."""
        block_tokens = BLOCK_BYTES // self._dtype.itemsize
        closed: list[Shard] = []
        rest = tokens
        for shard in self._state.closed:
            if rest < shard.tokens:
                return SplitState(closed, rest, list(shard.blocks[: rest // block_tokens]))
            closed.append(shard)
            rest -= shard.tokens
        return SplitState(closed, rest, self._state.blocks[: rest // block_tokens])

    def _path(self, index: int) -> Path:
        return self._folder / f"{self._split}_{index:06d}.bin"

    def _restore(self) -> None:
        """Cuts the files back to the state; an unfinished shard gets a header of zeros, so nobody can read it."""
        state, item = self._state, self._dtype.itemsize
        kept = [self._path(index) for index in range(len(state.closed) + bool(state.tokens))]
        for path in self._folder.glob(f"{self._split}_*.bin"):
            if path not in kept:
                path.unlink()
        for path, shard in zip(kept, state.closed, strict=False):
            self._expect(path, HEADER_BYTES + shard.tokens * item, exactly=True)
        if state.tokens:
            size = HEADER_BYTES + state.tokens * item
            self._expect(kept[-1], size, exactly=False)
            self._file = FileIO(kept[-1], "r+")
            self._file.truncate(size)
            _write_all(self._file, bytes(HEADER_BYTES))
            self._file.seek(HEADER_BYTES + len(state.blocks) * BLOCK_BYTES)
            tail = self._file.readall()
            self._hasher.update(tail)
            self._hashed_bytes = len(tail)

    def _expect(self, path: Path, size: int, exactly: bool) -> None:
        actual = path.stat().st_size if path.exists() else 0
        if actual < size or (exactly and actual != size):
            what = f"a shard has {actual:,} bytes where {size:,} were written"
            raise Fault(Exit.DATA, what, str(path), "delete the output folder and prepare again")

    def _write(self, ids: NDArray[Any]) -> None:
        if self._file is None:
            # Unbuffered: a full disk must show here, not when the object is thrown away.
            self._file = FileIO(self._path(len(self._state.closed)), "w+")
            _write_all(self._file, bytes(HEADER_BYTES))
        data = memoryview(np.ascontiguousarray(ids).data).cast("B")
        _write_all(self._file, data)
        self._state.tokens += len(ids)
        while data:
            part = data[: BLOCK_BYTES - self._hashed_bytes]
            self._hasher.update(part)
            self._hashed_bytes += len(part)
            data = data[len(part) :]
            if self._hashed_bytes == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._state.blocks.append(self._hasher.hexdigest())
        self._hasher.reset()
        self._hashed_bytes = 0

    def _close_shard(self) -> None:
        assert self._file is not None
        header = make_header(self._state.tokens, self._dtype.name, self._fingerprint)
        self._file.seek(0)
        _write_all(self._file, header)
        os.fsync(self._file.fileno())
        self.close()
        if self._hashed_bytes:
            self._end_block()
        name, state = self._path(len(self._state.closed)).name, self._state
        state.closed.append(
            Shard(
                file=name,
                split=self._split,
                tokens=state.tokens,
                blocks=tuple(state.blocks),
                header=hash_block(header),
            )
        )
        state.tokens, state.blocks = 0, []


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
