"""Read and write files at an address such as s3://bucket/run through fsspec, with retries.

A set of files, such as a checkpoint or a dataset, is complete if its manifest is there: all files
are written first (`ObjectStore.commit`) and checked against it when they are read (`StoredFiles`).

fsspec comes with torch. Some protocols need another library, such as s3fs for s3 (the extra `s3`).
That library finds credentials and endpoint by itself; they are never passed to megatoken.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import xxhash

from megatoken.base.errors import ConfigError, MegatokenError, StorageError, install_extras
from megatoken.base.redact import redact
from megatoken.base.rooms import load_entry
from megatoken.base.system.address import is_address
from megatoken.base.system.atomic_write import NO_PATH, sync_file

RETRY_SECONDS = (1.0, 5.0)
THREADS = 8  # files that are read or written at once
READ_BYTES = 16 << 20  # per request, to hash an object
# Errors that are not retried; by name, because botocore may not be installed.
FINAL_ERRORS = {
    *("PermissionError", "NotADirectoryError", "FileExistsError"),
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"),
}
STAMPS = ("ETag", "etag", "mtime", "LastModified", "created")  # keys of fsspec's file info
FIX = "check the address, the credentials and the network"

T = TypeVar("T")
Read = Callable[[int, int], bytes]  # returns the bytes [start, end) of a file


class MissingObjectError(StorageError):
    """The object or bucket does not exist."""


def run_parallel(
    call: Callable[[T], object], items: Iterable[T], on_done: Callable[[], object] = lambda: None
) -> None:
    """Call a function with each item on THREADS threads, and wait for all calls.

    If one raises an exception, no further one starts, and the exception is raised.

    on_done: called on this thread after each call.
    """
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(call, items):
            on_done()


class ObjectInfo(NamedTuple):
    """Size and version of a file in a store.

    stamp: its ETag or modification time, which changes with the content; may be empty.
    """

    bytes: int
    stamp: str


class ObjectStore:
    """The files below an address or a local folder, named by relative paths with `/`.

    Every method retries, and raises StorageError if the store fails or denies access. Thread-safe.
    """

    def __init__(self, address: str) -> None:
        """Open a store; nothing is read yet.

        Raises ConfigError if the address contains credentials or its protocol is unknown.
        """
        import fsspec

        if redact(address) != address:
            fix = "store them where the library looks: AWS_... variables or ~/.aws for s3"
            raise ConfigError("an address holds credentials", address, fix)
        if not is_address(address) and NO_PATH.match(address):
            raise ConfigError(f"not an address: {address}", "", "write it as s3://bucket/folder")
        self.address = address.rstrip("/")
        # A cached instance would keep the credentials with which it was created.
        options = {"use_listings_cache": False, "skip_instance_cache": True}
        if not is_address(address) or address.startswith(("file:", "local:")):
            options["auto_mkdir"] = True
        try:
            self._fs, root = fsspec.core.url_to_fs(self.address, **options)
        except ImportError as error:
            fix = f"{install_extras('s3')}, or the library that fsspec names"
            raise ConfigError(f"{error}", address, fix) from error
        except ValueError as error:
            fix = "write it as s3://bucket/folder"
            raise ConfigError(f"not an address: {error}", address, fix) from error
        self._root = root.rstrip("/")
        is_s3 = self._fs.protocol[0] == "s3"
        self._ranges = load_entry("address", "s3_ranges")(self._root) if is_s3 else None

    def below(self, folder: str) -> Self:
        """Return the store of the files below a folder of this one."""
        store = copy(self)
        store.address = self.at(folder)
        store._root = self._path(folder)
        return store

    def at(self, name: str) -> str:
        """Return the full address of a file, for messages."""
        return f"{self.address}/{name}" if name else self.address

    def list(self, folder: str = "") -> dict[str, ObjectInfo]:
        """Return every file below a folder, by name; empty if the folder does not exist."""
        try:
            infos = self._call("list", folder, self._fs.find, self._path(folder), detail=True)
        except MissingObjectError:
            return {}
        files = {}
        for path, info in infos.items():
            stamps = [str(info[key]) for key in STAMPS if info.get(key)]
            name = path.removeprefix(self._root).lstrip("/")
            files[name] = ObjectInfo(int(info["size"]), stamps[0] if stamps else "")
        return files

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""
        try:
            return int(self._call("read", name, self._fs.info, self._path(name))["size"])
        except MissingObjectError:
            return None

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the content of a file, or its bytes [start, end). Raises MissingObjectError."""
        path = self._path(name)
        if self._ranges and start is not None and end is not None:
            key = path.partition("/")[2]
            return bytes(self._call("read", name, self._ranges, key, start=start, end=end))
        return bytes(self._call("read", name, self._fs.cat_file, path, start=start, end=end))

    def download(self, name: str, path: Path) -> None:
        """Copy a file to `path`. Raises MissingObjectError."""
        self._call("read", name, self._fs.get_file, self._path(name), str(path))

    def write(self, name: str, content: bytes) -> None:
        """Write `content` to a file."""
        self._call("write", name, self._fs.pipe_file, self._path(name), content)

    def upload(self, path: Path, name: str, xxh3_128: str) -> None:
        """Copy a local file to `name`, and verify it by reading it back.

        Nothing is copied if the file is already there. Raises StorageError if verification fails
        twice.

        xxh3_128: the file's hash.
        """
        for _ in range(2):
            if self._has(name, path.stat().st_size, xxh3_128):
                return
            self._call("write", name, self._fs.put_file, str(path), self._path(name))
        if not self._has(name, path.stat().st_size, xxh3_128):
            what = "the content read back differs from what was written"
            raise StorageError(what, self.at(name), "check the store")

    def commit(self, folder: Path, hashes: Mapping[str, str], manifest: str) -> None:
        """Copy files of a local folder here by `upload`, and then its manifest.

        hashes: xxh3-128 of the files, by name.
        """
        run_parallel(lambda name: self.upload(folder / name, name, hashes[name]), hashes)
        self.write(manifest, (folder / manifest).read_bytes())

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with everything in it, if it exists."""
        with suppress(MissingObjectError):
            self._call("remove", name, self._fs.rm, self._path(name), recursive=True)

    def _has(self, name: str, size: int, xxh3_128: str) -> bool:
        return self.size(name) == size and hash_ranges(partial(self.read, name), size) == xxh3_128

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _call(self, verb: str, name: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
        for pause in (*RETRY_SECONDS, None):
            try:
                return call(*args, **options)
            except FileNotFoundError as error:
                what = f"cannot {verb}: no such object or bucket"
                raise MissingObjectError(what, self.at(name), FIX) from error
            except Exception as error:  # each library has its own
                if pause is None or type(error).__name__ in FINAL_ERRORS:
                    reason = str(error).partition("\n\nDebug source")[0][:300]  # obstore's
                    what = f"cannot {verb}: {reason or type(error).__name__}"
                    raise StorageError(what, self.at(name), FIX) from error
            time.sleep(pause)
        raise AssertionError("not reached")


def hash_ranges(read: Read, size: int) -> str:
    """Return the xxh3-128 of the first `size` bytes of a file."""
    digest = xxhash.xxh3_128()
    for start in range(0, size, READ_BYTES):
        digest.update(read(start, min(start + READ_BYTES, size)))
    return digest.hexdigest()


@dataclass(frozen=True)
class StoredFiles:
    """Files in a store, as a manifest describes them.

    sizes: bytes of each file, by name. find_damage: says how a file's content differs from the
    manifest, or returns "". damaged: returns the error for an address and what is wrong there.
    """

    store: ObjectStore
    sizes: Mapping[str, int]
    find_damage: Callable[[str, Read], str]
    damaged: Callable[[str, str], MegatokenError]

    def verify(self) -> list[MegatokenError]:
        """Read every byte, and return an error for each bad file."""
        errors: list[MegatokenError] = []

        def check(name: str) -> None:
            try:
                self._check(name, self.store.size(name) or 0, partial(self.store.read, name))
            except MegatokenError as error:
                errors.append(error)

        run_parallel(check, self.sizes)
        return errors

    def list_missing(self, folder: Path) -> list[str]:
        """Return the names of files that a folder does not have in their full size."""
        return [name for name, size in self.sizes.items() if _file_size(folder / name) != size]

    def fetch(self, folder: Path, on_done: Callable[[], object] = lambda: None) -> None:
        """Fetch the missing files into a folder, where each appears complete and durable.

        on_done: called after each file.
        """
        for name in self.sizes:
            if {"", ".", ".."} & {*name.split("/")} or "\\" in name or "\0" in name:
                raise self.damaged(self.store.at(name), "it is outside the folder")
        run_parallel(partial(self._fetch, folder), self.list_missing(folder), on_done)

    def _fetch(self, folder: Path, name: str) -> None:
        part = folder / f"{name}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.store.download(name, part)
            with part.open("rb") as file:
                number = file.fileno()
                self._check(
                    name, _file_size(part), lambda start, end: os.pread(number, end - start, start)
                )
            sync_file(part)
            part.replace(folder / name)
        except MissingObjectError as error:
            raise self.damaged(self.store.at(name), "it is missing") from error
        finally:
            part.unlink(missing_ok=True)

    def _check(self, name: str, size: int, read: Read) -> None:
        damage = f"it has {size:,} bytes, expected {self.sizes[name]:,}"
        if size == self.sizes[name]:
            damage = self.find_damage(name, read)
        if damage:
            raise self.damaged(self.store.at(name), damage)


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
