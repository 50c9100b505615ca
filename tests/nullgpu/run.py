"""Build the null GPU and run tests on it: `make test-cuda`.

    python -m tests.nullgpu.run [PYTEST_ARGUMENT ...]

Caches of kernels and measurements are in build/nullgpu, apart from those of real devices.
"""

import os
import sys
from pathlib import Path

from tests.nullgpu.build import build

ROOT = Path(__file__).parents[2]


def main(arguments: list[str]) -> None:
    folder = ROOT / "build/nullgpu"
    library = build(folder)
    environment = {
        "LD_PRELOAD": library,
        "LD_LIBRARY_PATH": folder,  # ctypes and Triton find libcuda.so.1 here
        "TRITON_LIBCUDA_PATH": folder,
        "TRITON_CACHE_DIR": folder / "triton",
        "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
        "TORCHINDUCTOR_COMPILE_THREADS": 1,  # workers would compile for a GPU of their own
        "MEGATOKEN_CACHE": folder / "cache",
        "TRITON_INTERPRET": 0,
        "PYTHONPATH": ROOT / "src",
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.chdir(ROOT)
    program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    os.execv(sys.executable, [*program, *(arguments or ["tests/nullgpu"])])


if __name__ == "__main__":
    main(sys.argv[1:])
