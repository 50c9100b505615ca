"""Load the compiled kernels with ctypes."""

import ctypes
import struct
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatoken.errors import ConfigError
from megatoken.native.build import library_name, runnable_instruction_sets

NO_LIBRARY = "install g++ and run python -m megatoken.native.build"
DAMAGED = "delete it, then run python -m megatoken.native.build or install megatoken again"
DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # enum DType in kernels/common.h


ADAMW_FIELDS = "lr beta1 beta2 eps weight_decay correction1 correction2 grad_scale"


class AdamWUpdate(ctypes.Structure):
    """The C++ struct AdamW in kernels/adamw.cc."""

    _fields_ = [(name, c_float) for name in ADAMW_FIELDS.split()]


class View(ctypes.Structure):
    """The C++ struct View in kernels/attention.cc: a tensor (B, heads, rows, D), D contiguous."""

    _fields_ = (
        ("data", c_void_p),
        ("batch_stride", c_int64),
        ("head_stride", c_int64),
        ("row_stride", c_int64),
    )


class Matrix(ctypes.Structure):
    """The C++ struct Matrix in kernels/matmul.cc; strides are in elements."""

    _fields_ = (("data", c_void_p), ("row_stride", c_int64), ("col_stride", c_int64))


class Matmul(ctypes.Structure):
    """The C++ struct Matmul in kernels/matmul.cc."""

    _fields_ = (
        ("dtype", c_int32),
        ("out_dtype", c_int32),
        *((name, c_int64) for name in "MNK"),
        *((name, Matrix) for name in ("a", "b", "c")),
        ("bias", c_void_p),
        ("row_sums", c_void_p),
        ("accumulate", c_int32),
    )


VIEW = ctypes.POINTER(View)
# Argument types of each function. Only those in RETURNS return a value.
SIGNATURES = {
    "norm_forward": [c_int32, *[c_void_p] * 6, c_int64, c_int64, c_float, c_int32],
    "norm_backward": [c_int32, *[c_void_p] * 8, c_int64, c_int64, c_int32],
    "gelu_forward": [c_int32, c_void_p, c_void_p, c_int64],
    "gelu_backward": [c_int32, c_void_p, c_void_p, c_void_p, c_int64],
    "swiglu_forward": [c_int32, *[c_void_p] * 3, c_int64],
    "swiglu_backward": [c_int32, *[c_void_p] * 5, c_int64],
    "cross_entropy": [c_int32, *[c_void_p] * 3, c_int64, c_int64, c_int64, c_float, c_int32],
    "int8_linear": [c_int32, *[c_void_p] * 5, *[c_int64] * 3],
    "adamw": [*[c_void_p] * 4, c_int32, c_void_p, c_int64, ctypes.POINTER(AdamWUpdate)],
    "sum_of_squares": [c_int32, c_void_p, c_int64],
    "matmul": [ctypes.POINTER(Matmul)],
    "attention_forward": [c_int32, *[VIEW] * 4, c_void_p, *[c_int64] * 6, c_int32],
    "attention_backward": [c_int32, *[VIEW] * 5, c_void_p, *[VIEW] * 3, *[c_int64] * 5],
}
RETURNS = {"sum_of_squares": c_double}


class Library:
    """The kernels of one instruction set, called as `library.call("norm_forward", ...)`.

    name: the instruction set and the hash of the sources. Raises ConfigError if the file cannot be
    loaded.
    """

    def __init__(self, instruction_set: str, path: Path) -> None:
        self.instruction_set = instruction_set
        self.name = path.stem.removeprefix("libmegatoken-")
        try:
            if _is_cut_short(path):
                raise OSError(f"{path}: cut short")
            loaded = ctypes.CDLL(str(path))
            self._functions = {name: getattr(loaded, f"megatoken_{name}") for name in SIGNATURES}
        except (OSError, AttributeError) as error:  # both name the file
            raise ConfigError("the native kernels do not load", str(error), DAMAGED) from error
        for name, function in self._functions.items():
            function.argtypes = SIGNATURES[name]
            function.restype = RETURNS.get(name)

    def call(self, name: str, *arguments: object) -> float:
        """Call a kernel. A tensor is passed as the address of its first value."""
        addresses = (arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in arguments)
        return self._functions[name](*addresses)  # type: ignore[no-any-return]


def _is_cut_short(path: Path) -> bool:
    """Return whether an ELF file is truncated before its section headers.

    Loading such a file would kill the process.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False  # the loader reports what is wrong
    offset, size, count = struct.unpack_from("<Q10xHH", header, 40)
    return bool(path.stat().st_size < offset + size * count)


@cache
def find_library(instruction_set: str = "", folder: Path = Path(__file__).parent) -> Library | None:
    """Return the kernels of an instruction set; by default, the fastest for this processor.

    Returns None if they have not been compiled. They use the OpenMP runtime that torch has loaded.
    Raises ConfigError for a damaged file.
    """
    for name in [instruction_set] if instruction_set else runnable_instruction_sets():
        path = folder / library_name(name)
        if path.exists():
            return Library(name, path)
    return None


def loaded_library() -> Library:
    """Return the kernels, which must exist: callers check `find_library` first."""
    library = find_library()
    assert library is not None, "the caller asks find_library() first"
    return library
