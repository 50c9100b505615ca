"""A linear layer with GELU in the epilogue of its matmul, which also writes the GELU's input.

torch does not offer this epilogue, so the cuBLASLt that it has loaded is called through ctypes.
torch.compile computes GELU in a kernel of its own, which reads its input again. The GELU is the
tanh approximation. Tensors are contiguous and in bf16; sums are in fp32.

Shapes: N rows (B*T), C d_model, F d_ff.
"""

from ctypes import CDLL, RTLD_GLOBAL, byref, c_float, c_int, c_size_t, c_void_p, sizeof
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatoken.model.kernels import block

# Values in cublasLt.h and its includes: data types, attributes of a matmul, an epilogue.
FP32, BF16, COMPUTE_FP32 = 0, 14, 68
TRANSPOSE_A, EPILOGUE, BIAS, AUX, AUX_STRIDE = 3, 7, 8, 11, 12
GELU_AUX_BIAS = 164


@cache
def _find(name: str) -> Any:
    # torch has loaded the library, but its symbols are not global.
    CDLL("libcublasLt.so." + str(torch.version.cuda)[:2], RTLD_GLOBAL)
    return getattr(CDLL(None), name)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of cuBLASLt, with integers as size_t. Raises RuntimeError if it fails."""
    passed = (c_size_t(arg) if isinstance(arg, int) else arg for arg in arguments)
    if status := _find(name)(*passed):
        raise RuntimeError(f"{name} returned {status}")


@cache
def _create(name: str, *arguments: int) -> c_void_p:
    created = c_void_p()
    _call(name, byref(created), *arguments)
    return created


@torch.library.custom_op("megatoken::linear_gelu", mutates_args=())
def _linear_gelu(x_NC: Tensor, weight_FC: Tensor, bias_F: Tensor) -> tuple[Tensor, Tensor]:
    """Return gelu(up) and up = x weight^T + bias, both (N, F).

    cuBLASLt is column-major and sees a tensor (R, S) as a matrix (S, R) with leading dimension S,
    so it computes the transposed product, weight x^T.
    """
    N, C = x_NC.shape
    F = len(bias_F)
    up_NF = x_NC.new_empty(N, F)
    gelu_NF = torch.empty_like(up_NF)
    attributes = {
        TRANSPOSE_A: c_int(1),
        EPILOGUE: c_int(GELU_AUX_BIAS),
        BIAS: c_size_t(bias_F.data_ptr()),
        AUX: c_size_t(up_NF.data_ptr()),
        AUX_STRIDE: c_size_t(F),
    }
    matmul = _create("cublasLtMatmulDescCreate", COMPUTE_FP32, FP32)
    for attribute, value in attributes.items():
        _call("cublasLtMatmulDescSetAttribute", matmul, attribute, byref(value), sizeof(value))
    layout = partial(_create, "cublasLtMatrixLayoutCreate", BF16)
    out = gelu_NF.data_ptr(), layout(F, N, F)
    _call(
        *("cublasLtMatmul", torch.cuda.current_blas_handle(), matmul),  # type: ignore[no-untyped-call]
        *(byref(c_float(1)), weight_FC.data_ptr(), layout(C, F, C), x_NC.data_ptr()),
        *(layout(C, N, C), byref(c_float(0)), *out, *out),
        *(None, None, 0),  # the algorithm that cuBLASLt recommends without a workspace
        torch.cuda.current_stream().cuda_stream,
    )
    return gelu_NF, up_NF


def _differentiate(ctx: Any, dgelu_NF: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    x_NC, weight_FC, up_NF = ctx.saved_tensors
    dup_NF = torch.ops.aten.gelu_backward(dgelu_NF, up_NF, approximate="tanh")
    return dup_NF @ weight_FC, dup_NF.T @ x_NC, dup_NF.sum(0)


_linear_gelu.register_fake(lambda x, weight, _: (x @ weight.T, x @ weight.T))
_linear_gelu.register_autograd(
    _differentiate,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2], output[1]),
)
linear_gelu = torch.ops.megatoken.linear_gelu  # can be copied with a model
KERNELS = replace(block.KERNELS, linear_gelu=linear_gelu)
