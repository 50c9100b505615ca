"""Build the null GPU: a library to preload that answers every CUDA call of this torch.

    python -m tests.nullgpu.build FOLDER

Calls that matter are written in C++; all others that torch and Triton make are generated here and
succeed without doing anything. The CUDA headers are those of the toolkit or of pip packages.
"""

import re
import subprocess
import sys
from pathlib import Path

import torch
import triton

SOURCES = ("counters.cc", "memory.cc", "device.cc", "kernels.cc", "libraries.cc")
LIBRARY = "libcuda.so.1"  # Triton loads the driver by this name
CALLS = re.compile(r"(__cuda|cuda[A-Z]|cublas|nccl|cu[A-Z])\w+")


def build(folder: Path) -> Path:
    """Return the library's path. Raises CalledProcessError, FileNotFoundError without headers."""
    folder.mkdir(parents=True, exist_ok=True)
    objects = [compile_source(Path(__file__).parent / name, folder) for name in SOURCES]
    written = list_symbols("--defined-only", objects)
    imported = list_symbols(
        "-D --undefined-only", sorted(Path(torch.__file__).parent.glob("lib/*.so"))
    )
    imported |= list_triton_calls()
    stubs = folder / "stubs.cc"
    lines = [
        f'extern "C" int {name}(...) {{ return 0; }}'
        for name in sorted(imported - written)
        if CALLS.fullmatch(name) and not name.startswith("cuFile")
    ]
    stubs.write_text("\n".join(lines) + "\n")
    objects.append(compile_source(stubs, folder))
    library = folder / LIBRARY
    subprocess.run(["g++", "-shared", *objects, "-o", library], check=True)
    (folder / "libcuda.so").unlink(missing_ok=True)
    (folder / "libcuda.so").symlink_to(LIBRARY)
    return library


def compile_source(source: Path, folder: Path) -> Path:
    """Compile a C++ file into an object in the folder."""
    target = folder / source.with_suffix(".o").name
    options = ["-O1", "-std=c++17", "-fPIC", f"-I{find_headers()}", "-c"]
    subprocess.run(["g++", *options, source, "-o", target], check=True)
    return target


def find_headers() -> Path:
    """Return the folder with the CUDA runtime's headers."""
    packages = Path(torch.__file__).parents[1] / "nvidia"
    candidates = [*sorted(packages.glob("cu*/include")), *sorted(packages.glob("*/include"))]
    for folder in (*candidates, Path("/usr/local/cuda/include")):
        if (folder / "cuda_runtime_api.h").exists() and (folder / "crt/host_defines.h").exists():
            return folder
    raise FileNotFoundError("no CUDA headers: pip install nvidia-cuda-crt, or install the toolkit")


def list_triton_calls() -> set[str]:
    """Return the driver calls in the C source that Triton compiles on first use."""
    source = Path(triton.__file__).parent / "backends/nvidia/driver.c"
    return set(re.findall(r"\bcu[A-Z]\w+(?=\()", source.read_text()))


def list_symbols(options: str, files: list[Path]) -> set[str]:
    """Return the symbols that nm lists, without their versions."""
    command = ["nm", *options.split(), *files]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = (line.split()[-1] for line in output.splitlines() if line.strip())
    return {name.partition("@")[0] for name in names}


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
