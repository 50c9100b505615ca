"""AMX is used only if its kernels agree with those for AVX512-BF16.

The processor has AVX512-BF16 and claims to have AMX, whose tiles are emulated.
"""

import shutil
from pathlib import Path

import pytest

from megatoken.base.system.machine import find_compiler
from megatoken.model.native import build
from megatoken.model.native.build import INSTRUCTION_SETS, library_name, runnable_instruction_sets
from megatoken.model.native.selection import find_amx_fault, find_library
from tests.model.native.conftest import compile_once, find_emulation

needs_avx512_bf16 = pytest.mark.skipif(
    not find_compiler() or "avx512_bf16" not in runnable_instruction_sets(),
    reason="no C++ compiler, or no AVX512-BF16",
)


def choose(folder: Path, amx: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return the chosen instruction set and the fault found with these AMX kernels.

    Their counterparts are in the same folder, on a processor with AMX.
    """
    for path in (compile_once("avx512_bf16"), amx):
        (folder / path.name).symlink_to(path)
    monkeypatch.setattr(build, "cpu_features", lambda: {*INSTRUCTION_SETS["amx"][0]})
    library = find_library(folder=folder)
    return library.instruction_set, find_amx_fault(folder)


@pytest.mark.long
@needs_avx512_bf16
def test_kernels_that_agree_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    amx = compile_once("amx", "emulated", (*find_emulation("amx"), "-O1"))
    assert choose(tmp_path, amx, monkeypatch) == ("amx", "")


@pytest.mark.long
@needs_avx512_bf16
@pytest.mark.parametrize(
    ("file", "right", "wrong", "case"),
    [
        (
            "products_amx.h",
            "multiply_add(3, 5, 7)",
            "multiply_add(3, 5, 6)",
            "matmul 67 x 45 x 97, nothing transposed",
        ),
        ("scores.h", "j / 16 * 256", "j / 32 * 256", "causal attention"),
    ],
)
def test_a_wrong_tile_is_found(
    file: str, right: str, wrong: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    library_name("amx")  # is kept, of the sources as they are
    sources = tmp_path / "kernels"
    shutil.copytree(build.SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(right) == 1
    (sources / file).write_text(text.replace(right, wrong))
    with monkeypatch.context() as patch:
        patch.setattr(build, "SOURCES", sources)
        planted = compile_once("amx", f"wrong-{file}", (*find_emulation("amx"), "-O0"))
    instruction_set, fault = choose(tmp_path, planted, monkeypatch)
    assert (instruction_set, case in fault) == ("avx512_bf16", True), fault


@pytest.mark.long
@needs_avx512_bf16
@pytest.mark.skipif("amx" in runnable_instruction_sets(), reason="Linux grants tiles here")
def test_real_tiles_that_linux_refuses_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first tile instruction would kill the process."""
    chosen = choose(tmp_path, compile_once("amx", "O0", ("-O0",)), monkeypatch)
    assert chosen == ("avx512_bf16", "Linux does not grant its tiles")


def test_kernels_that_are_missing_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "cpu_features", lambda: {*INSTRUCTION_SETS["amx"][0]})
    assert find_library(folder=tmp_path) is None
    assert "not compiled" in find_amx_fault(tmp_path)


def test_a_processor_without_amx_has_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "cpu_features", lambda: {*INSTRUCTION_SETS["avx512_bf16"][0]})
    assert find_amx_fault(tmp_path) == ""
