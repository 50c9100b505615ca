"""Every kernel over odd sizes, on memory of just their size: no access beyond it, no undefined behaviour."""

import os
import subprocess
import zlib
from pathlib import Path

import pytest

from megatoken.native import build
from megatoken.native.build import INSTRUCTION_SETS, library_name, runnable_instruction_sets
from megatoken.system.machine import find_compiler
from tests.native.conftest import EMULATED_AMX, FOLDER

DRIVERS = [
    pytest.param(driver, output, name, marks=[] if name == "avx2" else pytest.mark.slow)
    for driver, output in (("products", "150 products\n"), ("operations", "12 rounds\n"))
    for name in INSTRUCTION_SETS
]


@pytest.mark.parametrize(("driver", "output", "instruction_set"), DRIVERS)
def test_sanitizers_find_nothing(driver: str, output: str, instruction_set: str):
    compiler, runnable = find_compiler(), runnable_instruction_sets()
    if not compiler:
        pytest.skip("no C++ compiler")
    options = INSTRUCTION_SETS[instruction_set][1]
    if instruction_set == "amx" and "amx" not in runnable and "avx512_bf16" in runnable:
        options = EMULATED_AMX
    elif instruction_set not in runnable:
        pytest.skip(f"this processor has no {instruction_set}")
    source = Path(__file__).with_name(f"{driver}_driver.cc")
    name = f"{driver}-{zlib.crc32(source.read_bytes())}-{library_name(instruction_set)}"
    program = FOLDER / "sanitized" / name
    if not program.exists():
        compile_driver([compiler, *build.OPTIONS, *options], source, program)
    result = subprocess.run([program], capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", output)


def compile_driver(command: list[str], source: Path, program: Path) -> None:
    """Compile a driver, and keep it until its sources change: each takes ten seconds."""
    program.parent.mkdir(parents=True, exist_ok=True)
    command += ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    draft = program.with_suffix(f".{os.getpid()}")
    command += [f"-I{build.SOURCES}", str(source), "-o", str(draft)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in compiled.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert compiled.returncode == 0, compiled.stderr
    draft.replace(program)
