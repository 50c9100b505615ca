"""Triton's decorator and language; stand-ins where it is missing let kernels be defined anyway."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    import triton

    jit: Any = triton.jit
    tl: Any = triton.language
else:
    jit, tl = (lambda kernel: kernel), SimpleNamespace(constexpr=int)
