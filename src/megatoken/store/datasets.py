"""Fetch files of datasets at an address such as s3://bucket/data, and upload prepared datasets.

stream.py fetches the shards of prepared ones. The folder in the cache is named after the address
and a hash of the manifest (or of the listing of external shards). One process per machine fetches
while the others wait.
"""

import re
import shutil
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import xxhash

from megatoken.base.console import format_memory
from megatoken.base.errors import DataError, StorageError
from megatoken.base.system.atomic_write import hash_file, storage_errors
from megatoken.base.system.environment import megatoken_cache
from megatoken.base.system.file_lock import lock_folder
from megatoken.data.dataset import Report
from megatoken.data.shard_format import (
    HEADER_BYTES,
    MANIFEST_NAME,
    PROGRESS_NAME,
    Manifest,
    has_magic,
    read_header,
)
from megatoken.store.objects import ObjectStore, StoredFiles

SUFFIXES = (".bin", ".npy")
REPORT_SECONDS = 10.0


def list_beside(store: ObjectStore, manifest: Manifest) -> StoredFiles:
    """Return the files of a prepared dataset that are not shards: its tokenizer's and others."""
    names = manifest.source.get("files_beside", {})  # of conversations
    sizes = {
        name: info.bytes for name, info in store.list("tokenizer").items() if name.count("/") == 1
    }
    if names:
        sizes |= {name: info.bytes for name, info in store.list().items() if name in names}
    return StoredFiles(store, sizes, lambda _name, _read: "", _damaged)


def is_pattern(address: str) -> bool:
    """Return whether an address names external shards: one, or a glob pattern."""
    last = address.rstrip("/").rpartition("/")[2]
    return last.endswith(SUFFIXES) or any(char in last for char in "*?[")


def begin_fetch(
    address: str, path: Path, total: int, count_missing: Callable[[], int], report: Report
) -> Callable[[], None]:
    """Report a download; return a function that reports its progress every REPORT_SECONDS.

    path: where the files go. total, count_missing: bytes of all files, and of those that are not
    there. Raises StorageError if they do not fit.
    """
    needed, free = count_missing(), shutil.disk_usage(path).free
    if free < needed:
        what = f"no room to fetch {address}: {needed:,} bytes needed, {free:,} free"
        raise StorageError(what, path, "make room, or set MEGATOKEN_CACHE")
    report(f"fetching {format_memory(needed)} from {address} into {path}")
    next_report = time.monotonic() + REPORT_SECONDS

    def report_progress() -> None:
        nonlocal next_report
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + REPORT_SECONDS
            done = format_memory(total - count_missing())
            report(f"{done} of {format_memory(total)} fetched")

    return report_progress


def fetch_external(address: str, report: Report) -> Path:
    """Fetch the external shards at an address; return their folder in the cache.

    address: a folder, a shard, or a glob pattern. Files that an earlier call fetched are reused.
    Raises DataError if there are none, and StorageError if fetching fails.
    """
    folder, pattern = address, "*"
    if is_pattern(address):
        folder, _, pattern = address.rstrip("/").rpartition("/")
    store = ObjectStore(folder)
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
    files = StoredFiles(store, sizes, lambda _name, _read: "", _damaged)
    path = cache_folder("datasets", address, listing.encode())
    with storage_errors(path), lock_folder(path, "download", on_wait=lambda: None):
        if files.list_missing(path):

            def count_missing() -> int:
                return sum(sizes[name] for name in files.list_missing(path))

            total = sum(sizes.values())
            files.fetch(path, begin_fetch(address, path, total, count_missing, report))
    return path


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
        report(f"uploading {format_memory(total)} to {address}")
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
