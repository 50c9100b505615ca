"""Replace files atomically, read small ones, hash and fsync; convert disk errors to StorageError.

Files that must be either complete or absent are all written by functions in this module.
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

from megatoken.base.errors import ConfigError, StorageError

BLOCK_BYTES = 1 << 20  # fits the second-level cache of most CPUs while it is hashed
SYNC_BYTES = 64 << 20
SYNC_AND_WAIT = 7  # Linux's sync_file_range: wait before, write, wait after
MAX_BYTES = 8 << 20  # largest small file; parsed JSON takes up to 20 times its size in memory
# An address such as s3://bucket, or s3:/bucket after conversion to a Path.
NO_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|(s3|gs|gcs|az|abfss?|hdfs|https?):")
# Raised by code that parses file content with unexpected types, sizes or nesting.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def local_path(text: str | Path) -> Path:
    """Convert text to a local path, expanding ~/. Raises ConfigError for addresses like s3://."""
    if NO_PATH.match(str(text)):
        fix = "mount it, or copy it to a local folder"
        raise ConfigError(f"not a path on this machine: {text}", "", fix)
    if "\0" in str(text) or not str(text):
        what = f"a path is empty or holds a NUL: {text!s:.200}"
        raise ConfigError(what, "", "name a file or folder")
    return Path(text).expanduser() if str(text).startswith("~/") else Path(text)


def read_small_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
    if status.st_size > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Return the value in a small JSON file. Raises OSError or ValueError."""
    try:
        return json.loads(read_small_file(path))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file, or {} if it is missing, damaged or not an object."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def replace_file(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace the content of a file by one rename, so that readers see the old or the new file.

    Raises OSError, and then leaves the old file unchanged.

    durable: whether to fsync the file and its folder.
    """
    # With the process id, as several processes may write the same file of a cache.
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
    """Return the xxh3-128 hash of a file as 32 hex digits.

    on_progress: called with the number of bytes in each block that was hashed.
    """
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
            if on_progress is not None:
                on_progress(size)
    return digest.hexdigest()


def sync_file(path: Path, on_progress: Callable[[int], object] | None = None) -> None:
    """Fsync a closed file. Raises OSError.

    on_progress: on Linux, the file is synced in parts of SYNC_BYTES, and this is called with the
        size of each part.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if on_progress is not None and sys.platform == "linux":
            for start in range(0, os.fstat(descriptor).st_size, SYNC_BYTES):
                _sync_range(descriptor, start, SYNC_BYTES)
                on_progress(SYNC_BYTES)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_range(descriptor: int, start: int, size: int) -> None:
    """Flush a range of a file to the disk, if the file system supports it. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), SYNC_AND_WAIT):
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.ESPIPE):  # left to fsync
            raise OSError(number, os.strerror(number))


def sync_folder(path: Path) -> None:
    """Fsync a folder, so that new and renamed files survive a power failure.

    Does nothing where that is impossible, as on some network file systems.
    """
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def error_number(error: Exception) -> int | None:
    """Return the errno of an OSError, or of a safetensors error that contains one as text.

    Returns None for other errors.
    """
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
    fix: str = "free space or choose a writable folder, then rerun the command",
) -> Iterator[None]:
    """Convert OS errors to a StorageError that reports the bytes needed and the bytes free.

    needed_bytes: 0 if unknown.
    """
    try:
        yield
    except Exception as error:
        number = error_number(error)
        if not isinstance(error, OSError) and number is None:
            raise
        reason = os.strerror(number) if number else error
        what += f": {getattr(error, 'strerror', None) or reason}"
        if needed_bytes:
            what += f", {needed_bytes:,} bytes needed"
        with suppress(OSError):
            what += f", {shutil.disk_usage(folder).free:,} free"
        where = getattr(error, "filename", None) or folder
        raise StorageError(what, str(where), fix) from error
