"""Find the fastest kernels for this processor.

AMX is used only after a self-test: its kernels were written on a processor without it.
"""

from functools import cache
from pathlib import Path

from megatoken.base.system.threads import thread_count
from megatoken.model.native.build import library_name, runnable_instruction_sets
from megatoken.model.native.library import Library
from megatoken.model.native.self_test import find_fault

NO_LIBRARY = "install g++ and run python -m megatoken.model.native.build"
FOLDER = Path(__file__).parent


@cache
def find_library(instruction_set: str = "", folder: Path = FOLDER) -> Library | None:
    """Return the kernels of an instruction set; by default, the fastest for this processor.

    Returns None if they have not been compiled. Raises ConfigError for a damaged file.
    """
    for name in [instruction_set] if instruction_set else runnable_instruction_sets():
        if name == "amx" and not instruction_set and find_amx_fault(folder):
            continue
        path = folder / library_name(name)
        if path.exists():
            return Library(name, path)
    return None


@cache
def find_amx_fault(folder: Path = FOLDER) -> str:
    """Return why AMX is not used although this processor has it; "" if nothing is wrong."""
    if "amx" not in runnable_instruction_sets():
        return ""
    amx = find_library("amx", folder)
    avx512 = find_library("avx512_bf16", folder)
    if amx is None or avx512 is None:
        return "its kernels are not compiled"
    return find_fault(amx, avx512)


def loaded_library() -> Library:
    """Return the kernels, set to use `thread_count` threads; callers check `find_library` first."""
    library = find_library()
    assert library is not None, "the caller asks find_library() first"
    library.set_threads(thread_count())
    return library
