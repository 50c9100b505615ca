"""Files behind an address such as s3://bucket/run, through fsspec, with retries and errors of one line.

fsspec comes with torch; a protocol may need a library of its own, as s3 needs s3fs (the extra `s3`). Credentials and
endpoint are taken from where that library looks for them, never from an option of ours.
"""

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from megatoken.errors import ConfigError, StorageError
from megatoken.redact import redact
from megatoken.system.atomic_write import NO_PATH, local_path

RETRY_SECONDS = (1.0, 5.0)  # before a call that failed is made again
LIBRARIES = {
    "s3": "megatoken[s3]",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
THREADS = 8  # files that are read or written at once
READ_BYTES = 16 << 20  # at once, to hash an object
# Another try would end alike; botocore's errors have no class that is known without it.
FINAL_ERRORS = {
    *("PermissionError", "NotADirectoryError", "FileExistsError"),
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"),
}
STAMPS = (
    "ETag",
    "etag",
    "mtime",
    "LastModified",
    "created",
)  # of what the libraries say about a file
FIX = "check the address, the credentials and the network"

T = TypeVar("T")


class MissingObjectError(StorageError):
    """There is no object of that name, or no such bucket."""


def is_address(text: str | Path) -> bool:
    """Whether a text is an address such as s3://bucket/data, not a path on this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", str(text)) is not None


def path_or_address(text: str) -> Path | str:
    """A path on this machine, or an address as it was given. Raises ConfigError for what is neither."""
    text = strip_file_scheme(text)
    return text if is_address(text) else local_path(text)


def strip_file_scheme(text: str) -> str:
    """file:///path as /path; everything else as it is."""
    return re.sub("^file:///", "/", text)


def run_folder(text: str | Path) -> Path:
    """The path of a run folder. Raises ConfigError for an address, and for what is no path."""
    if is_address(text):
        fix = f"train in a local folder, with a copy there: save.mirror={text}"
        raise ConfigError(f"not a path on this machine: {text}", "--out", fix)
    return local_path(text)


def run_parallel(
    calls: Sequence[Callable[[], object]],
    on_wait: Callable[[], None] | None = None,
    seconds: float | None = None,
) -> None:
    """Make calls on THREADS threads; on_wait: called every `seconds` meanwhile.

    After an exception, which is raised, calls that have not begun are left out.
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
    """A file in a store. stamp: its ETag or time, which changes with the content; empty where the store has neither."""

    bytes: int
    stamp: str


class ObjectStore:
    """The files below an address; names are relative to it, with `/`. Safe to use from several threads.

    A folder of this machine serves as an address, too. Every method raises StorageError, after retries, when the store
    fails or refuses.
    """

    def __init__(self, address: str) -> None:
        """Raises ConfigError for an address with credentials, of an unknown protocol, or whose library is missing."""
        import fsspec

        if redact(address) != address:
            fix = "give them as the library wants them: AWS_... variables or ~/.aws for s3"
            raise ConfigError("an address holds credentials", address, fix)
        if not is_address(address) and NO_PATH.match(address):
            raise ConfigError(f"not an address: {address}", "", "write it as s3://bucket/folder")
        self.address = address.rstrip("/")
        local = (
            {"auto_mkdir": True}
            if not is_address(address) or address.startswith(("file:", "local:"))
            else {}
        )
        try:
            # Not one that was made before, with the credentials of then.
            options = {"use_listings_cache": False, "skip_instance_cache": True, **local}
            self._fs, root = fsspec.core.url_to_fs(self.address, **options)
        except ImportError as error:
            library = LIBRARIES.get(address.partition(":")[0], "")
            fix = f"pip install '{library}'" if library else "install the library that fsspec names"
            raise ConfigError(f"{error}", address, fix) from error
        except ValueError as error:
            raise ConfigError(
                f"not an address: {error}", address, "write it as s3://bucket/folder"
            ) from error
        self._root = root.rstrip("/")

    def at(self, name: str) -> str:
        """The address of a file, for messages."""
        return f"{self.address}/{name}" if name else self.address

    def list(self, folder: str = "") -> dict[str, ObjectInfo]:
        """Every file below a folder, by name; empty where there is none."""
        try:
            found = self._call("list", folder, self._fs.find, self._path(folder), detail=True)
        except MissingObjectError:
            return {}
        stamps = {
            name: [str(info[key]) for key in STAMPS if info.get(key)]
            for name, info in found.items()
        }
        return {
            name.removeprefix(self._root).lstrip("/"): ObjectInfo(
                int(info["size"]), "".join(stamps[name][:1])
            )
            for name, info in found.items()
        }

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        try:
            return int(self._call("read", name, self._fs.info, self._path(name))["size"])
        except MissingObjectError:
            return None

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """The content of a file, or its bytes [start, end). Raises MissingObjectError."""
        return bytes(
            self._call("read", name, self._fs.cat_file, self._path(name), start=start, end=end)
        )

    def download(self, name: str, path: Path) -> None:
        """Copy a file to `path`. Raises MissingObjectError."""
        self._call("read", name, self._fs.get_file, self._path(name), str(path))

    def hash(self, name: str) -> str:
        """xxh3-128 of a file, every byte of which is read. Raises MissingObjectError."""
        hasher, size = xxhash.xxh3_128(), self.size(name) or 0
        for start in range(0, size, READ_BYTES):
            hasher.update(self.read(name, start, min(start + READ_BYTES, size)))
        return str(hasher.hexdigest())

    def write(self, name: str, content: bytes) -> None:
        """Make `content` the content of a file."""
        self._call("write", name, self._fs.pipe_file, self._path(name), content)

    def upload(self, path: Path, name: str, xxh3_128: str) -> None:
        """Copy a file of this machine with that hash to `name`, then read it back; leave one that has that hash.

        Raises StorageError when another content is read back twice.
        """
        for _ in range(2):
            if self._has(name, path.stat().st_size, xxh3_128):
                return
            self._call("write", name, self._fs.put_file, str(path), self._path(name))
        if not self._has(name, path.stat().st_size, xxh3_128):
            raise StorageError(
                "another content is read back than was written", self.at(name), "check the store"
            )

    def remove(self, name: str) -> None:
        """Remove a file or everything below a folder, if there is any."""
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
                    reason = str(error) or type(error).__name__
                    raise StorageError(
                        f"cannot {verb}: {reason:.300}", self.at(name), FIX
                    ) from error
            time.sleep(pause)
        raise AssertionError("not reached")
