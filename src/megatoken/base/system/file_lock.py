"""Lock a folder, so that only one process at a time writes to it."""

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatoken.base.errors import StorageError
from megatoken.base.system.atomic_write import MALFORMED, read_json, replace_file, storage_errors

LOCK = ".lock"
OWNER = ".owner.json"
OWNER_SECONDS = 1.0  # to wait for a new owner to write its name
WAIT_SECONDS = 10.0


class LockedError(StorageError):
    """Another process holds the lock."""


@contextmanager
def lock_folder(
    folder: Path, what: str, *, on_wait: Callable[[], object] | None = None
) -> Iterator[None]:
    """Hold a folder's lock inside the context, creating the folder if needed.

    Raises LockedError with the owner's pid if another process holds the lock, and StorageError if
    the folder cannot be used. The kernel releases the lock of a process that dies.

    what: what the folder holds, for messages, such as "run" or "sweep".
    on_wait: if given, wait for the lock instead of raising LockedError, and call this every
        WAIT_SECONDS.
    """
    from filelock import FileLock, Timeout  # slow to import for commands that only read

    lock = FileLock(folder / LOCK, timeout=WAIT_SECONDS if on_wait else 0, thread_local=False)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        while not lock.is_locked:
            try:
                lock.acquire()
            except Timeout:
                if on_wait is None:
                    raise _locked_error(folder, what) from None
                on_wait()
            except NotImplementedError:  # some network file systems
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)) from None
    try:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": format_now()}
        with storage_errors(folder):
            replace_file(folder / OWNER, json.dumps(owner) + "\n")
        yield
    finally:
        with suppress(OSError):
            (folder / OWNER).unlink()
        lock.release()


def format_now() -> str:
    """Return the local time with its UTC offset, such as 2026-07-01T09:30:00+0200."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _locked_error(folder: Path, what: str) -> LockedError:
    """Return an error that names the lock's owner.

    A new owner may not have written its name yet. So while the file still names a dead process,
    this waits, for up to OWNER_SECONDS.
    """
    owner_text = "it has just started"
    deadline = time.monotonic() + OWNER_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, *MALFORMED):
            owner = read_json(folder / OWNER)
            owner_text = f"pid {owner['pid']} on {owner['host']} since {owner['started']}"
            if owner["host"] == socket.gethostname():
                os.kill(owner["pid"], 0)  # raises OSError if the process has ended
            break
        time.sleep(0.02)
    fix = "wait for it or use another folder"
    return LockedError(f"another {what} is using this folder: {owner_text}", folder, fix)
