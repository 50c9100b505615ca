"""Triton, the compiler of our GPU kernels, where it is installed. Elsewhere the files that hold kernels can be read.

Its interpreter (TRITON_INTERPRET=1 before the first import) runs the same kernels on a CPU: so they are tested.
"""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    import triton
    import triton.language

    tl: Any = triton.language
    jit: Any = triton.jit
    power_of_2: Any = triton.next_power_of_2
else:
    tl = SimpleNamespace(constexpr=int)

    def jit(function: Any) -> Any:
        return function

    def power_of_2(size: int) -> int:
        return 1 << (size - 1).bit_length()
