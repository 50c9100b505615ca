"""Open a dataset: a prepared folder, or token shards of other programs.

Only the manifest is read when a dataset is opened. A shard is checked against it when the shard is
first used, and a block of tokens whenever it is read. verify.py checks everything at once.
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.base.errors import DataError
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.system.address import is_address, strip_file_scheme
from megatoken.base.system.atomic_write import local_path, read_small_file
from megatoken.base.system.machine import allow_open_files
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

# Tokens kept in memory per split; more than the spans in use at a time (window_order.py).
CACHE_TOKENS = 640 << 20
_MOST_OPEN = 128  # shards in this process, which may open only 256 files on macOS
_SAMPLED_BLOCKS = 18  # per external shard, for the fingerprint: first, last and 16 between

Range = tuple[int, int]  # tokens [start, end)
Fetch = Callable[[int, int], None]
Report = Callable[[str], None]  # called with progress lines
ALL = "all"  # fetch a dataset before it is used


def no_report(line: str) -> None:
    """Discard a progress line."""


class ShardFile:
    """A shard file that can be read at any block.

    It is opened when it is first read, and closed once _MOST_OPEN others were read since. It is not
    memory-mapped, because a truncated file or a failing disk would then kill the process (SIGBUS).
    """

    def __init__(
        self, folder: "Folder", shard: Shard, dtype: str, offset: int, tokenizer: str = ""
    ) -> None:
        """shard: its row in the manifest. offset: number of bytes before the tokens. tokenizer:
        the fingerprint in its header; "" if external."""
        self.folder = folder
        self.shard = shard
        self.path = folder.path / shard.file
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

    @property
    def opened(self) -> "OpenShard":
        """The open file. Raises DataError as `open` does."""
        return _open_shard(self)

    def open(self) -> "OpenShard":
        """Open the file. Raises DataError if its size, header or hashes differ from the manifest's."""
        is_external = not (self.tokenizer or self.shard.hash)
        hashes = np.empty(0, np.uint64) if is_external else self.read_hashes()
        with read_errors(self.path):
            opened = OpenShard(os.open(self.path, os.O_RDONLY), hashes)
            raw = os.pread(opened.descriptor, HEADER_BYTES, 0)
            size = os.fstat(opened.descriptor).st_size
        if is_external:
            return opened
        header = read_header(raw, self.path)
        expected_raw = make_header(self.shard.tokens, self.dtype.name, self.tokenizer)
        for name, (actual, expected) in {
            "token type": (header.dtype, self.dtype.name),
            "token count": (header.tokens, self.shard.tokens),
            "size": (size, self.size),
            "tokenizer fingerprint": (header.fingerprint, self.tokenizer),
            "hash of the header": (hash_bytes(raw), hash_bytes(expected_raw)),
        }.items():
            if actual != expected:
                what = f"shard does not fit its manifest: {name} is {actual}, expected {expected}"
                raise DataError(what, self.path, RESTORE)
        return opened

    def read_block(self, number: int) -> Ids:
        """Return the ids of a block. Raises DataError if the file is too short or damaged."""
        opened = self.opened
        first = number * BLOCK_BYTES
        ids = np.empty(
            min(BLOCK_BYTES, self.size - self.offset - first) // self.dtype.itemsize, self.dtype
        )
        buffer = ids.data.cast("B")
        position = self.offset + first
        while buffer:
            with read_errors(f"{self.path}, byte offset {position:,}"):
                count = os.preadv(opened.descriptor, (buffer,), position)
            if not count:
                what = f"shard was truncated: {position:,} bytes, expected {self.size:,}"
                raise DataError(what, self.path, RESTORE)
            buffer = buffer[count:]
            position += count
        self.check_block(number, ids, str(self.path))
        return ids

    def check_block(self, number: int, block: Any, where: str) -> None:
        """Raise DataError unless a block has its hash. where: the file, for the error message."""
        if len(self.opened.hashes):
            actual, expected = (*hash_blocks(block), 0)[0], self.opened.hashes[number]
            if actual != expected:
                what = f"block {number} has hash {actual:016x}, expected {expected:016x}"
                token = number * BLOCK_BYTES // self.dtype.itemsize
                offset = self.offset + number * BLOCK_BYTES
                where = f"{where}, byte offset {offset:,} (token {token:,})"
                raise DataError(f"shard is damaged: {what}", where, RESTORE)

    def read_hashes(self) -> NDArray[np.uint64]:
        """Return the hashes of all blocks. Raises DataError if their file is damaged."""
        path = self.path.with_name(self.shard.hashes_file)
        content = self.folder.read_checked(path, HASH_BYTES * self.n_blocks, self.shard.hash)
        return np.frombuffer(content, "<u8")

    def load(self, first: int, end: int) -> None:
        """Fetch blocks [first, end) if the file is at an address."""


class OpenShard:
    """A file descriptor, closed when the last reference is gone, and the hashes of the blocks."""

    def __init__(self, descriptor: int, hashes: NDArray[np.uint64]) -> None:
        self.descriptor = descriptor
        self.hashes = hashes
        if descriptor >= 0:
            weakref.finalize(self, os.close, descriptor)


@lru_cache(_MOST_OPEN)
def _open_shard(file: ShardFile) -> OpenShard:
    return file.open()


class Folder:
    """A folder with a manifest and shards: a dataset or a part of one.

    where: its address or its path, for messages.
    """

    loads: "Loads | None" = None  # of blocks that are fetched when they are first read

    def __init__(self, path: Path, where: str = "") -> None:
        self.path = path
        self.where = where or str(path)

    def below(self, name: str) -> Self:
        """Return the folder of a part."""
        folder = copy(self)
        folder.path = self.path / name
        return folder

    def open_shard(self, shard: Shard, dtype: str, tokenizer: str) -> ShardFile:
        """Return a shard of a prepared dataset."""
        return ShardFile(self, shard, dtype, HEADER_BYTES, tokenizer)

    def read_checked(self, path: Path, limit: int, expected: str) -> bytes:
        """Return the content of a file of at most `limit` bytes with this hash.

        Raises DataError if it is missing or damaged.
        """
        with read_errors(path):
            return check_hash(read_small_file(path, limit), expected, path)


class Loads(Protocol):
    """Loads of blocks at an address (store/stream.py)."""

    def load(self, fetch: Fetch, now: Iterable[Range], later: Iterable[Range]) -> None:
        """Call `fetch` with each range in a thread; return when all of `now` are done."""
        ...

    def cancel(self) -> None:
        """Cancel the calls that have not begun."""
        ...


class ShardList:
    """Consecutive shards of a split. tokens: in all. list_files: called on first use."""

    def __init__(
        self, tokens: int, list_files: Callable[[], Sequence[ShardFile]], loads: Loads | None = None
    ) -> None:
        self.tokens = tokens
        self.loads = loads
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
        self.loads: Loads | None = next((each.loads for each in lists if each.loads), None)
        self._cached_block = lru_cache(CACHE_TOKENS // self._block_tokens)(self.read_block)

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

    def load(self, now: Iterable[Range], later: Iterable[Range] = ()) -> None:
        """Fetch the blocks that hold tokens [start, end) of ranges, if they are at an address.

        Returns when all of `now` are in the cache. Raises DataError and StorageError.
        """
        if self.loads:
            self.loads.load(self._load, now, later)

    def _load(self, start: int, end: int) -> None:
        while start < end:
            file, at = self._locate(start)
            stop = min(at + end - start, file.shard.tokens)
            file.load(at // self._block_tokens, -(-stop // self._block_tokens))
            start += stop - at

    def _copy(self, start: int, out: Ids) -> None:
        """Fill `out` with the tokens from `start` on."""
        while len(out):
            file, at = self._locate(start)
            number, offset = divmod(at, self._block_tokens)
            found = self._cached_block(file, number)[offset : offset + len(out)]
            out[: len(found)] = found
            start += len(found)
            out = out[len(found) :]

    def _locate(self, token: int) -> tuple[ShardFile, int]:
        """Return the shard that holds a token, and the token's index in it."""
        index = bisect_right(self._starts, token) - 1
        shards, at = self.lists[index], token - self._starts[index]
        shard = bisect_right(shards.starts, at) - 1
        return shards.files[shard], at - shards.starts[shard]

    def read_block(self, file: ShardFile, number: int) -> Ids:
        """Return the ids of a shard's block. Raises DataError as `gather` does."""
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
    """An open dataset. For external shards, the manifest is derived from their headers.

    path: its folder, in the cache if it is at an address. where: its address or its path.
    """

    path: Path
    where: str
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
            raise DataError(what, self.where, "prepare another one")

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


def open_folder(path: str | Path, cache: str = ALL, report: Report = no_report) -> Folder:
    """Return the folder of a dataset, in the cache if it is at an address. Raises as `load_dataset`."""
    path = strip_file_scheme(str(path))
    if not is_address(path):
        return Folder(local_path(path))
    limit = None
    if cache != ALL:
        limit = round(float(cache[:-2]) * {"MB": 1e6, "GB": 1e9, "TB": 1e12}[cache[-2:]])
    folder: Folder = load_entry("address", "dataset")(path, limit, report)
    return folder


def load_dataset(
    path: str | Path,
    *,
    external_tokenizer: str = "gpt2",
    cache: str = ALL,
    report: Report = no_report,
) -> Dataset:
    """Open a prepared dataset, or token shards of another program.

    path: a prepared folder, external shards, or an address such as s3://bucket/data. External
    shards are .npy files, or .bin files of llm.c, modded-nanogpt or nanoGPT, given as a folder, a
    file or a glob pattern. external_tokenizer: the tokenizer of shards that do not record one.
    cache: size limit of the local cache of a prepared dataset at an address, such as 100GB; blocks
    are fetched as they are used. "all" fetches the whole dataset first, as is done for external
    shards. report: called with progress lines while data is fetched. Raises DataError, naming the
    file, if one is missing, damaged or not a token shard, and StorageError if the data cannot be
    fetched.
    """
    folder = open_folder(path, cache, report)
    manifest, shards = list_shards(folder, external_tokenizer)
    allow_open_files()
    vocab_size = manifest.tokenizer["vocab_size"]
    train, val = (Tokens(shards[split], manifest.dtype, vocab_size) for split in SPLITS)
    return Dataset(folder.path, folder.where, manifest, train, val, external_tokenizer)


_Lists = dict[str, list[ShardList]]  # by split


def list_shards(folder: Folder, external_tokenizer: str) -> tuple[Manifest, _Lists]:
    """Return the manifest and its shards.

    The manifest is read from the folder or, for external shards, derived by the room that reads
    their format: its entry takes (folder, external_tokenizer) and returns None for other files.
    """
    path = folder.path
    with read_errors(path):
        if (path / MANIFEST_NAME).exists():
            manifest = read_manifest(path)
            files = _open_shards(folder, manifest)
            lists = _divide(files, folder.loads)
            for split in SPLITS:
                lists[split] += [
                    ShardList(
                        part.tokens[split],
                        partial(_list_part, folder.below(part.name), part, split),
                        folder.loads,
                    )
                    for part in manifest.parts
                ]
            return manifest, lists
        if (path / PROGRESS_NAME).exists():
            fix = "run the same `megatoken prepare` again"
            raise DataError("dataset is not finished", path, fix)
        for name in list_entries("shards"):
            if found := load_entry("shards", name)(folder, external_tokenizer):
                manifest, files = found
                return manifest, _divide(files)
    fix = "check data.path, or make a dataset: megatoken prepare SOURCE --out DIR"
    if not (path.exists() or path.is_absolute()):
        fix = "start in the folder it is relative to, give data.path=PATH, or make it: megatoken prepare"
    raise DataError(f"no dataset here: no {MANIFEST_NAME}, no .bin, no .npy", path, fix)


def _open_shards(folder: Folder, manifest: Manifest) -> list[ShardFile]:
    tokenizer = manifest.tokenizer["fingerprint"]
    return [folder.open_shard(shard, manifest.dtype, tokenizer) for shard in manifest.shards]


def _divide(files: Sequence[ShardFile], loads: Loads | None = None) -> _Lists:
    """Return the shards of each split."""
    lists = {}
    for split in SPLITS:
        chosen = [file for file in files if file.shard.split == split]
        tokens = sum(file.shard.tokens for file in chosen)
        lists[split] = [ShardList(tokens, partial(tuple, chosen), loads)]
    return lists


def _list_part(folder: Folder, part: Part, split: str) -> list[ShardFile]:
    """Return the shards of a split in a part. Raises DataError if its manifest is damaged."""
    where = folder.path / MANIFEST_NAME
    manifest = parse_manifest(folder.read_checked(where, LARGEST_MANIFEST, part.hash), where)
    files = _open_shards(folder, manifest)
    return [file for file in files if file.shard.split == split]
