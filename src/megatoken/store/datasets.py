"""Fetch datasets at an address such as s3://bucket/data into the cache, and upload prepared ones.

All shards are fetched before the first step; stream.py fetches blocks as they are used. The folder
in the cache is named after the address and a hash of the manifest (or of the listing of external shards).
One process per machine fetches while the others wait.
"""

import re
import shutil
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import xxhash

from megatoken.base.console import format_quantity
from megatoken.base.errors import DataError, StorageError
from megatoken.base.system.atomic_write import hash_file, replace_file, storage_errors
from megatoken.base.system.environment import megatoken_cache
from megatoken.base.system.file_lock import lock_folder
from megatoken.data.remote import Report, no_report
from megatoken.data.shard_format import (
    BLOCK_BYTES,
    HASH_BYTES,
    HEADER_BYTES,
    MANIFEST_NAME,
    PROGRESS_NAME,
    Shard,
    check_hash,
    has_magic,
    hash_blocks,
    make_header,
    parse_manifest,
    read_header,
)
from megatoken.store.objects import MissingObjectError, ObjectStore, Read, StoredFiles

LISTING_NAME = "listing.txt"  # in the cache, once all external shards that it lists are there
SUFFIXES = (".bin", ".npy")
REPORT_SECONDS = 10.0
READ_BLOCKS = 64  # blocks read at once


@dataclass(frozen=True)
class RemoteDataset(StoredFiles):
    """A dataset at an address.

    n_shards: 0 for external shards, which have no hashes. marker, content: name and content of the
    file that is written to the cache last, to show that the copy is complete.
    """

    n_shards: int
    marker: str
    content: bytes


def list_tokenizer(store: ObjectStore) -> StoredFiles:
    """Return the files of a dataset's tokenizer."""
    listed = store.list("tokenizer").items()
    sizes = {name: info.bytes for name, info in listed if name.count("/") == 1}
    return StoredFiles(store, sizes, lambda _name, _read: "", _damaged)


def is_pattern(address: str) -> bool:
    """Return whether an address names external shards: one, or a glob pattern."""
    last = address.rstrip("/").rpartition("/")[2]
    return last.endswith(SUFFIXES) or any(char in last for char in "*?[")


def fetch_dataset(address: str, report: Report = no_report) -> Path:
    """Fetch the dataset or external shards at an address; return their folder in the cache.

    Files that an earlier call fetched are reused. Raises DataError if the address has no dataset or
    a damaged shard, and StorageError if fetching fails.

    report: called with a progress line when a download starts, and every REPORT_SECONDS.
    """
    remote = list_remote(address)
    folder = cache_folder("datasets", address, remote.content)
    next_report = time.monotonic() + REPORT_SECONDS

    def count_missing() -> int:
        return sum(remote.sizes[name] for name in remote.list_missing(folder))

    def report_progress() -> None:
        nonlocal next_report
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + REPORT_SECONDS
            total = sum(remote.sizes.values())
            done = format_quantity(total - count_missing(), "B")
            report(f"{done} of {format_quantity(total, 'B')} fetched")

    with storage_errors(folder), lock_folder(folder, "download", on_wait=report_progress):
        needed = count_missing()
        if needed or not (folder / remote.marker).exists():
            free = shutil.disk_usage(folder).free
            if free < needed:
                what = f"no room to fetch {address}: {needed:,} bytes needed, {free:,} free"
                raise StorageError(what, folder, "make room, or set MEGATOKEN_CACHE")
            report(f"fetching {format_quantity(needed, 'B')} from {address} into {folder}")
            remote.fetch(folder, report_progress)
            replace_file(folder / remote.marker, remote.content, durable=True)
    return folder


def list_remote(address: str) -> RemoteDataset:
    """List the dataset or external shards at an address: a folder, a shard, or a glob pattern.

    Raises DataError if there is no dataset or its upload has not finished, and StorageError if the
    store cannot be read.
    """
    if is_pattern(address):
        folder, _, last = address.rstrip("/").rpartition("/")
        return _list_external(ObjectStore(folder), last)
    store = ObjectStore(address)
    try:
        raw = store.read(MANIFEST_NAME)
    except MissingObjectError:
        return _list_external(store, "*")
    manifest = parse_manifest(raw, store.at(MANIFEST_NAME))
    sizes = dict(list_tokenizer(store).sizes)
    if names := manifest.source.get("files_beside"):  # of conversations
        sizes |= {name: info.bytes for name, info in store.list().items() if name in names}
    shards: dict[str, tuple[ObjectStore, Shard]] = {}
    for part in manifest.parts:
        where = f"{part.name}/{MANIFEST_NAME}"
        try:
            content = check_hash(store.read(where), part.hash, store.at(where))
        except MissingObjectError as error:
            raise _damaged(store.at(where), "its manifest is missing") from error
        sizes[where] = len(content)
        for shard in parse_manifest(content, store.at(where)).shards:
            shards[f"{part.name}/{shard.file}"] = store.below(part.name), shard
    shards |= {shard.file: (store, shard) for shard in manifest.shards}
    token_bytes = np.dtype(manifest.dtype).itemsize
    for name, (_, shard) in shards.items():
        n_bytes = shard.tokens * token_bytes
        sizes[name] = HEADER_BYTES + n_bytes
        hashes = Path(name).with_name(shard.hashes_file).as_posix()
        sizes[hashes] = -(-n_bytes // BLOCK_BYTES) * HASH_BYTES

    def find_damage(name: str, read: Read) -> str:
        if name not in shards:
            return ""
        folder, shard = shards[name]
        header = make_header(shard.tokens, manifest.dtype, manifest.tokenizer["fingerprint"])
        return find_shard_damage(folder, shard, header, sizes[name], read)

    return RemoteDataset(store, sizes, find_damage, _damaged, len(shards), MANIFEST_NAME, raw)


def _list_external(store: ObjectStore, pattern: str) -> RemoteDataset:
    objects = {
        name: info
        for name, info in sorted(store.list().items())
        if "/" not in name and name.endswith(SUFFIXES) and fnmatchcase(name, pattern)
    }
    if not objects:
        fix = "check the address: `megatoken prepare SOURCE --out ADDRESS` makes one"
        raise DataError("no dataset here", store.at(pattern), fix)
    first = next(iter(objects))
    head = store.read(first, 0, HEADER_BYTES)
    if has_magic(head) and read_header(head, store.at(first)).fingerprint:
        what = f"shards of megatoken without their {MANIFEST_NAME}"
        fix = "run the same `megatoken prepare` again, or name the folder"
        raise DataError(what, store.at(first), fix)
    listing = "".join(f"{name} {info.bytes} {info.stamp}\n" for name, info in objects.items())
    sizes = {name: info.bytes for name, info in objects.items()}
    content = listing.encode()
    return RemoteDataset(store, sizes, lambda _name, _read: "", _damaged, 0, LISTING_NAME, content)


def find_shard_damage(
    folder: ObjectStore, shard: Shard, header: bytes, size: int, read: Read
) -> str:
    """Describe how a shard differs from its header and block hashes; return "" if it does not."""
    if read(0, HEADER_BYTES) != header:
        return "its header differs from the manifest"
    name = shard.hashes_file
    hashes = np.frombuffer(check_hash(folder.read(name), shard.hash, folder.at(name)), "<u8")
    step = READ_BLOCKS * BLOCK_BYTES
    for start in range(HEADER_BYTES, size, step):
        first = (start - HEADER_BYTES) // BLOCK_BYTES
        found = hash_blocks(read(start, min(start + step, size)))
        bad = np.flatnonzero(found != hashes[first : first + len(found)])
        if len(bad):
            expected = hashes[first + bad[0]]
            return f"block {first + bad[0]} has hash {found[bad[0]]:016x}, expected {expected:016x}"
    return ""


def begin_upload(address: str) -> Path:
    """Mark an address as unfinished; return the local folder in which to prepare its dataset.

    Raises StorageError if the address is not writable, to fail before hours of work.
    """
    store = ObjectStore(address)
    if store.size(MANIFEST_NAME) is None:
        store.write(PROGRESS_NAME, b"{}\n")
    return cache_folder("prepared", address, b"")


def upload_dataset(folder: Path, address: str, report: Report) -> None:
    """Upload a prepared folder and verify every file; the manifest comes last.

    Raises DataError if another dataset is at the address, and StorageError if the store fails.
    """
    store = ObjectStore(address)
    if store.size(MANIFEST_NAME) is None:
        files = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".") and path.name != MANIFEST_NAME
        }
        total = sum(path.stat().st_size for path in files.values())
        report(f"uploading {format_quantity(total, 'B')} to {address}")
        hashes = {name: hash_file(path) for name, path in files.items()}
        store.commit(folder, hashes, MANIFEST_NAME)
    elif store.read(MANIFEST_NAME) != (folder / MANIFEST_NAME).read_bytes():
        raise DataError("another dataset is at this address", address, "choose another --out")
    store.remove(PROGRESS_NAME)


def cache_folder(kind: str, address: str, content: bytes) -> Path:
    """Return the cache folder for an address.

    kind: name of the parent folder in the cache. content: the manifest or listing at the address;
    when it changes, so does the folder.
    """
    address = address.rstrip("/")
    key = xxhash.xxh3_64_hexdigest(address.encode() + b"\n" + content)
    name = re.sub(r"[^\w.-]", "-", address.rpartition("/")[2])
    return megatoken_cache() / kind / f"{name[:60]}-{key}"


def _damaged(where: str, damage: str) -> DataError:
    fix = "upload it again: remove manifest.json there, then run the same `megatoken prepare`"
    return DataError(f"dataset is damaged: {damage}", where, fix)
