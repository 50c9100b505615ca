"""Datasets at an address such as s3://bucket/data: fetched into the cache before use, uploaded after `prepare`.

A batch draws its windows from all shards, so all are fetched before the first step; after that a run needs no store.
The folder in the cache is named by the address and the manifest (of external shards: their listing), so another content
is another folder. One process of a machine fetches, the others wait for it.
"""

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

from megatoken.console import format_quantity
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
from megatoken.data.tokenizer import load_saved_tokenizer
from megatoken.errors import DataError, MegatokenError, StorageError
from megatoken.system.atomic_write import (
    hash_file,
    local_path,
    replace_file,
    storage_errors,
    sync_file,
)
from megatoken.system.environment import megatoken_cache
from megatoken.system.file_lock import lock_folder
from megatoken.system.object_store import (
    MissingObjectError,
    ObjectStore,
    is_address,
    run_parallel,
    strip_file_scheme,
)

REPORT_SECONDS = 10.0
LISTING_NAME = "listing.txt"  # in the cache: every external shard that it names was fetched
SUFFIXES = (".bin", ".npy")
READ_BLOCKS = 64  # at once

Report = Callable[[str], None]


def no_report(line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True)
class RemoteDataset:
    """What lies at an address. files: bytes of each file to fetch, by name; shards: those with hashes, and their bytes
    per token; mark: the file that is written into the cache last, and its content."""

    store: ObjectStore
    files: dict[str, int]
    shards: dict[str, Shard]
    token_bytes: int
    mark: str
    content: bytes


def local_dataset(path: str | Path, report: Report = no_report) -> Path:
    """The dataset on this machine: `path` itself, or the folder of the cache into which an address is fetched."""
    path = strip_file_scheme(str(path))
    return fetch_dataset(path, report) if is_address(path) else local_path(path)


def fetch_dataset(address: str, report: Report = no_report) -> Path:
    """The folder of the cache with the dataset, or the external shards, at an address.

    Shards are verified by the manifest's hashes; what an earlier call fetched is kept. report: called with a line when
    a download starts and while it goes on. Raises DataError when there is no dataset or a shard is damaged there,
    StorageError when it cannot be fetched.
    """
    remote = list_remote(address)
    folder = cache_folder("datasets", address, remote.content)

    def describe() -> str:
        there = sum(size for name, size in remote.files.items() if _size(folder / name) == size)
        return f"{format_quantity(there, 'B')} of {format_quantity(sum(remote.files.values()), 'B')} fetched"

    with (
        storage_errors(folder),
        lock_folder(folder, "download", on_wait=lambda: report(describe())),
    ):
        missing = [name for name, size in remote.files.items() if _size(folder / name) != size]
        if missing or not (folder / remote.mark).exists():
            needed, free = (
                sum(remote.files[name] for name in missing),
                shutil.disk_usage(folder).free,
            )
            if free < needed:
                what = f"no room to fetch {address}: {needed:,} bytes needed, {free:,} free"
                raise StorageError(
                    what,
                    folder,
                    "remove other folders beside it, or set MEGATOKEN_CACHE to another disk",
                )
            report(f"fetching {format_quantity(needed, 'B')} from {address} into {folder}")
            calls = [partial(_fetch, remote, name, folder / name) for name in missing]
            run_parallel(calls, lambda: report(describe()), REPORT_SECONDS)
            replace_file(folder / remote.mark, remote.content, durable=True)
    return folder


def verify_remote(remote: RemoteDataset) -> list[MegatokenError]:
    """Read every byte of a dataset with hashes where it lies; an error for each shard that is damaged, or missing, and
    for a tokenizer that cannot be loaded."""
    errors = list[MegatokenError]()

    def check(name: str) -> None:
        try:
            if damage := find_damage(
                remote.shards[name], remote.token_bytes, partial(remote.store.read, name)
            ):
                errors.append(_damaged(remote, name, damage))
        except MegatokenError as error:
            errors.append(error)

    run_parallel([partial(check, name) for name in remote.shards])
    with tempfile.TemporaryDirectory(prefix="megatoken-") as own:
        try:
            for name in remote.files.keys() - remote.shards.keys():
                _fetch(remote, name, Path(own) / name)
            load_saved_tokenizer(Path(own) / "tokenizer")
        except MegatokenError as error:
            errors.append(error)
    return errors


def list_remote(address: str) -> RemoteDataset:
    """The dataset or the external shards at an address: a folder, a shard, or a folder with a pattern at the end.

    Raises DataError where there is neither or an upload has not finished, StorageError when the store cannot be read.
    """
    folder, _, last = address.rstrip("/").rpartition("/")
    if is_pattern := last.endswith(SUFFIXES) or any(sign in last for sign in "*?["):
        store, pattern = ObjectStore(folder), last
    else:
        store, pattern = ObjectStore(address), "*"
        try:
            raw = store.read(MANIFEST_NAME)
        except MissingObjectError:
            pass
        else:
            manifest = parse_manifest(raw, store.at(MANIFEST_NAME))
            token_bytes = np.dtype(manifest.dtype).itemsize
            shards = {shard.file: shard for shard in manifest.shards}
            files = {
                name: HEADER_BYTES + shard.tokens * token_bytes for name, shard in shards.items()
            }
            own = {
                name: info.bytes
                for name, info in store.list("tokenizer").items()
                if name.count("/") == 1
            }
            return RemoteDataset(store, own | files, shards, token_bytes, MANIFEST_NAME, raw)
    found = {
        name: info
        for name, info in sorted(store.list().items())
        if "/" not in name and name.endswith(SUFFIXES) and fnmatchcase(name, pattern)
    }
    if not found:
        what = f"no dataset here: no {'such shard' if is_pattern else f'{MANIFEST_NAME}, no .bin and no .npy shards'}"
        raise DataError(
            what, address, "check the address: `megatoken prepare SOURCE --out ADDRESS` makes one"
        )
    head = store.read(next(iter(found)), 0, HEADER_BYTES)
    if has_magic(head) and read_header(head, store.at(next(iter(found)))).fingerprint:
        what = f"shards prepared by megatoken without their {MANIFEST_NAME}: their upload has not finished"
        raise DataError(
            what, address, "run the same `megatoken prepare` again, or name the whole folder"
        )
    listing = "".join(f"{name} {info.bytes} {info.stamp}\n" for name, info in found.items())
    sizes = {name: info.bytes for name, info in found.items()}
    return RemoteDataset(store, sizes, {}, 0, LISTING_NAME, listing.encode())


def find_damage(shard: Shard, token_bytes: int, read: Callable[[int, int], bytes]) -> str:
    """What differs in a shard from its row of the manifest; empty for nothing. read: its bytes [start, end)."""
    if (actual := hash_block(read(0, HEADER_BYTES))) != shard.header:
        return f"its header has hash {actual}, expected {shard.header}"
    end = HEADER_BYTES + shard.tokens * token_bytes
    for first in range(0, len(shard.blocks), READ_BLOCKS):
        start = HEADER_BYTES + first * BLOCK_BYTES
        digests = [*hash_blocks(read(start, min(start + READ_BLOCKS * BLOCK_BYTES, end)))]
        for number, expected in enumerate(shard.blocks[first : first + READ_BLOCKS]):
            actual = digests[number] if number < len(digests) else "none"
            if actual != expected:
                return f"block {first + number} has hash {actual}, expected {expected}"
    return ""


def begin_upload(address: str) -> Path:
    """Where on this machine the dataset for an address is prepared; the address is marked as not finished.

    Raises StorageError when nothing can be written there: before hours of work, not after.
    """
    store = ObjectStore(address)
    if store.size(MANIFEST_NAME) is None:
        store.write(PROGRESS_NAME, b"{}\n")
    return cache_folder("prepared", address, b"")


def upload_dataset(folder: Path, address: str, report: Report = no_report) -> None:
    """Upload a prepared folder: shards and tokenizer, each read back, then the manifest, without which there is none.

    What is there already is left. Raises DataError when another dataset is there, StorageError as the store does.
    """
    store, content = ObjectStore(address), (folder / MANIFEST_NAME).read_bytes()
    there = store.read(MANIFEST_NAME) if store.size(MANIFEST_NAME) is not None else None
    if there not in (None, content):
        raise DataError(
            "another dataset is at this address",
            address,
            "choose another --out, or remove that one",
        )
    if there is None:
        paths = [
            path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")
        ]
        files = {
            path.relative_to(folder).as_posix(): path
            for path in paths
            if path.name != MANIFEST_NAME
        }
        report(
            f"uploading {format_quantity(sum(path.stat().st_size for path in paths), 'B')} to {address}"
        )
        run_parallel(
            [partial(store.upload, path, name, hash_file(path)) for name, path in files.items()]
        )
        store.write(MANIFEST_NAME, content)
    store.remove(PROGRESS_NAME)


def cache_folder(kind: str, address: str, content: bytes) -> Path:
    """The folder of the cache for what is at an address now."""
    key = xxhash.xxh3_64_hexdigest(address.rstrip("/").encode() + b"\n" + content)
    name = "".join(
        sign if sign.isalnum() or sign in "-_." else "-"
        for sign in address.rstrip("/").rpartition("/")[2]
    )
    return megatoken_cache() / kind / f"{name[:60]}-{key}"


def _fetch(remote: RemoteDataset, name: str, path: Path) -> None:
    """Fetch a file, twice if the first transfer was damaged. Raises DataError when the object itself is."""
    part, shard = path.with_name(f"{path.name}.part"), remote.shards.get(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    for is_last in (False, True):
        remote.store.download(name, part)
        size, damage = part.stat().st_size, ""
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
