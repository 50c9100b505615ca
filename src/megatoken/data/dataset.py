"""Open a dataset: a prepared folder, or token shards of other programs.

Only the manifest is read when a dataset is opened. A shard is checked against it when the shard is
first used, and a block of tokens whenever it is read. `verify_dataset` checks everything at once.
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.base.errors import DataError, MegatokenError
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.system.atomic_write import read_small_file
from megatoken.base.system.machine import allow_open_files
from megatoken.data.remote import Report, local_dataset, no_report
from megatoken.data.shard_format import (
    BLOCK_BYTES,
    HASH_BYTES,
    HEADER_BYTES,
    LARGEST_MANIFEST,
    MANIFEST_NAME,
    PROGRESS_NAME,
    RESTORE,
    SPLITS,
    Manifest,
    Part,
    Shard,
    check_hash,
    hash_blocks,
    hash_bytes,
    make_header,
    parse_manifest,
    read_errors,
    read_header,
    read_manifest,
)
from megatoken.data.vocabulary import CountBytes, Ids, Ints, Vocabulary, read_vocabulary

# Tokens in memory, per split: all spans that a process uses at a time (window_order.py), and more.
CACHE_TOKENS = 640 << 20
_MOST_OPEN = 128  # shards in this process, which may open only 256 files on macOS
_SAMPLED_BLOCKS = 18  # per external shard, for the fingerprint: first, last and 16 between


class ShardFile:
    """A shard file that can be read at any block.

    It is opened when it is first read, and closed once _MOST_OPEN others were read since. It is not
    memory-mapped, because a truncated file or a failing disk would then kill the process (SIGBUS).
    """

    def __init__(self, shard: Shard, path: Path, dtype: str, offset: int, tokenizer: str) -> None:
        """shard: its row in the manifest. offset: number of bytes before the tokens. tokenizer:
        the fingerprint in its header; "" if external."""
        self.shard = shard
        self.path = path
        self.offset = offset
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.tokenizer = tokenizer

    @property
    def size(self) -> int:
        """The size in bytes that the file should have."""
        return self.offset + self.shard.tokens * self.dtype.itemsize

    @property
    def n_blocks(self) -> int:
        """Number of blocks of BLOCK_BYTES; the last one can be shorter."""
        return -(-(self.size - self.offset) // BLOCK_BYTES)

    def check(self) -> None:
        """Raise DataError unless the file has the size, header and hashes of its manifest."""
        _open_shard(self)

    def read_block(self, number: int) -> Ids:
        """Return the ids of a block. Raises DataError if the file is too short or damaged."""
        opened = _open_shard(self)
        per_block = BLOCK_BYTES // self.dtype.itemsize
        ids = np.empty(min(per_block, self.shard.tokens - number * per_block), self.dtype)
        buffer = ids.data.cast("B")
        position = start = self.offset + number * BLOCK_BYTES
        while buffer:
            with read_errors(f"{self.path}, byte offset {position:,}"):
                count = os.preadv(opened.descriptor, (buffer,), position)
            if not count:
                what = f"shard was truncated: {position:,} bytes, expected {self.size:,}"
                raise DataError(what, self.path, RESTORE)
            buffer = buffer[count:]
            position += count
        if len(opened.hashes):
            (actual,) = hash_blocks(ids)
            if actual != opened.hashes[number]:
                what = (
                    f"block {number} has hash {actual:016x}, expected {opened.hashes[number]:016x}"
                )
                where = f"{self.path}, byte offset {start:,} (token {number * per_block:,})"
                raise DataError(f"shard is damaged: {what}", where, RESTORE)
        return ids

    def check_header(self, descriptor: int) -> NDArray[np.uint64]:
        """Check the open file against the manifest; return the hashes of its blocks, if it has any."""
        if not (self.tokenizer or self.shard.hash):
            return np.empty(0, np.uint64)  # external, made from its header
        raw = os.pread(descriptor, HEADER_BYTES, 0)
        header = read_header(raw, self.path)
        expected_raw = make_header(self.shard.tokens, self.dtype.name, self.tokenizer)
        for name, (actual, expected) in {
            "token type": (header.dtype, self.dtype.name),
            "token count": (header.tokens, self.shard.tokens),
            "size": (os.fstat(descriptor).st_size, self.size),
            "tokenizer fingerprint": (header.fingerprint, self.tokenizer),
            "hash of the header": (hash_bytes(raw), hash_bytes(expected_raw)),
        }.items():
            if actual != expected:
                what = f"shard does not fit its manifest: {name} is {actual}, expected {expected}"
                raise DataError(what, self.path, RESTORE)
        return np.frombuffer(self._read_hashes(), "<u8")

    def _read_hashes(self) -> bytes:
        path = self.path.with_name(self.shard.hashes_file)
        with read_errors(path):
            return check_hash(
                read_small_file(path, HASH_BYTES * self.n_blocks), self.shard.hash, path
            )


class _OpenShard:
    """A file descriptor, closed when the last reference is gone, and the hashes of the blocks."""

    def __init__(self, file: ShardFile) -> None:
        with read_errors(file.path):
            self.descriptor = os.open(file.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self.descriptor)
            self.hashes = file.check_header(self.descriptor)


_open_shard = lru_cache(_MOST_OPEN)(_OpenShard)


class ShardList:
    """Consecutive shards of a split. tokens: in all. list_files: called on first use."""

    def __init__(self, tokens: int, list_files: Callable[[], Sequence[ShardFile]]) -> None:
        self.tokens = tokens
        self._list_files = list_files

    @cached_property
    def files(self) -> Sequence[ShardFile]:
        """The shards. Raises DataError if the manifest of a part is missing or damaged."""
        return self._list_files()

    @cached_property
    def starts(self) -> list[int]:
        """The token at which each shard begins, and the number of tokens."""
        return [0, *accumulate(file.shard.tokens for file in self.files)]


class Tokens:
    """The token ids of one split, its shards joined end to end."""

    def __init__(self, lists: Sequence[ShardList], dtype: str, vocab_size: int) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.vocab_size = vocab_size
        self.lists = lists
        self._block_tokens = BLOCK_BYTES // self.dtype.itemsize
        self._starts = [0, *accumulate(shards.tokens for shards in lists)]
        self._cached_block = lru_cache(CACHE_TOKENS // self._block_tokens)(self._read_block)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def files(self) -> Iterator[ShardFile]:
        """The shards. Raises DataError if the manifest of a part is missing or damaged."""
        return (file for shards in self.lists for file in shards.files)

    @property
    def shard_tokens(self) -> list[int]:
        """Number of tokens in each shard."""
        return [file.shard.tokens for file in self.files]

    def set_vocab_size(self, vocab_size: int) -> None:
        """Set the vocabulary size that ids are checked against."""
        self.vocab_size = vocab_size
        self._cached_block.cache_clear()

    def read(self, start: int, count: int) -> Ids:
        """Return a copy of tokens [start, start + count). Raises DataError as `gather` does."""
        return self.gather(np.array([start]), count).reshape(count)

    def gather(self, starts: Ints, length: int) -> Ids:
        """Return windows (n, length) that begin at tokens `starts` (n,), in the shards' dtype.

        Raises DataError if a shard cannot be read, or if a block is damaged or holds an id outside
        the vocabulary.
        """
        out = np.empty((len(starts), length), dtype=self.dtype)
        for row, start in zip(out, starts.tolist(), strict=True):
            assert 0 <= start <= len(self) - length
            self._copy(start, row)
        return out

    def verify(self) -> Iterator[MegatokenError]:
        """Verify every block and yield one DataError for each bad one."""
        for file in self.files:
            for number in range(file.n_blocks):
                try:
                    self._read_block(file, number)
                except MegatokenError as error:
                    yield error

    def _copy(self, start: int, out: Ids) -> None:
        """Fill `out` with the tokens from `start` on."""
        while len(out):
            index = bisect_right(self._starts, start) - 1
            shards = self.lists[index]
            in_list = start - self._starts[index]
            shard = bisect_right(shards.starts, in_list) - 1
            number, offset = divmod(in_list - shards.starts[shard], self._block_tokens)
            found = self._cached_block(shards.files[shard], number)[offset : offset + len(out)]
            out[: len(found)] = found
            start += len(found)
            out = out[len(found) :]

    def _read_block(self, file: ShardFile, number: int) -> Ids:
        ids = file.read_block(number)
        if int(ids.max()) >= self.vocab_size:
            index = int(np.argmax(ids >= self.vocab_size))
            token = number * self._block_tokens + index
            what = f"token id {int(ids[index])} is outside the vocabulary of {self.vocab_size:,}"
            offset = file.offset + token * ids.itemsize
            where = f"{file.path}, byte offset {offset:,} (token {token:,})"
            raise DataError(what, where, "use the tokenizer that made these shards")
        return ids


@dataclass(frozen=True)
class Dataset:
    """An open dataset. For external shards, the manifest is derived from their headers."""

    path: Path
    manifest: Manifest
    train: Tokens
    val: Tokens
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

        For a prepared dataset, it is the hash of the manifest, which covers every block of tokens.
        For external shards, it is a hash of the names, sizes, headers and up to 18 blocks of every
        shard.
        """
        if self.manifest.tokenizer["fingerprint"]:
            return self.manifest.fingerprint
        hasher = xxhash.xxh3_128()
        for file in (*self.train.files, *self.val.files):
            hasher.update(f"{file.shard.file}\n{file.shard.split}\n{file.size}\n".encode())
            with file.path.open("rb") as header:
                hasher.update(header.read(file.offset))
            last = file.n_blocks - 1
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
    manifest, shards = _list_shards(path, external_tokenizer)
    allow_open_files()
    vocab_size = manifest.tokenizer["vocab_size"]
    train, val = (Tokens(shards[split], manifest.dtype, vocab_size) for split in SPLITS)
    return Dataset(path, manifest, train, val, external_tokenizer)


def verify_dataset(path: Path) -> Iterator[MegatokenError]:
    """Verify every byte of a dataset; yield one MegatokenError for each defect.

    External shards record no hashes, so only their headers, sizes and ids are checked.
    """
    try:
        manifest, shards = _list_shards(path, "gpt2")
    except MegatokenError as error:
        yield error
        return
    vocab_size = manifest.tokenizer["vocab_size"]
    for each in (each for split in SPLITS for each in shards[split]):
        try:
            files = each.files
        except MegatokenError as error:
            yield error
            continue
        for file in files:
            try:
                file.check()
            except MegatokenError as error:
                yield error
            else:
                alone = ShardList(file.shard.tokens, partial(tuple, [file]))
                yield from Tokens([alone], manifest.dtype, vocab_size).verify()


_Lists = dict[str, list[ShardList]]  # by split


def _list_shards(path: Path, external_tokenizer: str) -> tuple[Manifest, _Lists]:
    """Return the manifest and its shards.

    The manifest is read from the folder or, for external shards, derived by the room that reads
    their format: its entry takes (path, external_tokenizer) and returns None for other files.
    """
    with read_errors(path):
        if (path / MANIFEST_NAME).exists():
            manifest = read_manifest(path)
            if manifest.parts:
                return manifest, {
                    split: [
                        ShardList(
                            part.tokens[split], partial(_list_part, path, part, manifest, split)
                        )
                        for part in manifest.parts
                    ]
                    for split in SPLITS
                }
            files = _list_files(path, manifest)
            return manifest, _divide(files)
        if (path / PROGRESS_NAME).exists():
            fix = "run the same `megatoken prepare` again"
            raise DataError("dataset is not finished", path, fix)
        for name in list_entries("shards"):
            if found := load_entry("shards", name)(path, external_tokenizer):
                manifest, files = found
                return manifest, _divide(files)
    fix = "check data.path, or make a dataset: megatoken prepare SOURCE --out DIR"
    if not (path.exists() or path.is_absolute()):
        fix = "it is relative to where the run began: start there, or give data.path=PATH"
    raise DataError(f"no dataset here: no {MANIFEST_NAME}, no .bin, no .npy", path, fix)


def _list_files(path: Path, manifest: Manifest) -> list[ShardFile]:
    tokenizer = manifest.tokenizer["fingerprint"]
    return [
        ShardFile(shard, path / shard.file, manifest.dtype, HEADER_BYTES, tokenizer)
        for shard in manifest.shards
    ]


def _divide(files: Sequence[ShardFile]) -> _Lists:
    """Return the shards of each split."""
    lists = {}
    for split in SPLITS:
        chosen = [file for file in files if file.shard.split == split]
        lists[split] = [
            ShardList(sum(file.shard.tokens for file in chosen), partial(tuple, chosen))
        ]
    return lists


def _list_part(path: Path, part: Part, dataset: Manifest, split: str) -> list[ShardFile]:
    """Return the shards of a split in a part. Raises DataError if it does not fit the dataset."""
    where = path / part.name / MANIFEST_NAME
    with read_errors(where):
        content = check_hash(read_small_file(where, LARGEST_MANIFEST), part.hash, where)
    files = _list_files(path / part.name, parse_manifest(content, where))
    return [file for file in files if file.shard.split == split]
