"""Compile the kernels: `python -m megatoken.model.native.build [--all] [FOLDER]`.

Each instruction set gets its own shared library. It has a C interface, so it does not depend on the
version of Python or torch. It has threads of its own (kernels/threads.h).
"""

import argparse
import hashlib
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from megatoken.base.system.machine import cpu_features, find_compiler
from megatoken.base.system.process import run_child

SOURCES = Path(__file__).parent / "kernels"
# Fastest first: name -> required features (as in /proc/cpuinfo), compiler options.
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
INSTRUCTION_SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "amx": (("amx_tile", "amx_bf16", "avx512_bf16", *AVX512), ("-march=sapphirerapids",)),
    "avx512_bf16": (("avx512_bf16", *AVX512), ("-march=cooperlake",)),
    "avx512": (AVX512, ("-march=skylake-avx512",)),
    "avx2": (("avx2", "fma", "f16c"), ("-march=haswell",)),
    "portable": ((), ()),
}
# The compiler may reorder sums only in loops marked `omp simd reduction`.
OPTIONS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)
VECTORS = ("-mprefer-vector-width=512",)


class CompilerError(Exception):
    """Raised if the compiler fails. The compiler has already printed the reason."""


def runnable_instruction_sets() -> list[str]:
    """Return the instruction sets that this processor supports, fastest first."""
    features = cpu_features()
    return [
        name for name, (required, _) in INSTRUCTION_SETS.items() if features.issuperset(required)
    ]


@cache
def library_name(instruction_set: str) -> str:
    """Return the file name of an instruction set's library, which has a hash of the sources."""
    contents = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))
    digest = hashlib.sha256(contents + repr((OPTIONS, INSTRUCTION_SETS)).encode()).hexdigest()[:12]
    return f"libmegatoken-{instruction_set}-{digest}.so"


def compile_library(
    instruction_set: str, folder: Path, extra_options: tuple[str, ...] = ()
) -> Path:
    """Compile the kernels for one instruction set into `folder`; return the library's path.

    There must be a compiler. Raises CompilerError if it fails.
    """
    compiler = find_compiler()
    assert compiler
    _, options = INSTRUCTION_SETS[instruction_set]
    if instruction_set.startswith(("amx", "avx512")):
        options += VECTORS
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(instruction_set)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:

        def compile_source(source: Path) -> str:
            output = f"{scratch}/{source.stem}.o"
            _compile(
                [compiler, *OPTIONS, *options, *extra_options, "-c", str(source), "-o", output]
            )
            return output

        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_source, sorted(SOURCES.glob("*.cc"))))
        new_library = Path(scratch) / target.name
        _compile([compiler, "-shared", *extra_options, *objects, "-o", str(new_library)])
        new_library.replace(target)
    return target


def _compile(command: Sequence[str]) -> None:
    if run_child(command):
        raise CompilerError(command[0])


def main() -> None:
    """Compile for this processor, or with --all for every instruction set, into FOLDER."""
    parser = argparse.ArgumentParser(
        "python -m megatoken.model.native.build", description=main.__doc__
    )
    parser.add_argument("--all", action="store_true", help="for every instruction set")
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=Path, default=Path(__file__).parent
    )
    options = parser.parse_args()
    compiler = find_compiler()
    if not compiler:
        print("no C++ compiler: install g++ to train on a CPU with the native kernels")
        return
    n_compiled = 0
    for name in INSTRUCTION_SETS if options.all else runnable_instruction_sets():
        try:
            compile_missing(name, options.folder)
        except CompilerError:  # an old compiler does not know the instruction set
            print(f"{compiler} cannot compile the native kernels for {name}", flush=True)
            continue
        n_compiled += 1
        if not options.all and name != "amx":  # AMX needs the next one for its self-test
            break
    if not n_compiled:
        parser.exit(1, f"error: no native kernels — {compiler} — set CXX to another compiler\n")


def compile_missing(instruction_set: str, folder: Path) -> None:
    """Compile the library unless `folder` has it; delete libraries of older sources."""
    for old in folder.glob(f"libmegatoken-{instruction_set}-*.so"):
        if old.name != library_name(instruction_set):
            old.unlink()
    if not (folder / library_name(instruction_set)).exists():
        print(f"compiling the native kernels for {instruction_set}", flush=True)
        compile_library(instruction_set, folder)


if __name__ == "__main__":
    main()
