"""Tune glibc's malloc."""

import ctypes
import platform

M_TRIM_THRESHOLD = -1  # malloc.h
M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory instead of returning it to the system; return whether it does.

    Each training step frees and allocates the same hundreds of megabytes. If they were returned,
    the system would have to clear and map every page again.
    """
    libc = _glibc()
    if libc is None:
        return False
    return bool(libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def return_freed_memory() -> None:
    """Return freed memory to the system once, for example after trials with other block sizes."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
