"""The kernels, compiled once for all test processes and kept until their sources change."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

from megatoken.native import attention, int8, ops, products
from megatoken.native.build import (
    INSTRUCTION_SETS,
    compile_library,
    library_name,
    runnable_instruction_sets,
)
from megatoken.native.library import Library, find_library
from megatoken.system.machine import find_compiler

EMULATED_AMX = "-march=cooperlake", "-DMEGATOKEN_EMULATE_AMX"  # the same source, tiles in plain C++
FOLDER = Path(__file__).parents[2] / "build" / "native"


@pytest.fixture(scope="session")
def native_library() -> Callable[[str], Library]:
    """Library of an instruction set, compiled at the first call; skips where it cannot be."""

    @cache
    def load(instruction_set: str) -> Library:
        if not find_compiler():
            pytest.skip("no C++ compiler")
        runnable = runnable_instruction_sets()
        folder, options = FOLDER, tuple[str, ...]()
        if instruction_set == "amx" and "amx" not in runnable and "avx512_bf16" in runnable:
            folder, options = FOLDER / "emulated", EMULATED_AMX
        elif instruction_set not in runnable:
            pytest.skip(f"this processor has no {instruction_set}")
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{instruction_set}.lock"):
            if not (folder / library_name(instruction_set)).exists():
                compile_library(instruction_set, folder, options)
        library = find_library(instruction_set, folder)
        assert library is not None
        return library

    return load


@pytest.fixture(params=INSTRUCTION_SETS)
def library(
    request: pytest.FixtureRequest,
    native_library: Callable[[str], Library],
    monkeypatch: pytest.MonkeyPatch,
) -> Library:
    """Compute with this instruction set."""
    loaded = native_library(request.param)
    for module in (attention, int8, ops, products):
        monkeypatch.setattr(module, "loaded_library", lambda: loaded)
    return loaded
