"""Write the token ids of a split to shard files `train_000000.bin`, ..."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.base.errors import DataError
from megatoken.base.system.atomic_write import replace_file
from megatoken.data.shard_format import HEADER_BYTES, Shard, hash_blocks, hash_bytes, make_header

_READ_TOKENS = 1 << 20


@dataclass
class ShardWriter:
    """Appends tokens to the shard files of a split.

    On creation, keeps the first `tokens` tokens in the files and removes the rest. Raises OSError,
    and DataError if a file is too short.
    """

    folder: Path
    split: str
    dtype: str
    shard_tokens: int  # per shard; the last one can have fewer
    fingerprint: str  # of the tokenizer
    tokens: int

    def __post_init__(self) -> None:
        self._dtype = np.dtype(self.dtype).newbyteorder("<")
        self._file: FileIO | None = None
        self.truncate(self.tokens)

    def truncate(self, tokens: int) -> None:
        """Remove everything after the first `tokens` tokens."""
        self.close()
        self.tokens = tokens
        item = self._dtype.itemsize
        sizes = {
            self._path(index): HEADER_BYTES + n * item
            for index, n in enumerate(self._shard_sizes())
        }
        for path in self.folder.glob(f"{self.split}_*.bin"):
            if path not in sizes:
                path.unlink()
        for path, size in sizes.items():
            if not path.exists() or path.stat().st_size < size:
                what = f"a shard is shorter than the {size:,} bytes that were written"
                raise DataError(what, path, "delete the output folder and prepare again")
        if tokens % self.shard_tokens:
            self._file = FileIO(path, "r+")
            self._file.truncate(size)
            _write_all(self._file, bytes(HEADER_BYTES))  # an unfinished shard has zeros
            self._file.seek(size)

    def append(self, ids: NDArray[Any]) -> bool:
        """Write ids (n,), to a new shard whenever one is full; return whether one became full."""
        before = self.tokens
        ids = ids.astype(self._dtype, copy=False)
        while len(ids):
            if self._file is None:
                # Unbuffered, so that a full disk raises here.
                self._file = FileIO(self._path(self.tokens // self.shard_tokens), "w+")
                _write_all(self._file, bytes(HEADER_BYTES))
            part = ids[: self.shard_tokens - self.tokens % self.shard_tokens]
            _write_all(self._file, memoryview(np.ascontiguousarray(part).data).cast("B"))
            self.tokens += len(part)
            ids = ids[len(part) :]
            if self.tokens % self.shard_tokens == 0:
                self._close_shard()
        return self.tokens // self.shard_tokens > before // self.shard_tokens

    def sync(self) -> None:
        """Force everything written so far to the disk."""
        if self._file:
            os.fsync(self._file.fileno())

    def finish(self) -> Iterator[Shard]:
        """Close the last shard; write the hashes beside each shard and yield its manifest row."""
        self._close_shard()
        for index, tokens in enumerate(self._shard_sizes()):
            path = self._path(index)
            raw = np.memmap(path, np.uint8, "r")
            hashes = hash_blocks(raw[HEADER_BYTES:]).tobytes()
            digest = hash_bytes(hashes)
            shard = Shard(file=path.name, split=self.split, tokens=tokens, hash=digest)
            replace_file(self.folder / shard.hashes_file, hashes, durable=True)
            yield shard

    def close(self) -> None:
        """Close the open file without syncing it."""
        if self._file:
            self._file.close()
            self._file = None

    def read_from(self, start: int) -> Iterator[NDArray[Any]]:
        """Yield the tokens from index `start` on, in arrays of at most 2**20 tokens."""
        while start < self.tokens:
            index, at = divmod(start, self.shard_tokens)
            count = min(_READ_TOKENS, self.tokens - start, self.shard_tokens - at)
            offset = HEADER_BYTES + at * self._dtype.itemsize
            yield np.fromfile(self._path(index), dtype=self._dtype, count=count, offset=offset)
            start += count

    def _path(self, index: int) -> Path:
        return self.folder / f"{self.split}_{index:06d}.bin"

    def _shard_sizes(self) -> list[int]:
        """Return the number of tokens in each shard."""
        full, rest = divmod(self.tokens, self.shard_tokens)
        return [self.shard_tokens] * full + [rest] * (rest > 0)

    def _close_shard(self) -> None:
        if self._file:
            self._file.seek(0)
            header = make_header(self._shard_sizes()[-1], self.dtype, self.fingerprint)
            _write_all(self._file, header)
            os.fsync(self._file.fileno())
            self.close()


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
