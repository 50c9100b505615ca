"""Caches, cores and memory of this machine, and settings of this process; the only reader of environment variables
beside distributed/env.py and redact.py."""

import contextlib
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatoken.errors import ConfigError
from megatoken.system.atomic_write import read_object, replace_file

HEARTBEAT = "MEGATOKEN_HEARTBEAT"
INSTRUCTION_SET = "MEGATOKEN_INSTRUCTION_SET"
# What a processor that has no more than this instruction set lacks: beginnings of names in /proc/cpuinfo.
LACKING = {
    "avx512_bf16": ("amx",),
    "avx512": ("amx", "avx512_bf16"),
    "avx2": ("amx", "avx512"),
    "portable": ("amx", "avx512", "avx2", "fma"),
}
CGROUPS, CGROUP_NAMES = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def huggingface_cache() -> Path:
    """Folder of the repositories that huggingface_hub has downloaded (HF_HUB_CACHE, HF_HOME)."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub)
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"


def tiktoken_caches() -> list[Path]:
    """Folders in which tiktoken looks for vocabularies, in its order."""
    folders = [os.environ.get("TIKTOKEN_CACHE_DIR"), os.environ.get("DATA_GYM_CACHE_DIR")]
    temporary = Path(os.environ.get("TMPDIR") or "/tmp") / "data-gym-cache"
    return [Path(folder) for folder in folders if folder] + [temporary]


def megatoken_cache() -> Path:
    """Folder for downloads and for measurements of this machine (MEGATOKEN_CACHE)."""
    if cache := os.environ.get("MEGATOKEN_CACHE"):
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatoken"


def heartbeat_file() -> Path | None:
    """Where this rank notes what it does (MEGATOKEN_HEARTBEAT), for the process that started it (launch/local.py)."""
    file = os.environ.get(HEARTBEAT)
    return Path(file) if file else None


def preferred_precision() -> str:
    """What replaces `machine.precision=auto` on this machine (MEGATOKEN_PRECISION); empty if unset."""
    return os.environ.get("MEGATOKEN_PRECISION", "")


def cache_get(file: str) -> dict[str, Any]:
    """The measurements in a file of the cache; empty if it is missing or damaged."""
    with contextlib.suppress(RuntimeError):  # a user without a home
        return read_object(megatoken_cache() / file)
    return {}


def cache_put(file: str, entry: dict[str, Any]) -> None:
    """Keep a measurement for later runs on this machine. Best effort: if it cannot be written, it is repeated."""
    with contextlib.suppress(OSError, RuntimeError):
        target = megatoken_cache() / file
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, json.dumps(cache_get(file) | entry, indent=1) + "\n")


def cpu_count() -> int:
    """Processors this process may use: those of its affinity, and no more than its cgroups grant (Linux)."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    version_2 = (text.split() for (text,) in _read_cgroups("cpu", "cpu.max"))
    for quota, period in (
        *version_2,
        *_read_cgroups("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
    ):
        if quota.strip() not in ("max", "-1"):
            count = min(count, max(1, int(quota) // int(period)))
    return count


def _read_cgroups(controller: str, *files: str) -> Iterator[list[str]]:
    """What `files` contain in each cgroup that limits this process: its own and all above it, of version 1 or 2."""
    try:
        lines = CGROUP_NAMES.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controller in controllers.split(",") or not controllers:
            top = CGROUPS / (controllers and controller)
            own = top / name.lstrip(
                "/"
            )  # in a container perhaps the host's name, of which only `top` can be read
            for folder in (own, *own.parents[: len(own.parts) - len(top.parts)]):
                with contextlib.suppress(OSError):
                    yield [(folder / file).read_text() for file in files]


def find_processor_name() -> str:
    """The processor's name: "AMD EPYC 7763 64-Core Processor", "Apple M2 Pro"."""
    if platform.system() == "Darwin" and (
        name := _first_line(["sysctl", "-n", "machdep.cpu.brand_string"])
    ):
        return name
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_resident_bytes() -> int:
    """Peak resident memory of this process; 0 if unknown (Windows)."""
    with contextlib.suppress(OSError):  # ru_maxrss begins with the memory of the parent
        if peak := re.search(
            r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
        ):
            return int(peak[1]) * 1024
    try:
        import resource  # absent on Windows
    except ImportError:
        return 0
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if platform.system() == "Darwin" else kilobytes * 1024


def allow_open_files(count: int) -> None:
    """Let this process have `count` files open beside its others, as far as the system permits."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # absent on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + 512 if hard == resource.RLIM_INFINITY else min(count + 512, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def free_memory_bytes() -> int:
    """Memory available to new processes without swapping, and within the limits of the cgroups; 0 if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(
                int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return 0
    version_1 = _read_cgroups(
        "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"
    )
    for limit, used, stat in (
        *_read_cgroups("memory", "memory.max", "memory.current", "memory.stat"),
        *version_1,
    ):
        if limit.strip() != "max":
            counts = dict(line.split() for line in stat.splitlines())
            droppable = int(
                counts.get("total_inactive_file", counts.get("inactive_file", 0))
            )  # the page cache's
            free = min(free, max(1, int(limit) - int(used) + droppable))
    return free


def find_compiler() -> str:
    """Path of the C++ compiler that torch.compile would call on a CPU; empty if there is none."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), "")


def cpu_features() -> frozenset[str]:
    """The processor's features as Linux names them (avx2, avx512_bf16, amx_bf16, ...); empty where they are unknown."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            flags = next(
                line.split(":", 1)[1].split()
                for line in lines
                if line.startswith(("flags", "Features"))
            )
    except (OSError, StopIteration):
        return frozenset()
    return allowed_features(flags)


def allowed_features(features: Iterable[str]) -> frozenset[str]:
    """The features without those that MEGATOKEN_INSTRUCTION_SET=avx2, or another of LACKING, leaves out.

    torch's libraries have switches of their own. Raises ConfigError for another value.
    """
    limit = os.environ.get(INSTRUCTION_SET, "")
    if limit and limit not in LACKING:
        raise ConfigError(
            f"unknown instruction set {limit!r}",
            INSTRUCTION_SET,
            f"set it to one of {', '.join(LACKING)}",
        )
    return frozenset(each for each in features if not (limit and each.startswith(LACKING[limit])))


def find_commit() -> str:
    """The commit of a source checkout; empty for an installed package."""
    folder = Path(__file__).parents[1]
    if not (folder.parents[1] / ".git").exists():
        return ""
    return _first_line(["git", "-C", str(folder), "describe", "--always", "--dirty"])


def _first_line(command: list[str]) -> str:
    """The first line of a command's output; empty if it is missing, fails or hangs."""
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=5)
            .stdout.partition("\n")[0]
            .strip()
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""


def python_command(program: str) -> list[str]:
    """A command that runs `program` with this package importable and the current folder, whose files may have any name,
    not (-P)."""
    return [
        sys.executable,
        "-P",
        "-c",
        f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); {program}",
    ]


OMP_SPINS = 5000
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
_ADDED_VARIABLES: set[str] = set()


def prepare_process() -> None:
    """Settings of the commands that have to be made before torch or numpy is loaded. The user's own variables win.

    GNU's OpenMP runtime spins for milliseconds while a thread waits, which loses a time slice at every parallel region
    when another program wants a core; with too short a spin an idle machine loses a quarter (LOG.md). OpenBLAS, numpy's
    library, spins for 2^26 cycles.
    """
    defaults = {
        "OPENBLAS_THREAD_TIMEOUT": "10",  # a power of two, in cycles
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns about a late process with a page of C++ frames
        "KINETO_LOG_LEVEL": "99",  # torch's profiler prints its starts and stops
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        defaults["GOMP_SPINCOUNT"] = str(OMP_SPINS)
    _ADDED_VARIABLES.update(defaults.keys() - os.environ.keys())
    os.environ.update({name: defaults[name] for name in _ADDED_VARIABLES})
    if "MALLOC_MMAP_MAX_" not in os.environ:
        keep_freed_memory()


def given_environment() -> dict[str, str]:
    """The environment without the additions of `prepare_process`, for child processes."""
    return {name: value for name, value in os.environ.items() if name not in _ADDED_VARIABLES}


def keep_freed_memory() -> bool:
    """Let glibc keep large blocks that are freed, and return whether it does.

    A training step frees and allocates the same hundreds of megabytes again and again, and the system would have to
    clear and map every new page.
    """
    libc = _glibc()
    return libc is not None and bool(
        libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    )


def return_freed_memory() -> None:
    """Return memory that glibc keeps to the system once, after trials whose blocks fit nothing that follows."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
