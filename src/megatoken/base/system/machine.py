"""Describe this machine (processor, cores, memory, compiler) and the commit of this package."""

import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from megatoken.base.system.environment import max_instruction_set, preferred_compiler
from megatoken.base.system.process import run_child

CPU_INFO = Path("/proc/cpuinfo")
CPU_TIMES = Path("/proc/stat")
MEMORY_INFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_NAMES = Path("/proc/self/cgroup")
# Prefixes of the features in /proc/cpuinfo that MEGATOKEN_INSTRUCTION_SET disables.
DISABLED_FEATURES = {
    "": (),
    "avx512_bf16": ("amx",),
    "avx512": ("amx", "avx512_bf16"),
    "avx2": ("amx", "avx512"),
    "portable": ("amx", "avx512", "avx2", "fma"),
}
COMMAND_SECONDS = 5.0
MIB = 1.048576e-3  # in GB
CPU_SECONDS = 0.1  # over which the load of the cores is measured
GPU_LOAD = [
    "nvidia-smi",
    "--query-gpu=name,utilization.gpu,memory.used,memory.total",
    "--format=csv,noheader,nounits",
]


def cpu_count() -> int:
    """Return the number of cores that this process may use.

    On Linux it respects CPU affinity and cgroup limits.
    """
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    quotas = [text.split() for (text,) in _read_cgroups("cpu", "cpu.max")]
    quotas += _read_cgroups("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    for quota, period in quotas:
        if quota.strip() not in ("max", "-1"):
            count = min(count, max(1, int(quota) // int(period)))
    return count


def _read_cgroups(controller: str, *files: str) -> Iterator[list[str]]:
    """Yield the contents of `files` in each cgroup (version 1 or 2) that limits this process."""
    try:
        lines = CGROUP_NAMES.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controller not in controllers.split(",") and controllers:
            continue
        top = CGROUPS / controller if controllers else CGROUPS
        # In a container, `name` may be a path of the host; then only `top` can be read.
        folder = top / name.lstrip("/")
        for ancestor in (folder, *folder.parents[: len(folder.parts) - len(top.parts)]):
            with suppress(OSError):
                yield [(ancestor / file).read_text() for file in files]


def find_processor_name() -> str:
    """Return the processor's name, such as "AMD EPYC 7763 64-Core Processor" or "Apple M2 Pro"."""
    if platform.system() == "Darwin":
        name = _first_line(["sysctl", "-n", "machdep.cpu.brand_string"])
    else:
        name = _read_cpu_info("model name")
    return name or platform.processor() or platform.machine()


def cpu_features() -> frozenset[str]:
    """Return the CPU features that Linux reports, such as avx2; empty on other systems."""
    return allowed_features(_read_cpu_info("flags", "Features").split())


def allowed_features(features: Iterable[str]) -> frozenset[str]:
    """Return the CPU features that MEGATOKEN_INSTRUCTION_SET does not disable.

    The variable has no effect on torch's own libraries.
    """
    disabled = DISABLED_FEATURES[max_instruction_set()]
    return frozenset(name for name in features if not name.startswith(disabled))


def _read_cpu_info(*keys: str) -> str:
    """Return the first value in /proc/cpuinfo for any of the keys; "" if none is there."""
    with suppress(OSError), CPU_INFO.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(keys):
                return line.split(":", 1)[1].strip()
    return ""


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    with suppress(OSError):  # ru_maxrss includes the parent's memory at the fork
        status = Path("/proc/self/status").read_text()
        if peak := re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE):
            return int(peak[1]) * 1024
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if platform.system() == "Darwin" else kilobytes * 1024


def free_memory_bytes() -> int:
    """Return the bytes available without swapping, within all cgroup limits; 0 if unknown."""
    return _read_memory()[0]


def _read_memory() -> tuple[int, int]:
    """Return the available bytes and all bytes, within all cgroup limits; zeros if unknown."""
    try:
        counts = dict(re.findall(r"^(\w+):\s*(\d+)", MEMORY_INFO.read_text(), re.M))
    except OSError:
        return 0, 0
    free, total = (int(counts.get(key, 0)) * 1024 for key in ("MemAvailable", "MemTotal"))
    limits = [
        *_read_cgroups("memory", "memory.max", "memory.current", "memory.stat"),
        *_read_cgroups("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
    ]
    for limit, used, stat in limits:
        if limit.strip() != "max":
            counts = dict(line.split() for line in stat.splitlines())
            page_cache = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
            free = min(free, max(1, int(limit) - int(used) + page_cache))
            total = min(total, int(limit))
    return free, total


def read_load() -> list[tuple[str, float, str]]:
    """Return the name, share and text of this machine's loads: CPU, memory and GPUs.

    Loads that cannot be read are left out.
    """
    free, total = _read_memory()
    loads = [("memory", (total - free) / 1e9, total / 1e9, "GB")]
    with suppress(OSError):  # only Linux has the file
        readings = []
        for _ in range(2):
            readings.append(CPU_TIMES.read_text().split()[1:9])
            time.sleep(CPU_SECONDS)
        spent = [int(end) - int(start) for start, end in zip(*readings, strict=True)]
        idle = sum(spent[3:5])  # also waiting for a disk
        loads.insert(0, ("CPU", 100 - 100 * idle / sum(spent), 100, "%"))
    for index, line in enumerate(_read_lines(GPU_LOAD)):
        with suppress(ValueError):  # a value that this GPU does not report
            name, *values = line.split(", ")
            busy, used, size = map(float, values)
            loads.append((f"GPU {index}, {name}", busy, 100, "%"))
            loads.append((f"GPU {index} memory", used * MIB, size * MIB, "GB"))
    return [
        (name, used / total, f"{used:.1f} of {total:.4g} {unit}")
        for name, used, total, unit in loads
        if total
    ]


def allow_open_files() -> None:
    """Raise this process's limit of open files to the largest that the system permits."""
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def find_compiler() -> str:
    """Return the path of the C++ compiler that torch.compile would use on a CPU; "" if none."""
    for name in (preferred_compiler(), "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return ""


def find_commit() -> str:
    """Return the git commit of this package's source checkout; "" for an installed package."""
    package = Path(__file__).parents[2]
    if not (package.parents[1] / ".git").exists():
        return ""
    return _first_line(["git", "-C", str(package), "describe", "--always", "--dirty"])


def _first_line(command: list[str]) -> str:
    """Return the first line that a command prints; "" if it is missing, fails or hangs."""
    return next(iter(_read_lines(command)), "").strip()


def _read_lines(command: list[str]) -> list[str]:
    """Return the lines that a command prints; [] if it is missing, fails or hangs."""
    lines: list[str] = []
    try:
        exit_code = run_child(command, on_line=lines.append, timeout=COMMAND_SECONDS)
    except OSError:
        return []
    return lines if exit_code == 0 else []
