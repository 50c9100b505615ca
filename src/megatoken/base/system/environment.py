"""Read and set environment variables, except those read in distributed/env.py and redact.py."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatoken.base.errors import ConfigError
from megatoken.base.system.malloc import keep_freed_memory

HEARTBEAT = "MEGATOKEN_HEARTBEAT"
IMPORT = "MEGATOKEN_IMPORT"
INSTRUCTION_SET = "MEGATOKEN_INSTRUCTION_SET"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
INSTRUCTION_SETS = ("avx512_bf16", "avx512", "avx2", "portable")
OMP_SPINS = 5000
_ADDED_VARIABLES: set[str] = set()


def huggingface_cache() -> Path:
    """Return the folder of huggingface_hub's downloads, which HF_HUB_CACHE or HF_HOME can set."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub)
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"


def tiktoken_caches() -> list[Path]:
    """Return the folders in which tiktoken looks for vocabularies, in its order."""
    folders = [os.environ.get("TIKTOKEN_CACHE_DIR"), os.environ.get("DATA_GYM_CACHE_DIR")]
    temporary = Path(os.environ.get("TMPDIR") or "/tmp") / "data-gym-cache"
    return [Path(folder) for folder in folders if folder] + [temporary]


def megatoken_cache() -> Path:
    """Return the cache folder for downloads and measurements, which MEGATOKEN_CACHE can set."""
    if cache := os.environ.get("MEGATOKEN_CACHE"):
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatoken"


def heartbeat_file() -> Path | None:
    """Return the file to which this rank must write its heartbeat; None without a launcher."""
    file = os.environ.get(HEARTBEAT)
    return Path(file) if file else None


def imported_modules() -> tuple[str, ...]:
    """Return the names of the users' modules in MEGATOKEN_IMPORT, which --import sets."""
    return tuple(filter(None, os.environ.get(IMPORT, "").split(",")))


def import_modules(names: Sequence[str]) -> None:
    """Add users' modules to those of this process and of the processes that it starts."""
    modules = dict.fromkeys((*imported_modules(), *names))
    os.environ[IMPORT] = ",".join(modules)


def visible_gpus() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; an empty list if unset."""
    return list(filter(None, os.environ.get(VISIBLE_GPUS, "").split(",")))


def preferred_precision() -> str:
    """Return MEGATOKEN_PRECISION, which replaces `machine.precision=auto`; "" if unset."""
    return os.environ.get("MEGATOKEN_PRECISION", "")


def max_instruction_set() -> str:
    """Return MEGATOKEN_INSTRUCTION_SET, or "" if unset. Raises ConfigError for an unknown value."""
    limit = os.environ.get(INSTRUCTION_SET, "")
    if limit and limit not in INSTRUCTION_SETS:
        fix = f"set it to one of {', '.join(INSTRUCTION_SETS)}"
        raise ConfigError(f"unknown instruction set {limit!r}", INSTRUCTION_SET, fix)
    return limit


def preferred_compiler() -> str:
    """Return the C++ compiler that the user set in CXX; "" if unset."""
    return os.environ.get("CXX", "")


def python_command(program: str) -> list[str]:
    """Return a command that runs the Python code `program`, in which this package can be imported.

    With -P, files in the current folder cannot shadow modules.
    """
    path = f"import sys; sys.path.append({str(Path(__file__).parents[3])!r})"
    return [sys.executable, "-P", "-c", f"{path}; {program}"]


def prepare_process() -> None:
    """Set variables that torch and numpy read when they are imported, unless the user has set them.

    Two of them limit how long an idle thread spins, that is, keeps its core busy while it waits. By
    default, threads of GNU's OpenMP runtime spin for milliseconds. If another program needs the
    core, this costs a time slice per parallel region. Spinning too briefly, on the other hand,
    costs a quarter of the speed on an idle machine. By default, threads of OpenBLAS, which numpy
    uses, spin for 2^26 cycles.
    """
    defaults = {
        "OPENBLAS_THREAD_TIMEOUT": "10",  # log2 of cycles
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or torch prints a page of C++ frames if a process is late
        "KINETO_LOG_LEVEL": "99",  # torch's profiler prints its starts and stops
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        defaults["GOMP_SPINCOUNT"] = str(OMP_SPINS)
    _ADDED_VARIABLES.update(defaults.keys() - os.environ.keys())
    os.environ.update({name: defaults[name] for name in _ADDED_VARIABLES})
    if "MALLOC_MMAP_MAX_" not in os.environ:
        keep_freed_memory()


def given_environment() -> dict[str, str]:
    """Return the environment as it was before `prepare_process`, for child processes."""
    return {name: value for name, value in os.environ.items() if name not in _ADDED_VARIABLES}


@contextmanager
def safe_import_path() -> Iterator[None]:
    """Keep the current folder out of the import path of processes started inside the context."""
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
