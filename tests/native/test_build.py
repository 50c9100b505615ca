"""Libraries that are damaged or cannot be compiled are told in a line, with what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatoken.errors import ConfigError
from megatoken.native.build import library_name, runnable_instruction_sets
from megatoken.native.library import find_library
from megatoken.system.environment import given_environment
from megatoken.system.machine import find_compiler

needs_compiler = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")


def build(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "megatoken.native.build", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=given_environment() | variables
    )


@pytest.mark.parametrize("kept", [0, 40, 0.5, -1])
@needs_compiler
def test_a_library_that_is_cut_short_is_named(kept: float, tmp_path: Path) -> None:
    """The loader would end the process by a bus error."""
    source = tmp_path / "empty.c"
    source.touch()
    path = tmp_path / library_name("portable")
    subprocess.run([find_compiler(), "-shared", str(source), "-o", str(path)], check=True)
    contents = path.read_bytes()
    path.write_bytes(contents[: int(len(contents) * kept) if kept == 0.5 else int(kept)])
    with pytest.raises(
        ConfigError, match=r"the native kernels do not load — .*-portable-.* — delete it, then"
    ):
        find_library("portable", tmp_path)


def test_an_old_compiler_makes_what_it_knows(tmp_path: Path) -> None:
    """Without an instruction set that the processor has, the next one; without any, an error."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-march=*) exit 1;; esac\nfor last; do :; done; echo x > "$last"\n'
    )
    compiler.chmod(0o755)
    done = build(str(tmp_path / "out"), CXX=str(compiler))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [library_name("portable")]
    for name in runnable_instruction_sets()[:-1]:
        assert f"cannot compile the native kernels for {name}" in done.stdout
    done = build(str(tmp_path / "none"), CXX="false")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
