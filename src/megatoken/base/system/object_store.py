"""Read and write files at an address such as s3://bucket/run through fsspec, with retries.

fsspec comes with torch. Some protocols need another library, such as s3fs for s3 (the extra `s3`).
That library finds credentials and endpoint by itself; they are never passed to megatoken.
"""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from megatoken.base.errors import ConfigError, StorageError
from megatoken.base.redact import redact
from megatoken.base.system.atomic_write import NO_PATH, local_path

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


class MissingObjectError(StorageError):
    """The object or bucket does not exist."""


def is_address(text: str | Path) -> bool:
    """Return whether a text is an address such as s3://bucket/data, not a local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", str(text)) is not None


def path_or_address(text: str) -> Path | str:
    """Convert text to a local path, unless it is an address.

    Raises ConfigError if it is neither.
    """
    text = strip_file_scheme(text)
    return text if is_address(text) else local_path(text)


def strip_file_scheme(text: str) -> str:
    """Convert file:///path to /path, and leave anything else unchanged."""
    return re.sub("^file:///", "/", text)


def run_folder(text: str | Path) -> Path:
    """Return the local path of a run folder. Raises ConfigError for an address or invalid path."""
    if is_address(text):
        fix = f"train in a local folder, with a copy there: save.mirror={text}"
        raise ConfigError(f"not a path on this machine: {text}", "--out", fix)
    return local_path(text)


def run_parallel(
    calls: Sequence[Callable[[], object]],
    on_wait: Callable[[], None] | None = None,
    seconds: float | None = None,
) -> None:
    """Run functions on THREADS threads and wait for all of them.

    If one raises an exception, functions that have not started are dropped, and the first exception
    is raised.

    on_wait: called every `seconds` during the wait.
    """
    with ThreadPoolExecutor(THREADS) as threads:
        pending = {threads.submit(call) for call in calls}
        try:
            while pending:
                done, pending = wait(pending, seconds, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if pending and on_wait:
                    on_wait()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


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
            fix = 'pip install -e ".[s3]", or the library that fsspec names'
            raise ConfigError(f"{error}", address, fix) from error
        except ValueError as error:
            fix = "write it as s3://bucket/folder"
            raise ConfigError(f"not an address: {error}", address, fix) from error
        self._root = root.rstrip("/")

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
        return bytes(self._call("read", name, self._fs.cat_file, path, start=start, end=end))

    def download(self, name: str, path: Path) -> None:
        """Copy a file to `path`. Raises MissingObjectError."""
        self._call("read", name, self._fs.get_file, self._path(name), str(path))

    def hash(self, name: str) -> str:
        """Read a file and return its xxh3-128. Raises MissingObjectError."""
        hasher = xxhash.xxh3_128()
        size = self.size(name) or 0
        for start in range(0, size, READ_BYTES):
            hasher.update(self.read(name, start, min(start + READ_BYTES, size)))
        return str(hasher.hexdigest())

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

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with everything in it, if it exists."""
        with suppress(MissingObjectError):
            self._call("remove", name, self._fs.rm, self._path(name), recursive=True)

    def _has(self, name: str, size: int, xxh3_128: str) -> bool:
        return self.size(name) == size and self.hash(name) == xxh3_128

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _call(self, verb: str, name: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
        for pause in (*RETRY_SECONDS, None):
            try:
                return call(*args, **options)
            except FileNotFoundError as error:
                raise MissingObjectError(f"cannot {verb}: {error}", self.at(name), FIX) from error
            except Exception as error:  # each library has its own
                if pause is None or type(error).__name__ in FINAL_ERRORS:
                    what = f"cannot {verb}: {str(error)[:300] or type(error).__name__}"
                    raise StorageError(what, self.at(name), FIX) from error
            time.sleep(pause)
        raise AssertionError("not reached")
