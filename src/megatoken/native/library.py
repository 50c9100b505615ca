"""Load the compiled kernels with ctypes."""

import ctypes
import struct
from collections.abc import Iterable, Sequence
from ctypes import byref, c_bool, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatoken.errors import ConfigError

DAMAGED = "delete it, then run python -m megatoken.native.build or install megatoken again"
DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # enum DType in kernels/common.h


class AdamWUpdate(ctypes.Structure):
    """The C++ struct AdamW in kernels/adamw.cc."""

    _fields_ = (
        *((name, c_void_p) for name in ("param", "exp_avg", "exp_avg_sq", "grad", "copy")),
        ("n", c_int64),
        ("grad_dtype", c_int32),
        *((name, c_float) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
        *((name, c_float) for name in ("correction1", "correction2", "grad_scale")),
    )


class MuonUpdate(ctypes.Structure):
    """The C++ struct Muon in kernels/muon.cc."""

    _fields_ = (
        *((name, c_void_p) for name in ("param", "momentum_buffer", "grad", "copy")),
        *((name, c_int64) for name in ("rows", "columns")),
        *((name, c_int32) for name in ("grad_dtype", "dtype")),
        *((name, c_float) for name in ("lr", "weight_decay", "momentum", "grad_scale")),
        ("cautious", c_int32),
    )


class Values(ctypes.Structure):
    """The C++ struct Values in kernels/adamw.cc: the values of a tensor."""

    _fields_ = (("data", c_void_p), ("n", c_int64), ("dtype", c_int32))


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
        *((name, c_void_p) for name in ("bias", "d", "row_sums")),
        *((name, c_float) for name in ("alpha", "beta")),
    )


class Block(ctypes.Structure):
    """The C++ struct Block in kernels/block.cc."""

    _fields_ = (
        ("dtype", c_int32),
        ("rms", c_int32),
        ("eps", c_float),
        *((name, c_int64) for name in ("B", "T", "C", "H", "K", "D", "F")),
        ("parameters", c_void_p * 14),
        *((name, c_void_p) for name in ("cos", "sin", "x", "y", "saved", "stats", "dy", "dx")),
        ("gradients", c_void_p * 14),
    )


def addresses(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """Return the address of each tensor's first value, and None for None."""
    return [None if x is None else x.data_ptr() for x in tensors]


def view(x: Tensor) -> Any:
    """Return a pointer to the View of a tensor."""
    return byref(View(x.data_ptr(), *x.stride()[:3]))


def matrix(x: Tensor) -> Matrix:
    """Return a tensor as a Matrix."""
    return Matrix(x.data_ptr(), *x.stride())


VIEW = ctypes.POINTER(View)
# Argument types of each function. Only those in RETURNS return a value.
SIGNATURES = {
    "set_threads": [c_int64],
    "norm_forward": [c_int32, *[c_void_p] * 8, c_int64, c_int64, c_float, c_int32],
    "norm_backward": [c_int32, *[c_void_p] * 9, c_int64, c_int64, c_int32],
    "gelu_forward": [c_int32, c_void_p, c_void_p, c_int64],
    "gelu_backward": [c_int32, c_void_p, c_void_p, c_void_p, c_int64],
    "swiglu_forward": [c_int32, *[c_void_p] * 3, c_int64],
    "swiglu_backward": [c_int32, *[c_void_p] * 5, c_int64],
    "cross_entropy": [c_int32, *[c_void_p] * 3, c_int64, c_int64, c_int64, c_float, c_int32],
    "int8_linear": [c_int32, *[c_void_p] * 5, *[c_int64] * 3],
    "adamw": [c_void_p, c_int64],
    "muon": [c_void_p, c_int64],
    "sum_of_squares": [c_void_p, c_int64],
    "matmul": [ctypes.POINTER(Matmul)],
    "block_forward": [ctypes.POINTER(Block)],
    "block_backward": [ctypes.POINTER(Block)],
    "request_tiles": [],
    "attention_forward": [c_int32, *[VIEW] * 4, c_void_p, *[c_int64] * 6, c_int32],
    "attention_backward": [c_int32, *[VIEW] * 5, c_void_p, *[VIEW] * 3, *[c_int64] * 5],
}
RETURNS = {"sum_of_squares": c_double, "request_tiles": c_bool}


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
        self._threads = 1

    def set_threads(self, count: int) -> None:
        """Set the number of threads that the kernels use."""
        if count != self._threads:
            self.call("set_threads", count)
            self._threads = count

    def call(self, name: str, *arguments: object) -> float:
        """Call a kernel. A tensor is passed as the address of its first value."""
        addresses = (arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in arguments)
        return self._functions[name](*addresses)  # type: ignore[no-any-return]

    def call_all(self, name: str, structures: Sequence[ctypes.Structure]) -> float:
        """Call a kernel that takes an array of structures, all of one type."""
        if not structures:
            return 0.0
        array = type(structures[0]) * len(structures)
        return self.call(name, array(*structures), len(structures))


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
