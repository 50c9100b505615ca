"""Kernels on odd sizes access only their own memory, without undefined behavior or races."""

import os
import subprocess
import zlib
from pathlib import Path

import pytest

from megatoken.base.system.machine import find_compiler
from megatoken.model.native import build
from megatoken.model.native.build import INSTRUCTION_SETS, library_name, runnable_instruction_sets
from tests.model.native.conftest import FOLDER, find_emulation
from tests.processes import HANG_SECONDS

MEMORY = "address,undefined"
DRIVERS = [
    pytest.param(driver, output, name, MEMORY, marks=[] if name == "avx2" else pytest.mark.slow)
    for driver, output in (("products", "150 products\n"), ("operations", "6 rounds\n"))
    for name in INSTRUCTION_SETS
]
DRIVERS.append(pytest.param("operations", "6 rounds\n", "avx2", "thread", marks=pytest.mark.slow))


@pytest.mark.long
@pytest.mark.parametrize(("driver", "output", "instruction_set", "sanitizers"), DRIVERS)
def test_sanitizers_find_nothing(driver: str, output: str, instruction_set: str, sanitizers: str):
    compiler, runnable = find_compiler(), runnable_instruction_sets()
    if not compiler:
        pytest.skip("no C++ compiler")
    options = INSTRUCTION_SETS[instruction_set][1]
    if instruction_set not in runnable and not (options := find_emulation(instruction_set)):
        pytest.skip(f"this processor has no {instruction_set}")
    source = Path(__file__).with_name(f"{driver}_driver.cc")
    name = f"{driver}-{zlib.crc32(source.read_bytes())}-{library_name(instruction_set)}"
    program = FOLDER / "sanitized" / f"{sanitizers}-{name}"
    if not program.exists():
        options = *options, f"-fsanitize={sanitizers}"
        compile_driver([compiler, *build.OPTIONS, *options], source, program)
    result = subprocess.run([program], capture_output=True, text=True, timeout=HANG_SECONDS)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("this kernel maps memory where the thread sanitizer keeps its own")
    assert (result.returncode, result.stderr, result.stdout) == (0, "", output)


def compile_driver(command: list[str], source: Path, program: Path) -> None:
    """Compile a driver, and keep it until its sources change: each takes ten seconds."""
    program.parent.mkdir(parents=True, exist_ok=True)
    command += ["-O0", "-g", "-pthread", "-fno-sanitize-recover=all"]
    draft = program.with_suffix(f".{os.getpid()}")
    command += [f"-I{build.SOURCES}", source, "-o", draft]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in compiled.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert compiled.returncode == 0, compiled.stderr
    draft.replace(program)
