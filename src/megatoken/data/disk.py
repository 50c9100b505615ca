"""The output disk: names made durable, and its failures told to people.

In: folders and OSErrors. Out: a Fault that says what failed, where, and how much room there is.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatoken.errors import Exit, Fault


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def blame_disk(folder: Path, needed_bytes: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turns an OSError inside into Fault(Exit.STORAGE). needed_bytes: an estimate of what is still to be written."""
    try:
        yield
    except OSError as error:
        path = str(error.filename or folder)
        fix = "choose a folder you can write to"
        what = f"cannot write: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            needed, free = needed_bytes(), shutil.disk_usage(folder).free
            what += (
                f"; about {needed:,} bytes more are needed, {free:,} are free" if needed else f"; {free:,} bytes free"
            )
            fix = "make room and run the same command again: it goes on where it stopped"
        raise Fault(Exit.STORAGE, what, path, fix) from error
