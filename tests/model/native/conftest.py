"""Kernels built by `make`; others are compiled once for all tests, until their sources change."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from megatoken.base.system.machine import find_compiler
from megatoken.base.system.threads import thread_count
from megatoken.model.native import attention, block, int8, ops, products
from megatoken.model.native.build import (
    INSTRUCTION_SETS,
    compile_library,
    library_name,
    runnable_instruction_sets,
)
from megatoken.model.native.library import Library
from megatoken.model.native.selection import find_library

AMX_TILES = "-march=cooperlake", "-DMEGATOKEN_EMULATE_AMX"  # the same source, tiles in plain C++
BF16 = "-march=skylake-avx512", "-include", str(Path(__file__).with_name("emulated_bf16.h"))
FOLDER = Path(__file__).parents[3] / "build/native"


def find_emulation(instruction_set: str) -> tuple[str, ...]:
    """Return compiler options by which this processor computes what it lacks; () if it cannot."""
    runnable = runnable_instruction_sets()
    if "avx512" not in runnable or instruction_set not in ("amx", "avx512_bf16"):
        return ()
    tiles = AMX_TILES if instruction_set == "amx" else ()
    return tiles if "avx512_bf16" in runnable else (*tiles, *BF16)


def compile_once(
    instruction_set: str, kind: str = "O1", options: tuple[str, ...] = ("-O1",)
) -> Path:
    """Compile a library unless a test has done so since the sources changed; return its path.

    options: of its kind; -O1 takes half of the time.
    """
    folder = FOLDER / kind
    path = folder / library_name(instruction_set)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{instruction_set}.lock"):
        if not path.exists():
            compile_library(instruction_set, folder, options)
    return path


@pytest.fixture(scope="session")
def native_library() -> Callable[[str], Library]:
    """Library of an instruction set, compiled at the first call; skips where it cannot be."""

    @cache
    def load(instruction_set: str) -> Library:
        if not find_compiler():
            pytest.skip("no C++ compiler")
        runnable = runnable_instruction_sets()
        if instruction_set in runnable:
            library = find_library(instruction_set)
            library = library or Library(instruction_set, compile_once(instruction_set))
        elif emulation := find_emulation(instruction_set):
            path = compile_once(instruction_set, "emulated", (*emulation, "-O1"))
            library = Library(instruction_set, path)
        else:
            pytest.skip(f"this processor has no {instruction_set}")
        if instruction_set == "amx" and not library.call("request_tiles"):
            pytest.skip("Linux does not grant tiles")
        return library

    return load


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Return fp32, then bf16."""
    return request.param


@pytest.fixture(params=INSTRUCTION_SETS)
def library(
    request: pytest.FixtureRequest,
    native_library: Callable[[str], Library],
    monkeypatch: pytest.MonkeyPatch,
) -> Library:
    """Compute with this instruction set."""
    return use(native_library(request.param), monkeypatch)


@pytest.fixture
def fastest(native_library: Callable[[str], Library], monkeypatch: pytest.MonkeyPatch) -> Library:
    """Compute with the best instruction set that this processor has."""
    return use(native_library(runnable_instruction_sets()[0]), monkeypatch)


def use(library: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    def loaded_library():
        library.set_threads(thread_count())
        return library

    for module in (attention, block, int8, ops, products):
        monkeypatch.setattr(module, "loaded_library", loaded_library)
    return loaded_library()
