"""Small files read, files hashed and replaced atomically, fsync and errors of the disk.

Every file that must be whole or absent is written here.
"""

import ctypes
import errno
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from megatoken.errors import ConfigError, StorageError

BLOCK_BYTES = 1 << 20  # read, then hashed: in the second-level cache of most CPUs
SYNC_BYTES, SYNC_AND_WAIT = 64 << 20, 7  # Linux's sync_file_range: wait before, write, wait after
LARGEST_BYTES = (
    8 << 20
)  # of files that are read as a whole; parsed JSON takes up to 20 times its size
NO_PATH = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]+:/|(s3|gs|gcs|az|abfss?|hdfs|https?):"
)  # a Path has lost a slash
# What content of other types, sizes or depth than expected raises where it is used. A file may hold anything.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def local_path(text: str | Path) -> Path:
    """A path on this machine, ~/ at its start the home folder. Raises ConfigError for an address such as s3://bucket/run,
    and for what is no path."""
    if NO_PATH.match(str(text)):
        raise ConfigError(
            f"not a path on this machine: {text}", "", "mount it, or copy it to a local folder"
        )
    if "\0" in str(text):
        raise ConfigError(f"a path holds a NUL: {text!s:.200}", "", "write it without")
    if not str(text):
        raise ConfigError("a path is empty", "", "name a file or folder; . is the current one")
    return Path(text).expanduser() if str(text).startswith("~/") else Path(text)


def read_small_file(path: Path, limit: int = LARGEST_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes. Raises OSError for another one, before it is read."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
        number = errno.EFBIG if stat.S_ISREG(status.st_mode) else errno.EINVAL
        raise OSError(number, os.strerror(number), str(path))
    return path.read_bytes()


def read_json(path: Path, limit: int = LARGEST_BYTES) -> Any:
    """The value in a small file of JSON. Raises OSError, and ValueError for what is not JSON or nested too deeply."""
    try:
        return json.loads(read_small_file(path, limit))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a small file of JSON; empty when the file is missing, damaged or holds something else."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def replace_file(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace the content of `path` by one rename; readers see the old file or the new one.

    durable: file and name are on the disk when this returns. Raises OSError; the old file is then untouched.
    """
    # The process id keeps processes that write the same file (a cache) out of each other's temporary file.
    temporary = path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        if durable:
            sync_file(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def hash_file(path: Path, on_progress: Callable[[int], object] | None = None) -> str:
    """xxh3-128 of a file, as 32 hex digits. on_progress: called with the number of bytes after each block."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
            if on_progress is not None:
                on_progress(size)
    return digest.hexdigest()


def sync_file(path: Path, on_progress: Callable[[int], object] | None = None) -> None:
    """Force the content of a closed file to the disk. Raises OSError.

    on_progress: called with the number of bytes after each SYNC_BYTES (Linux).
    """
    descriptor = os.open(
        path, os.O_RDWR if os.name == "nt" else os.O_RDONLY
    )  # Windows syncs writable files only
    try:
        if on_progress is not None and sys.platform == "linux":
            for start in range(0, os.fstat(descriptor).st_size, SYNC_BYTES):
                _sync_range(descriptor, start, SYNC_BYTES)
                on_progress(SYNC_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_range(descriptor: int, start: int, size: int) -> None:
    """Write a part of a file to the disk and wait for it, where the file system can. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), SYNC_AND_WAIT):
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ESPIPE):  # fsync does it all then
            raise OSError(number, os.strerror(number))


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk, where the system can: not on Windows and some network file systems."""
    try:
        if os.name != "nt":
            sync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def error_number(error: Exception) -> int | None:
    """The errno of an error of the system, also of one that safetensors reports in words; None of any other."""
    if isinstance(error, OSError):
        return error.errno
    number = re.search(r"\(os error ([0-9]+)\)", str(error))
    return int(number[1]) if number else None


@contextmanager
def storage_errors(
    folder: Path,
    needed_bytes: int = 0,
    *,
    what: str = "cannot write",
    fix: str = "make room or choose a folder you can write to, then run the same command again",
) -> Iterator[None]:
    """Turn errors of the system inside into a StorageError, with the bytes still needed (0: unknown) and free."""
    try:
        yield
    except Exception as error:
        number = error_number(error)
        if not isinstance(error, OSError) and number is None:
            raise
        what += (
            f": {getattr(error, 'strerror', None) or (os.strerror(number) if number else error)}"
        )
        if needed_bytes:
            what += f", {needed_bytes:,} bytes needed"
        with suppress(OSError):
            what += f", {shutil.disk_usage(folder).free:,} free"
        raise StorageError(what, str(getattr(error, "filename", None) or folder), fix) from error
