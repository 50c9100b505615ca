"""Inspect the processes of this machine through /proc (Linux)."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

PROC = Path("/proc")
HANG_SECONDS = 1200.0  # only a hang takes so long, even on a busy machine


class Ending(Protocol):
    def poll(self) -> int | None: ...


def wait_until(condition: Callable[[], object], process: Ending | None = None) -> None:
    """Poll until a condition holds or the process has ended; fail if neither happens."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition() and (process is None or process.poll() is None):
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Return the children of a process that it has not waited for; none if it has ended."""
    pids = []
    for file in PROC.glob(f"{pid}/task/*/children"):
        with suppress(OSError):  # the thread has just ended
            pids += map(int, file.read_text().split())
    return pids


def family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for child in children(pid):
        yield from family(child)


def group_members(group: int) -> list[int]:
    """Return the running processes of a process group, without zombies."""
    members = []
    for file in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, owner, *_ = file.read_text().rpartition(")")[2].split()
            if int(owner) == group and state != "Z":
                members.append(int(file.parent.name))
    return members


def wait_for_group(group: int) -> int:
    """Wait until a process group has ended; return how many processes still run: 0."""
    wait_until(lambda: not group_members(group))
    return 0


def find_processes(word: str) -> list[int]:
    """Return the processes whose command line contains a text."""
    pids = []
    for file in PROC.glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word.encode() in file.read_bytes():
                pids.append(int(file.parent.name))
    return pids


def read_variable(pid: int, name: str) -> str | None:
    """Return an environment variable that a process was started with, or None."""
    for variable in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
        key, _, value = variable.decode(errors="replace").partition("=")
        if key == name:
            return value
    return None
