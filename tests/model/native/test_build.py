"""Build the native kernels with a broken compiler and load damaged libraries."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatoken.base.errors import ConfigError
from megatoken.base.system.environment import given_environment
from megatoken.base.system.machine import find_compiler
from megatoken.model.native import build as build_module
from megatoken.model.native.build import INSTRUCTION_SETS, library_name
from megatoken.model.native.selection import find_library

needs_compiler = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")


def build(folder: Path, compiler: str) -> int:
    command = [sys.executable, "-m", "megatoken.model.native.build", folder]
    return subprocess.run(command, env=given_environment() | {"CXX": compiler}).returncode


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
@needs_compiler
def test_a_library_that_is_cut_short_is_named(share: float, tmp_path: Path):
    """The loader would end the process by a bus error."""
    path = tmp_path / library_name("portable")
    command = [find_compiler(), "-shared", "-xc", "/dev/null", "-o", path]
    subprocess.run(command, check=True)
    contents = path.read_bytes()
    path.write_bytes(contents[: int(len(contents) * share)])
    with pytest.raises(ConfigError):
        find_library("portable", tmp_path)


def test_an_old_compiler_makes_what_it_knows(tmp_path: Path):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-march=*) exit 1;; esac\nfor last; do :; done; echo x > "$last"\n'
    )
    compiler.chmod(0o755)
    assert build(tmp_path / "out", str(compiler)) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == [library_name("portable")]
    assert build(tmp_path / "none", "false") == 1


def test_amx_is_built_with_the_kernels_that_test_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Wheels have every instruction set."""
    monkeypatch.setattr(build_module, "cpu_features", lambda: {*INSTRUCTION_SETS["amx"][0]})
    monkeypatch.setattr(
        build_module, "compile_library", lambda name, folder: (folder / library_name(name)).touch()
    )
    monkeypatch.setattr(sys, "argv", ["build", str(tmp_path)])
    build_module.main()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {library_name("amx"), library_name("avx512_bf16")}
