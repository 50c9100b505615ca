"""Read and set environment variables. Only distributed/env.py and redact.py read others."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatoken.errors import ConfigError
from megatoken.system.malloc import keep_freed_memory

HEARTBEAT = "MEGATOKEN_HEARTBEAT"
INSTRUCTION_SET = "MEGATOKEN_INSTRUCTION_SET"
INSTRUCTION_SETS = ("avx512_bf16", "avx512", "avx2", "portable")
OMP_SPINS = 5000
_ADDED_VARIABLES: set[str] = set()


def huggingface_cache() -> Path:
    """Return huggingface_hub's folder of downloaded repositories (HF_HUB_CACHE, HF_HOME)."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub)
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"


def tiktoken_caches() -> list[Path]:
    """Return the folders that tiktoken searches for vocabularies, in its order."""
    folders = [os.environ.get("TIKTOKEN_CACHE_DIR"), os.environ.get("DATA_GYM_CACHE_DIR")]
    temporary = Path(os.environ.get("TMPDIR") or "/tmp") / "data-gym-cache"
    return [Path(folder) for folder in folders if folder] + [temporary]


def megatoken_cache() -> Path:
    """Return the folder for downloads and for measurements of this machine (MEGATOKEN_CACHE)."""
    if cache := os.environ.get("MEGATOKEN_CACHE"):
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatoken"


def heartbeat_file() -> Path | None:
    """Return the file in which the launcher expects this rank's heartbeat, if there is one."""
    file = os.environ.get(HEARTBEAT)
    return Path(file) if file else None


def preferred_precision() -> str:
    """Return the replacement for `machine.precision=auto` (MEGATOKEN_PRECISION); empty if unset."""
    return os.environ.get("MEGATOKEN_PRECISION", "")


def max_instruction_set() -> str:
    """Return MEGATOKEN_INSTRUCTION_SET; empty if unset. Raises ConfigError for an unknown one."""
    limit = os.environ.get(INSTRUCTION_SET, "")
    if limit and limit not in INSTRUCTION_SETS:
        fix = f"set it to one of {', '.join(INSTRUCTION_SETS)}"
        raise ConfigError(f"unknown instruction set {limit!r}", INSTRUCTION_SET, fix)
    return limit


def preferred_compiler() -> str:
    """Return the user's C++ compiler (CXX); empty if unset."""
    return os.environ.get("CXX", "")


def python_command(program: str) -> list[str]:
    """Return a command that runs Python code with this package importable.

    -P keeps the current folder, whose files may have any name, out of the import path.
    """
    path = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})"
    return [sys.executable, "-P", "-c", f"{path}; {program}"]


def prepare_process() -> None:
    """Set variables that torch and numpy read when they are loaded. The user's own values win.

    In GNU's OpenMP runtime a waiting thread spins for milliseconds, and so loses a time slice at
    every parallel region when another program wants its core; but if it spins too briefly, an idle
    machine loses a quarter of its speed. OpenBLAS, numpy's library, spins for 2^26 cycles.
    """
    defaults = {
        "OPENBLAS_THREAD_TIMEOUT": "10",  # log2 of cycles
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch prints a page of C++ frames about a late process
        "KINETO_LOG_LEVEL": "99",  # torch's profiler prints its starts and stops
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        defaults["GOMP_SPINCOUNT"] = str(OMP_SPINS)
    _ADDED_VARIABLES.update(defaults.keys() - os.environ.keys())
    os.environ.update({name: defaults[name] for name in _ADDED_VARIABLES})
    if "MALLOC_MMAP_MAX_" not in os.environ:
        keep_freed_memory()


def given_environment() -> dict[str, str]:
    """Return the environment without the additions of `prepare_process`, for child processes."""
    return {name: value for name, value in os.environ.items() if name not in _ADDED_VARIABLES}


@contextmanager
def safe_import_path() -> Iterator[None]:
    """Keep the current folder out of the import path of processes that are started meanwhile."""
    os.putenv("PYTHONSAFEPATH", "1")
    try:
        yield
    finally:
        if "PYTHONSAFEPATH" not in os.environ:
            os.unsetenv("PYTHONSAFEPATH")


def replace_environment(variables: Mapping[str, str]) -> None:
    """Replace this process's environment."""
    os.environ.clear()
    os.environ.update(variables)
