"""Run a command under strace, killing it or failing one of its system calls. Linux."""

import os
import random
import re
import subprocess
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.base.errors import MegatokenError

CALLS = (
    "?open,openat,?creat,write,?pwrite64,?writev,fsync,?fdatasync,?rename,?renameat,?renameat2,"
    "?unlink,unlinkat,?rmdir,?mkdir,?mkdirat,ftruncate,?flock,?chmod,?fchmod,?fchmodat,?link,?linkat"
)
# One thread and no bytecode, so that every run makes the same calls.
ENVIRONMENT = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Point:
    """A fault at the n-th call of one kind: "kill" or an error such as "EIO"; with a "+" all later calls fail too."""

    scenario: str
    call: str
    number: int
    fault: str

    def __str__(self) -> str:
        return f"{self.scenario}-{self.call}-{self.number}-{self.fault}"


def run_traced(
    words: Sequence[str], log: Path, point: Point | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command with its main thread under strace, and the fault of a point."""
    trace = f"strace -y -s 200 -o {log} -e trace={CALLS} -e signal=none".split()
    if point:
        error, every, _ = point.fault.partition("+")
        action = "signal=SIGKILL" if error == "kill" else f"error={error}"
        trace += ["-e", f"inject={point.call}:{action}:when={point.number}{every}"]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run(
        [*trace, *words], env=environment, capture_output=True, text=True, timeout=120
    )


def trace(words: Sequence[str], log: Path) -> Iterator[tuple[str, int, str]]:
    """Run a command that must succeed; yield its calls as list_calls does."""
    done = run_traced(words, log)
    assert done.returncode == 0, done.stderr
    return list_calls(log)


def list_calls(log: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (name, number among calls of that name, line) of every call in a log."""
    counts = Counter()
    for line in log.read_text(errors="replace").splitlines():
        match = re.match(r"([a-z0-9_]+)\(", line)
        if match:
            counts[match[1]] += 1
            yield match[1], counts[match[1]], line


def try_points(
    points: list[Point], attempt: Callable[[Point], str], options: Namespace
) -> dict[str, Any]:
    """Try every point, or a random sample; count outcomes and list failed assertions."""
    total = len(points)
    if 0 < options.sample < total:
        points = random.Random(options.seed).sample(points, options.sample)
    outcomes = Counter()
    failures = []
    with ThreadPoolExecutor(options.jobs) as pool:
        tries = [pool.submit(attempt, point) for point in points]
        for point, result in zip(points, tries, strict=True):
            try:
                outcomes[f"{point.scenario} {point.fault} {result.result()}"] += 1
            except (AssertionError, MegatokenError, subprocess.TimeoutExpired) as error:
                failures.append(f"{point}: {error}")
    counts = {"points": total, "tried": len(points), "outcomes": dict(sorted(outcomes.items()))}
    return {**counts, "failures": failures}
