"""Read a prepared dataset at an address while training on it, through a cache of bounded size.

The cache is a folder like the dataset's, in which shards are sparse files. A block that is not
there has a wrong hash, like one that is damaged; it is fetched, verified and written to its place.
So the cache needs no index, all processes of a machine share it, and a killed process leaves
nothing to repair.
"""

import os
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np

from megatoken.base.console import format_quantity
from megatoken.base.errors import DataError, StorageError
from megatoken.base.system.atomic_write import replace_file, storage_errors
from megatoken.base.system.file_lock import lock_folder
from megatoken.data.dataset import Fetch, Folder, OpenShard, Range, ShardFile
from megatoken.data.remote import Report, no_report
from megatoken.data.shard_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MANIFEST_NAME,
    Shard,
    check_hash,
    parse_manifest,
)
from megatoken.data.vocabulary import Ids
from megatoken.store.datasets import cache_folder, is_pattern, list_tokenizer
from megatoken.store.objects import MissingObjectError, ObjectStore

LOADS = 16  # requests at once
TRIES = 3  # for a block that arrives damaged
RESERVE = 10**9  # bytes of the disk that the cache leaves free
SWEEPS = 32  # the size of the cache is measured whenever 1/SWEEPS of its limit was written


class StreamedFolder(Folder):
    """A prepared dataset at an address, or a part of one. path: its folder in the cache."""

    def __init__(self, store: ObjectStore, cache: "BlockCache") -> None:
        super().__init__(cache.path)
        self.loads = ThreadedLoads()
        self.store = store
        self.cache = cache

    def open_shard(self, shard: Shard, dtype: str, tokenizer: str) -> "StreamedShard":
        return StreamedShard(self, shard, dtype, HEADER_BYTES, tokenizer)

    def read_checked(self, path: Path, limit: int, expected: str) -> bytes:
        """Return the content of a small file with this hash; fetch it if it is not in the cache."""
        with suppress(DataError):
            return super().read_checked(path, limit, expected)
        name = self.name(path)
        content = check_hash(self.store.read(name), expected, self.store.at(name))
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            replace_file(path, content)
        return content

    def name(self, path: Path) -> str:
        """Return the name in the store of a file in the cache."""
        return path.relative_to(self.cache.path).as_posix()


class ThreadedLoads:
    """Fetches blocks in threads. Used by several threads, each with its own `fetch`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOADS, "megatoken-load")
        self._pending: dict[Fetch, dict[Range, Future[None]]] = {}

    def load(self, fetch: Fetch, now: Iterable[Range], later: Iterable[Range]) -> None:
        needed = list(now)
        pending: dict[Range, Future[None]] = {}
        for each in chain(needed, later):
            earlier = self._pending.get(fetch, {}).get(each)
            if earlier is None or (earlier.done() and earlier.exception()):
                earlier = pending.get(each) or self._threads.submit(fetch, *each)
            pending[each] = earlier
        self._pending[fetch] = pending
        for each in needed:
            pending[each].result()

    def cancel(self) -> None:
        for pending in self._pending.values():
            for future in pending.values():
                future.cancel()
        self._pending.clear()


class BlockCache:
    """Limits the size of the shards in a folder, and keeps RESERVE bytes of the disk free.

    limit: the size, in bytes.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self._limit = self._allowed = limit
        self._written = limit  # since the size was last measured, which is done at once

    def write(self, shard: "StreamedShard", number: int, block: memoryview) -> None:
        """Write a block, if there is room. When the cache is full, empty the oldest shards."""
        with suppress(OSError):  # without room, training goes on without the cache
            if self._written * SWEEPS >= self._allowed > 0:
                self._written = 0
                self._sweep()
            if self._allowed > 0:
                position = shard.offset + number * BLOCK_BYTES
                self._written += os.pwrite(shard.opened.descriptor, block, position)

    def _sweep(self) -> None:
        shards = [(path, path.stat()) for path in self.path.rglob("*.bin")]
        used = sum(512 * status.st_blocks for _, status in shards)
        self._allowed = min(self._limit, used + shutil.disk_usage(self.path).free - RESERVE)
        for path, status in sorted(shards, key=lambda each: each[1].st_mtime_ns):
            if used * SWEEPS <= self._allowed * (SWEEPS - 1):
                break
            os.truncate(path, 0)  # not removed, because processes have it open
            used -= 512 * status.st_blocks


class StreamedShard(ShardFile):
    """A shard whose blocks are fetched when they are first read."""

    folder: StreamedFolder

    def open(self) -> OpenShard:
        hashes = self.read_hashes()
        descriptor = -1
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        return OpenShard(descriptor, hashes)

    def read_block(self, number: int) -> Ids:
        with suppress(DataError):
            return super().read_block(number)
        return self._fetch(number, number + 1)

    def load(self, first: int, end: int) -> None:
        missing = [number for number in range(first, end) if not self._is_cached(number)]
        if missing:
            self._fetch(missing[0], missing[-1] + 1)

    def _is_cached(self, number: int) -> bool:
        with suppress(DataError):
            super().read_block(number)
            return True
        return False

    def _fetch(self, first: int, end: int, tries: int = TRIES) -> Ids:
        """Fetch blocks [first, end) in one request into the cache; return the ids of the last one.

        Raises DataError for a block that is damaged each time, and StorageError.
        """
        store, name = self.folder.store, self.folder.name(self.path)
        start = self.offset + first * BLOCK_BYTES
        try:
            content = store.read(name, start, min(self.offset + end * BLOCK_BYTES, self.size))
        except StorageError as error:
            raise StorageError(f"cannot fetch block {first:,}: {error}") from error
        for number in range(first, end):
            block = memoryview(content)[(number - first) * BLOCK_BYTES :][:BLOCK_BYTES]
            try:
                self.check_block(number, block, store.at(name))
            except DataError:
                if tries == 1:
                    raise
                ids = self._fetch(number, number + 1, tries - 1)
            else:
                self.folder.cache.write(self, number, block)
                ids = np.frombuffer(block, self.dtype)
        return ids


def open_stream(address: str, limit: int, report: Report = no_report) -> StreamedFolder | None:
    """Return the prepared text at an address; None if something else or nothing is there.

    limit: the most bytes to keep in the cache. Raises DataError if the manifest is damaged, and
    StorageError if the store or the cache fails.
    """
    if is_pattern(address):
        return None
    store = ObjectStore(address)
    try:
        content = store.read(MANIFEST_NAME)
    except MissingObjectError:
        return None
    manifest = parse_manifest(content, store.at(MANIFEST_NAME))
    if manifest.source.get("kind", "text") != "text":
        return None  # conversations have more files, which are not streamed
    path = cache_folder("streams", address, content)
    tokenizer = list_tokenizer(store)
    if tokenizer.list_missing(path) or not (path / MANIFEST_NAME).exists():
        with storage_errors(path), lock_folder(path, "download", on_wait=lambda: None):
            tokenizer.fetch(path)
            replace_file(path / MANIFEST_NAME, content, durable=True)
    report(f"streaming {address}; at most {format_quantity(limit, 'B')} are kept in {path}")
    return StreamedFolder(store, BlockCache(path, limit))
