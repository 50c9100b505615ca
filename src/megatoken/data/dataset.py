"""Open a dataset: a prepared folder, or token shards of other programs.

Sizes and headers are checked when a dataset is opened; a block's hash and token ids are checked
when it is first read. `verify_dataset` checks everything at once.
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash

from megatoken.base.errors import DataError, MegatokenError
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.system.machine import allow_open_files
from megatoken.data.remote import Report, local_dataset, no_report
from megatoken.data.shard_format import (
    BLOCK_BYTES,
    HASH_DIGITS,
    HEADER_BYTES,
    MANIFEST_NAME,
    PROGRESS_NAME,
    RESTORE,
    SPLITS,
    Manifest,
    Shard,
    hash_block,
    read_errors,
    read_header,
    read_manifest,
)
from megatoken.data.vocabulary import CountBytes, Ids, Ints, Vocabulary, read_vocabulary

_MOST_OPEN = 128  # shards in this process, which may open only 256 files on macOS
_SAMPLED_BLOCKS = 18  # per external shard, for the fingerprint: first, last and 16 between


class ShardFile:
    """A shard file that can be read at any position.

    It is opened when it is first read, and closed once _MOST_OPEN others were read since. It is not
    memory-mapped, because a truncated file or a failing disk would then kill the process (SIGBUS).
    """

    def __init__(self, shard: Shard, path: Path, dtype: str, offset: int) -> None:
        """shard: its row in the manifest. offset: number of bytes before the tokens."""
        self.shard = shard
        self.path = path
        self.offset = offset
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._stamp: tuple[int, ...] = ()  # when it was last checked; () before it is first opened

    @property
    def size(self) -> int:
        """The size in bytes that the file should have."""
        return self.offset + self.shard.tokens * self.dtype.itemsize

    def read(self, start: int, out: Ids) -> None:
        """Fill `out` (n,) with the tokens from index `start` on.

        Raises DataError if the file is too short.
        """
        position = self.offset + start * self.dtype.itemsize
        buffer = out.data.cast("B")
        while buffer:
            with read_errors(f"{self.path}, byte offset {position:,}"):
                opened = _open_shard_file(self)
                self._stamp = self._stamp or opened.read_stamp()
                count = os.preadv(opened.descriptor, (buffer,), position)
            if not count:
                what = f"shard was truncated: {opened.read_stamp()[0]:,} bytes"
                raise DataError(f"{what}, expected {self.size:,}", self.path, RESTORE)
            buffer = buffer[count:]
            position += count

    def read_block(self, number: int) -> Ids:
        """Return the ids of block `number`: BLOCK_BYTES of tokens with one hash in the manifest.

        Raises DataError as `read` does.
        """
        per_block = BLOCK_BYTES // self.dtype.itemsize
        ids = np.empty(min(per_block, self.shard.tokens - number * per_block), self.dtype)
        self.read(number * per_block, ids)
        return ids

    def has_changed(self) -> bool:
        """Return whether the file was modified or replaced since the last call.

        The first call compares it with the file that was first read.
        """
        previous = self._stamp
        with read_errors(self.path):
            self._stamp = _open_shard_file(self).read_stamp()
        return previous != self._stamp


class _OpenFile:
    """A file descriptor, closed when the last reference is gone."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def read_stamp(self) -> tuple[int, ...]:
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns, status.st_ino


@lru_cache(_MOST_OPEN)
def _open_shard_file(shard: ShardFile) -> _OpenFile:
    return _OpenFile(shard.path)


class Tokens:
    """The token ids of one split, its shards joined end to end.

    Each block is verified when it is first read, and again if its shard is modified afterwards.
    """

    def __init__(self, shards: list[ShardFile], dtype: str, vocab_size: int) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.vocab_size = vocab_size
        self._shards = shards
        self._block_tokens = BLOCK_BYTES // self.dtype.itemsize
        self._starts = [0, *accumulate(self.shard_tokens)]  # of the shards, and the end
        self._verified = [
            np.zeros(-(-tokens // self._block_tokens), np.bool_) for tokens in self.shard_tokens
        ]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def shard_tokens(self) -> list[int]:
        """Number of tokens in each shard."""
        return [file.shard.tokens for file in self._shards]

    def set_vocab_size(self, vocab_size: int) -> None:
        """Set the vocabulary size that ids are checked against; mark all blocks as unverified."""
        self.vocab_size = vocab_size
        for blocks in self._verified:
            blocks[:] = False

    def read(self, start: int, count: int) -> Ids:
        """Return a copy of tokens [start, start + count). Raises DataError as `gather` does."""
        return self.gather(np.array([start]), count).reshape(count)

    def gather(self, starts: Ints, length: int) -> Ids:
        """Return windows (n, length) that begin at tokens `starts` (n,), in the shards' dtype.

        Verifies each block on first use. Raises DataError if a shard cannot be read, or if a block
        is damaged or holds an id outside the vocabulary.
        """
        out = np.empty((len(starts), length), dtype=self.dtype)
        while True:
            used = set[int]()
            for row, start in zip(out, starts.tolist(), strict=True):
                assert 0 <= start <= len(self) - length
                self._copy(start, row, used)
            # Check after copying, to catch writes between verifying and copying.
            changed = [index for index in used if self._shards[index].has_changed()]
            for index in changed:
                self._verified[index][:] = False
            if not changed:
                return out

    def verify(self) -> Iterator[MegatokenError]:
        """Verify every block and yield one DataError for each bad one."""
        for file, blocks in zip(self._shards, self._verified, strict=True):
            for number in range(len(blocks)):
                try:
                    self._verify_block(file, number)
                except MegatokenError as error:
                    yield error

    def _copy(self, start: int, out: Ids, used: set[int]) -> None:
        """Fill `out` with the tokens from `start` on; add the numbers of their shards to `used`."""
        index = bisect_right(self._starts, start) - 1
        start -= self._starts[index]
        while len(out):
            file, verified = self._shards[index], self._verified[index]
            count = min(len(out), file.shard.tokens - start)
            end = -(-(start + count) // self._block_tokens)
            for number in range(start // self._block_tokens, end):
                if not verified[number]:
                    self._verify_block(file, number)
                    verified[number] = True
            file.read(start, out[:count])
            used.add(index)
            out = out[count:]
            index += 1
            start = 0

    def _verify_block(self, file: ShardFile, number: int) -> None:
        ids = file.read_block(number)
        token = number * self._block_tokens
        where = f"{file.path}, byte offset {file.offset + number * BLOCK_BYTES:,} (token {token:,})"
        if file.shard.blocks:
            actual = hash_block(ids)
            expected = file.shard.block_hash(number)
            if actual != expected:
                what = f"shard is damaged: block {number} has hash {actual}, expected {expected}"
                raise DataError(what, where, RESTORE)
        if int(ids.max()) >= self.vocab_size:
            index = int(np.argmax(ids >= self.vocab_size))
            offset = file.offset + number * BLOCK_BYTES + index * ids.itemsize
            what = f"token id {int(ids[index])} is outside the vocabulary of {self.vocab_size:,}"
            where = f"{file.path}, byte offset {offset:,} (token {token + index:,})"
            raise DataError(what, where, "use the tokenizer that made these shards")


@dataclass(frozen=True)
class Dataset:
    """An open dataset. For external shards, the manifest is derived from their headers."""

    path: Path
    manifest: Manifest
    train: Tokens
    val: Tokens
    shards: tuple[ShardFile, ...]
    external_tokenizer: str  # used if the folder has no tokenizer

    @property
    def vocab_size(self) -> int:
        """The vocabulary size that ids are checked against."""
        return self.train.vocab_size

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the shards: the saved one, or that of `external_tokenizer`.

        Raises DataError if it is missing, damaged or not the one that the manifest records.
        """
        saved = self.path / "tokenizer"
        expected = self.manifest.tokenizer
        if not saved.is_dir() and not expected["fingerprint"]:
            loaded: Vocabulary = load_entry("tokenizer", "load")(self.external_tokenizer).vocabulary
            return loaded
        vocabulary = read_vocabulary(saved)
        if expected["fingerprint"] and vocabulary.describe() != expected:
            what = f"not the tokenizer that made the shards, {expected['name']!s:.64}"
            raise DataError(what, saved, RESTORE)
        return vocabulary

    def require_kind(self, kind: str, needed_by: str) -> None:
        """Raise DataError unless the rows are of this kind: text, or another that was prepared.

        needed_by: what needs this kind, for the error message.
        """
        actual = self.manifest.source.get("kind", "text")
        if actual != kind:
            what = f"{needed_by} needs {kind} data, this dataset holds {actual}"
            raise DataError(what, self.path, "prepare another one")

    def byte_counter(self, split: str, vocabulary: Vocabulary) -> CountBytes:
        """Return a function that counts the bytes of text in inputs and targets (B, T) of a split.

        It adds the bytes of the targets if the tokenizer is byte-level and did not change the text,
        or if the text was not measured. Otherwise, each target counts as the mean of the split.
        """
        sizes = self.manifest.bytes.get(split)
        is_exact = vocabulary.byte_lengths is not None
        if not sizes or (is_exact and sizes["text"] == sizes["decoded"]):
            return vocabulary.count_bytes
        n_targets = self.manifest.tokens(split) - 1
        return lambda _, targets_BT: sizes["text"] * int((targets_BT >= 0).sum()) / n_targets

    def set_vocab_size(self, vocab_size: int) -> None:
        """Set the vocabulary size that ids are checked against.

        This is needed for external shards, because they do not record the vocabulary size.
        """
        self.train.set_vocab_size(vocab_size)
        self.val.set_vocab_size(vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """The xxh3_128 hex that identifies the dataset.

        For a prepared dataset, it is the hash of the manifest, which contains a hash of every block
        of tokens. For external shards, it is a hash of the names, sizes, headers and up to 18
        blocks (256 KiB each) of every shard.
        """
        if all(file.shard.blocks for file in self.shards if file.shard.tokens):
            return self.manifest.fingerprint
        hasher = xxhash.xxh3_128()
        for file in self.shards:
            hasher.update(f"{file.shard.file}\n{file.shard.split}\n{file.size}\n".encode())
            with file.path.open("rb") as header:
                hasher.update(header.read(file.offset))
            last = -(-(file.size - file.offset) // BLOCK_BYTES) - 1
            samples = {number * last // (_SAMPLED_BLOCKS - 1) for number in range(_SAMPLED_BLOCKS)}
            for block in sorted(samples):
                hasher.update(file.read_block(block).data)
        return str(hasher.hexdigest())


def load_dataset(
    path: str | Path, *, external_tokenizer: str = "gpt2", report: Report = no_report
) -> Dataset:
    """Open a prepared dataset, or token shards of another program.

    path: a prepared folder, external shards, or an address such as s3://bucket/data, which is
    fetched first. External shards are .npy files, or .bin files of llm.c, modded-nanogpt or
    nanoGPT, given as a folder, a file or a glob pattern. external_tokenizer: the tokenizer of
    shards that do not record one. report: called with progress lines while data is fetched. Raises
    DataError, naming the file, if one is missing, damaged or not a token shard, and StorageError if
    the data cannot be fetched.
    """
    path = local_dataset(path, report)
    manifest, files = _list_shards(path, external_tokenizer)
    allow_open_files()
    for file in files:
        _check_header(file, manifest)
    vocab_size = manifest.tokenizer["vocab_size"]
    train, val = (
        Tokens([file for file in files if file.shard.split == split], manifest.dtype, vocab_size)
        for split in SPLITS
    )
    return Dataset(path, manifest, train, val, tuple(files), external_tokenizer)


def verify_dataset(path: Path) -> Iterator[MegatokenError]:
    """Verify every byte of a dataset; yield one MegatokenError for each defect.

    External shards record no hashes, so only their headers, sizes and ids are checked.
    """
    try:
        manifest, files = _list_shards(path, "gpt2")
    except MegatokenError as error:
        yield error
        return
    for file in files:
        try:
            _check_header(file, manifest)
        except MegatokenError as error:
            yield error
        else:
            yield from Tokens([file], manifest.dtype, manifest.tokenizer["vocab_size"]).verify()


def _list_shards(path: Path, external_tokenizer: str) -> tuple[Manifest, list[ShardFile]]:
    """Return the manifest and its shards.

    The manifest is read from the folder or, for external shards, derived by the room that reads
    their format: its entry takes (path, external_tokenizer) and returns None for other files.
    """
    with read_errors(path):
        if (path / MANIFEST_NAME).exists():
            manifest = read_manifest(path)
            return manifest, [
                ShardFile(shard, path / shard.file, manifest.dtype, HEADER_BYTES)
                for shard in manifest.shards
            ]
        if (path / PROGRESS_NAME).exists():
            fix = "run the same `megatoken prepare` again"
            raise DataError("dataset is not finished", path, fix)
        for name in list_entries("shards"):
            if found := load_entry("shards", name)(path, external_tokenizer):
                manifest, files = found
                return manifest, files
    fix = "check data.path, or make a dataset: megatoken prepare SOURCE --out DIR"
    if not (path.exists() or path.is_absolute()):
        fix = "it is relative to where the run began: start there, or give data.path=PATH"
    raise DataError(f"no dataset here: no {MANIFEST_NAME}, no .bin, no .npy", path, fix)


def _check_header(file: ShardFile, manifest: Manifest) -> None:
    """Raise DataError unless a prepared shard has the size and header that its manifest records."""
    shard = file.shard
    fingerprint = manifest.tokenizer["fingerprint"]
    if not (fingerprint or shard.header or shard.blocks):
        return  # external, made from its header
    with read_errors(file.path), file.path.open("rb") as opened:
        raw = opened.read(HEADER_BYTES)
        size = file.path.stat().st_size
    header = read_header(raw, file.path)
    n_blocks = -(-shard.tokens * file.dtype.itemsize // BLOCK_BYTES)
    for name, (actual, expected) in {
        "token type": (header.dtype, manifest.dtype),
        "token count": (header.tokens, shard.tokens),
        "size": (size, file.size),
        "tokenizer fingerprint": (header.fingerprint, fingerprint),
        "hash of the header": (hash_block(raw), shard.header),
        "digits of block hashes": (n_blocks * HASH_DIGITS, len(shard.blocks)),
    }.items():
        if actual != expected:
            what = f"shard does not fit its manifest: {name} is {actual}, expected {expected}"
            raise DataError(what, file.path, RESTORE)
