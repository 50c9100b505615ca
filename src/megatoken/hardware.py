"""What is this machine: caches, cores, memory. The only module that reads the environment."""

import contextlib
import ctypes
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

_GIVEN = dict(os.environ)  # before anything here adds to it


def huggingface_cache() -> Path:
    """Folder in which huggingface_hub keeps downloaded repositories (HF_HUB_CACHE, HF_HOME)."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub)
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"


def tiktoken_caches() -> list[Path]:
    """Folders in which tiktoken keeps vocabularies, in the order in which it looks."""
    named = [os.environ.get("TIKTOKEN_CACHE_DIR"), os.environ.get("DATA_GYM_CACHE_DIR")]
    temporary = Path(os.environ.get("TMPDIR") or "/tmp") / "data-gym-cache"
    return [Path(folder) for folder in named if folder] + [temporary]


def megatoken_cache() -> Path:
    """Folder for what megatoken downloads or measures once per machine (MEGATOKEN_CACHE)."""
    own = os.environ.get("MEGATOKEN_CACHE")
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(root) / "megatoken"


def recall(file: str) -> dict[str, Any]:
    """What was measured on this machine before, by circumstance; whatever is damaged or unreadable is not there."""
    try:
        found = json.loads((megatoken_cache() / file).read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a user without a home
        return {}
    return found if isinstance(found, dict) else {}


def remember(file: str, entry: dict[str, Any]) -> None:
    """Keep a measurement for later runs on this machine. One that cannot be kept is no fault: it is made again."""
    with contextlib.suppress(OSError, RuntimeError):
        target = megatoken_cache() / file
        temporary = target.with_name(f".{file}.{os.getpid()}.tmp")  # runs that start together leave each other's alone
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(recall(file) | entry, indent=1) + "\n")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def cpu_count() -> int:
    """Processors this process may use (affinity and cgroup aware on Linux)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_processor_name() -> str:
    """What this machine's processor is called: "AMD EPYC 7763 64-Core Processor", "Apple M2 Pro".

    Linux: /proc/cpuinfo; macOS: sysctl, since platform says "arm" there; elsewhere what platform knows.
    """
    if platform.system() == "Darwin" and (name := _first_line(["sysctl", "-n", "machdep.cpu.brand_string"])):
        return name
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far; 0 where the system does not tell (Windows)."""
    try:
        import resource  # absent on Windows
    except ImportError:
        return 0
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if platform.system() == "Darwin" else kilobytes * 1024


def free_memory_bytes() -> int:
    """Memory that new processes could take without pushing others out; 0 where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


def given_environment() -> dict[str, str]:
    """The environment that this process was started with, for programs that are not ours: without our additions."""
    return dict(_GIVEN)


def find_compiler() -> str:
    """Path of the C++ compiler that torch.compile would call on a CPU; empty when there is none."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), ""
    )


def find_commit() -> str:
    """The commit of a source checkout, "" for an installed package."""
    here = Path(__file__).parent
    if not (here.parents[1] / ".git").exists():
        return ""
    return _first_line(["git", "-C", str(here), "describe", "--always", "--dirty"])


def _first_line(command: list[str]) -> str:
    """What a command prints first; "" when it is not there, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.partition("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


SPINS = 5000
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
_made: dict[str, bool] = {}  # settings of this process


def prepare_process() -> None:
    """Settings that have to be made before torch or numpy is loaded. Choices made in the environment stand."""
    rest_idle_threads()
    keep_freed_memory()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a peer that is late is warned of with a page of C++ frames


def rest_idle_threads() -> None:
    """Let threads of a parallel region soon sleep instead of spinning while they wait.

    GNU's runtime spins for milliseconds, which loses a time slice at every region when another program wants a core:
    on two busy cores a small model trained several times faster with a short spin; with one too short, threads sleep
    and wake at every region and an idle machine loses a quarter (LOG.md).
    OpenBLAS, numpy's own library, spins for 2^26 cycles unless told otherwise, while torch's threads want the cores.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "10")  # a power of two, in cycles


def keep_freed_memory() -> None:
    """Let glibc keep what is freed instead of handing large blocks back to the system at once.

    A training step frees and asks for the same hundreds of megabytes again and again, and every page that comes fresh
    from the system has to be cleared and mapped first. Elsewhere than on glibc nothing happens.
    """
    if "MALLOC_MMAP_MAX_" in os.environ or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    settings = libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    _made["memory"] = all(settings)


def return_freed_memory() -> None:
    """Hand what glibc keeps back to the system once: after trials, whose leavings fit nothing that follows."""
    if _made.get("memory"):
        ctypes.CDLL(None).malloc_trim(0)


def describe_settings() -> list[tuple[str, str]]:
    """(what, how) of the settings that `prepare_process` makes, for people."""
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    spins = os.environ.get("GOMP_SPINCOUNT", "unset")
    memory = "keeps what is freed" if _made.get("memory") else "as the system has it"
    return [("threads", f"OMP_WAIT_POLICY {policy}, GOMP_SPINCOUNT {spins}"), ("malloc", memory)]
