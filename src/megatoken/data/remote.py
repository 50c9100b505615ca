"""Fetch datasets at an address such as s3://bucket/data into the cache, and upload prepared ones.

A batch draws windows from all shards, so all are fetched before the first step. The folder in the
cache is named after the address and a hash of the manifest (or of the listing of external shards).
One process per machine fetches while the others wait.
"""

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from megatoken.base.console import format_quantity
from megatoken.base.errors import DataError, MegatokenError, StorageError
from megatoken.base.system.atomic_write import (
    hash_file,
    local_path,
    replace_file,
    storage_errors,
    sync_file,
)
from megatoken.base.system.environment import megatoken_cache
from megatoken.base.system.file_lock import lock_folder
from megatoken.base.system.object_store import (
    MissingObjectError,
    ObjectStore,
    is_address,
    run_parallel,
    strip_file_scheme,
)
from megatoken.data.shard_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MANIFEST_NAME,
    PROGRESS_NAME,
    Shard,
    has_magic,
    hash_block,
    hash_blocks,
    parse_manifest,
    read_header,
)
from megatoken.text.tokenizer import load_saved_tokenizer

REPORT_SECONDS = 10.0
LISTING_NAME = "listing.txt"  # in the cache, once all external shards that it lists are there
SUFFIXES = (".bin", ".npy")
READ_BLOCKS = 64  # blocks read at once

Report = Callable[[str], None]


def no_report(line: str) -> None:
    """Discard a progress line."""


@dataclass(frozen=True)
class RemoteDataset:
    """A dataset at an address.

    files: size in bytes of each file to fetch, by name. shards: manifest row of each shard, by
    name; empty for external shards, which have no hashes. mark, content: name and content of the
    file that is written to the cache last, to show that the copy is complete.
    """

    store: ObjectStore
    files: dict[str, int]
    shards: dict[str, Shard]
    token_bytes: int
    mark: str
    content: bytes


def local_dataset(path: str | Path, report: Report = no_report) -> Path:
    """Return `path`; if it is an address, fetch it and return its folder in the cache."""
    path = strip_file_scheme(str(path))
    return fetch_dataset(path, report) if is_address(path) else local_path(path)


def fetch_dataset(address: str, report: Report = no_report) -> Path:
    """Fetch the dataset or external shards at an address; return their folder in the cache.

    Shards are verified against the manifest's hashes, and files that an earlier call fetched are
    reused. report: called with a progress line when a download starts and every REPORT_SECONDS.
    Raises DataError if the address has no dataset or a damaged shard, and StorageError if fetching
    fails.
    """
    remote = list_remote(address)
    folder = cache_folder("datasets", address, remote.content)

    def describe() -> str:
        done = sum(size for name, size in remote.files.items() if _size(folder / name) == size)
        total = sum(remote.files.values())
        return f"{format_quantity(done, 'B')} of {format_quantity(total, 'B')} fetched"

    with (
        storage_errors(folder),
        lock_folder(folder, "download", on_wait=lambda: report(describe())),
    ):
        missing = [name for name, size in remote.files.items() if _size(folder / name) != size]
        if missing or not (folder / remote.mark).exists():
            needed = sum(remote.files[name] for name in missing)
            free = shutil.disk_usage(folder).free
            if free < needed:
                what = f"no room to fetch {address}: {needed:,} bytes needed, {free:,} free"
                raise StorageError(what, folder, "make room, or set MEGATOKEN_CACHE")
            report(f"fetching {format_quantity(needed, 'B')} from {address} into {folder}")
            calls = [partial(_fetch, remote, name, folder / name) for name in missing]
            run_parallel(calls, lambda: report(describe()), REPORT_SECONDS)
            replace_file(folder / remote.mark, remote.content, durable=True)
    return folder


def verify_remote(remote: RemoteDataset) -> list[MegatokenError]:
    """Read and verify every byte of a prepared dataset at an address.

    Return one error for each bad shard, and one if the tokenizer is bad.
    """
    errors: list[MegatokenError] = []

    def check(name: str) -> None:
        try:
            read = partial(remote.store.read, name)
            damage = find_damage(remote.shards[name], remote.token_bytes, read)
            if damage:
                errors.append(_damaged(remote, name, damage))
        except MegatokenError as error:
            errors.append(error)

    run_parallel([partial(check, name) for name in remote.shards])
    with tempfile.TemporaryDirectory(prefix="megatoken-") as folder:
        try:
            for name in remote.files.keys() - remote.shards.keys():
                _fetch(remote, name, Path(folder) / name)
            load_saved_tokenizer(Path(folder) / "tokenizer")
        except MegatokenError as error:
            errors.append(error)
    return errors


def list_remote(address: str) -> RemoteDataset:
    """List the dataset or external shards at an address: a folder, a shard, or a glob pattern.

    Raises DataError if there is no dataset or its upload has not finished, and StorageError if the
    store cannot be read.
    """
    folder, _, last = address.rstrip("/").rpartition("/")
    if last.endswith(SUFFIXES) or any(sign in last for sign in "*?["):
        return _list_external(ObjectStore(folder), last)
    store = ObjectStore(address)
    try:
        raw = store.read(MANIFEST_NAME)
    except MissingObjectError:
        return _list_external(store, "*")
    manifest = parse_manifest(raw, store.at(MANIFEST_NAME))
    token_bytes = np.dtype(manifest.dtype).itemsize
    shards = {shard.file: shard for shard in manifest.shards}
    files = {
        name: info.bytes for name, info in store.list("tokenizer").items() if name.count("/") == 1
    }
    for name, shard in shards.items():
        files[name] = HEADER_BYTES + shard.tokens * token_bytes
    return RemoteDataset(store, files, shards, token_bytes, MANIFEST_NAME, raw)


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
    return RemoteDataset(store, sizes, {}, 0, LISTING_NAME, listing.encode())


def find_damage(shard: Shard, token_bytes: int, read: Callable[[int, int], bytes]) -> str:
    """Describe how a shard differs from its row in the manifest; return "" if it does not.

    read: a function (start, end) that returns those bytes of the shard.
    """
    actual = hash_block(read(0, HEADER_BYTES))
    if actual != shard.header:
        return f"its header has hash {actual}, expected {shard.header}"
    end = HEADER_BYTES + shard.tokens * token_bytes
    number = 0
    for start in range(HEADER_BYTES, end, READ_BLOCKS * BLOCK_BYTES):
        for actual in hash_blocks(read(start, min(start + READ_BLOCKS * BLOCK_BYTES, end))):
            expected = shard.block_hash(number)
            if actual != expected:
                return f"block {number} has hash {actual}, expected {expected}"
            number += 1
    return f"block {number} is missing" if shard.block_hash(number) else ""


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
    content = (folder / MANIFEST_NAME).read_bytes()
    if store.size(MANIFEST_NAME) is None:
        files = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file() and not path.name.startswith(".") and path.name != MANIFEST_NAME
        }
        total = sum(path.stat().st_size for path in files.values())
        report(f"uploading {format_quantity(total, 'B')} to {address}")
        run_parallel(
            [partial(store.upload, path, name, hash_file(path)) for name, path in files.items()]
        )
        store.write(MANIFEST_NAME, content)
    elif store.read(MANIFEST_NAME) != content:
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


def _fetch(remote: RemoteDataset, name: str, path: Path) -> None:
    """Download and verify a file; retry once if it is damaged, then raise DataError."""
    part = path.with_name(f"{path.name}.part")
    shard = remote.shards.get(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    for is_last in (False, True):
        remote.store.download(name, part)
        size = part.stat().st_size
        damage = ""
        if size != remote.files[name]:
            damage = f"it has {size:,} bytes, expected {remote.files[name]:,}"
        elif shard is not None:
            with part.open("rb") as file:
                damage = find_damage(shard, remote.token_bytes, partial(_read_range, file))
        if not damage:
            sync_file(part)
            part.replace(path)
            return
        if is_last:
            part.unlink()
            raise _damaged(remote, name, damage)


def _read_range(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def _damaged(remote: RemoteDataset, name: str, damage: str) -> DataError:
    fix = "upload it again: remove manifest.json there, then run the same `megatoken prepare`"
    return DataError(f"shard is damaged: {damage}", remote.store.at(name), fix)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
