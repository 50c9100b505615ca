"""Processes of this machine, found in /proc (Linux), and what they were started with."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def children(pid: int) -> list[int]:
    """Processes that a process has started and not yet waited for; none if it has ended."""
    found: list[int] = []
    for file in PROC.glob(f"{pid}/task/*/children"):
        with suppress(OSError):  # of a thread that has just ended
            found += map(int, file.read_text().split())
    return found


def family(pid: int) -> Iterator[int]:
    """A process, its children and theirs."""
    yield pid
    for child in children(pid):
        yield from family(child)


def group_members(group: int) -> list[int]:
    """Processes of a process group that still run; the dead that nobody has waited for do not count."""
    members = []
    for file in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, owner, *_ = file.read_text().rpartition(")")[2].split()
            if int(owner) == group and state != "Z":
                members.append(int(file.parent.name))
    return members


def wait_for_group(group: int, seconds: float = 120.0) -> int:
    """Wait until no process of a group runs any more; return how many still do after `seconds`."""
    deadline = time.monotonic() + seconds
    while (members := group_members(group)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(members)


def find_processes(word: str) -> list[int]:
    """Processes whose command line contains a word."""
    found = []
    for file in PROC.glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [int(file.parent.name)] if word.encode() in file.read_bytes() else []
    return found


def read_variable(pid: int, name: str) -> str | None:
    """An environment variable of a process as it was started; None if it had none."""
    variables = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
    return next((word.partition("=")[2] for word in variables if word.startswith(f"{name}=")), None)
