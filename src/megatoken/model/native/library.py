"""Load the compiled kernels with ctypes."""

import ctypes
import struct
from collections.abc import Iterable, Sequence
from ctypes import byref, c_bool, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatoken.base.errors import ConfigError

DAMAGED = "delete it, then run python -m megatoken.model.native.build or install megatoken again"
DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # enum DType in kernels/common.h
C_TYPES = {"int32": c_int32, "int64": c_int64, "float": c_float, "void*": c_void_p}


def _declare(declaration: str) -> list[tuple[str, Any]]:
    """Return the names and types of fields declared as in C, `int64 n, m; void* x`."""
    return [
        (name, C_TYPES[c_type])
        for members in filter(None, declaration.split("; "))
        for c_type, names in [members.split(" ", 1)]
        for name in names.split(", ")
    ]


class AdamWUpdate(ctypes.Structure):
    """The C++ struct AdamW in kernels/adamw.cc."""

    _fields_ = _declare(
        "void* param, exp_avg, exp_avg_sq, grad, copy; int64 n; int32 grad_dtype; "
        "float lr, beta1, beta2, eps, weight_decay, correction1, correction2, grad_scale"
    )


class MuonUpdate(ctypes.Structure):
    """The C++ struct Muon in kernels/muon.cc."""

    _fields_ = _declare(
        "void* param, momentum_buffer, grad, copy; int64 rows, columns; int32 grad_dtype, dtype; "
        "float lr, weight_decay, momentum, grad_scale; int32 cautious, equal_rows"
    )


class Values(ctypes.Structure):
    """The C++ struct Values in kernels/adamw.cc: the values of a tensor."""

    _fields_ = _declare("void* data; int64 n; int32 dtype")


class View(ctypes.Structure):
    """The C++ struct View in kernels/kernels.h: a tensor (B, heads, rows, D), D contiguous."""

    _fields_ = _declare("void* data; int64 batch_stride, head_stride, row_stride")


class Matrix(ctypes.Structure):
    """The C++ struct Matrix in kernels/kernels.h; strides are in elements."""

    _fields_ = _declare("void* data; int64 row_stride, col_stride")


class Matmul(ctypes.Structure):
    """The C++ struct Matmul in kernels/kernels.h."""

    _fields_ = [
        *_declare("int32 dtype, out_dtype; int64 M, N, K"),
        *((name, Matrix) for name in ("a", "b", "c")),
        *_declare("void* bias, d, row_sums; float alpha, beta"),
    ]


BlockParameters = c_void_p * 14


class BlockArguments(ctypes.Structure):
    """The C++ struct Block in kernels/block.cc."""

    _fields_ = [
        *_declare("int32 dtype, rms; float eps; int64 B, T, C, H, K, D, F"),
        ("parameters", BlockParameters),
        *_declare("void* cos, sin, x, y, saved, stats, dy, dx"),
        ("gradients", BlockParameters),
    ]


def addresses(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """Return the address of each tensor's first value, and None for None."""
    return [None if x is None else x.data_ptr() for x in tensors]


def views(*tensors: Tensor) -> list[Any]:
    """Return pointers to the Views of tensors."""
    return [byref(View(x.data_ptr(), *x.stride()[:3])) for x in tensors]


def describe_matmul(
    a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None, d: Tensor | None, row_sums: Tensor | None
) -> Any:
    """Return a pointer to the arguments of the kernel that sets c to a @ b + bias + d."""
    M, K = a.shape
    matrices = [Matrix(x.data_ptr(), *x.stride()) for x in (a, b, c)]
    dtypes = DTYPES[a.dtype], DTYPES[c.dtype]
    pointers = addresses((bias, d, row_sums))
    return byref(Matmul(*dtypes, M, b.shape[1], K, *matrices, *pointers, 1, 1))


# Parameters of each function. Only those in RETURNS return a value.
SIGNATURES = {
    "set_threads": "int64 count",
    "norm_forward": "int32 dtype; void* in, residual, sum, weight, bias, out, mean, scale; "
    "int64 N, C; float eps; int32 rms",
    "norm_backward": "int32 dtype; void* dout, dy, in, mean, scale, weight, din, dweight, dbias; "
    "int64 N, C; int32 rms",
    "gelu_forward": "int32 dtype; void* x, y; int64 n",
    "gelu_backward": "int32 dtype; void* dy, x, dx; int64 n",
    "swiglu_forward": "int32 dtype; void* gate, up, y; int64 n",
    "swiglu_backward": "int32 dtype; void* dy, gate, up, dgate, dup; int64 n",
    "cross_entropy": "int32 dtype; void* logits, targets, loss; int64 N, V, vocab_size; "
    "float softcap; int32 overwrite",
    "int8_linear": "int32 dtype; void* x, values, scales, bias, y; int64 N, inputs, outputs",
    "adamw": "void* updates; int64 n",
    "muon": "void* updates; int64 n",
    "sum_of_squares": "void* tensors; int64 n",
    "matmul": "void* matmul",
    "block_forward": "void* block",
    "block_backward": "void* block",
    "request_tiles": "",
    "attention_forward": "int32 dtype; void* q, k, v, y, lse; int64 B, H, K, T, S, D; int32 causal",
    "attention_backward": "int32 dtype; void* q, k, v, y, dy, lse, dq, dk, dv; int64 B, H, K, T, D",
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
            function.argtypes = [c_type for _, c_type in _declare(SIGNATURES[name])]
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
