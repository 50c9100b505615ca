"""Read the null GPU's counters."""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch

LIBRARY = "libcuda.so.1"


@dataclass(frozen=True)
class Counts:
    """Calls since the last reset.

    calls: by demangled kernel name, "triton NAME" or "[library call]". syncs: times that the host
    waited for the device. allocations: of device memory, not served by torch's cache.
    """

    calls: dict[str, int]
    syncs: int
    allocations: int
    allocated_bytes: int
    peak_bytes: int

    def find(self, *words: str) -> int:
        """Return the number of calls whose name contains one of the words."""
        return sum(n for name, n in self.calls.items() if any(word in name for word in words))

    @property
    def total(self) -> int:
        return sum(self.calls.values())


def is_loaded() -> bool:
    """Return whether the null GPU is preloaded."""
    return hasattr(ctypes.CDLL(None), "nullgpu_reset")


def reset() -> None:
    """Set all counters to 0, and the peak to what is allocated."""
    ctypes.CDLL(LIBRARY).nullgpu_reset()


def count_step(step: Callable[[], object]) -> Counts:
    """Count the calls of a training step, which must not compile again."""
    torch._dynamo.config.error_on_recompile = True
    try:
        reset()
        step()
        return read()
    finally:
        torch._dynamo.config.error_on_recompile = False


def read() -> Counts:
    """Return the counters."""
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as file:
        ctypes.CDLL(LIBRARY).nullgpu_dump(file.name.encode())
        rows = [line.rstrip("\n").split("\t") for line in file]
    calls = {name: int(number) for number, name in rows if not name.startswith("#")}
    totals = {name[1:]: int(number) for number, name in rows if name.startswith("#")}
    command = ["c++filt", *calls]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return Counts(calls=dict(zip(names, calls.values(), strict=True)), **totals)
