"""GPT-2's MLP with GELU and GELU's gradient in the epilogues of matmuls.

torch does not offer these epilogues, so the cuBLASLt that it has loaded is called through ctypes.
torch.compile computes GELU in a kernel of its own, which reads its input again. The GELU is the
tanh approximation. Tensors are contiguous and in bf16; sums are in fp32.

Shapes: N rows (B*T), C d_model, F d_ff.
"""

from ctypes import CDLL, RTLD_GLOBAL, byref, c_float, c_int, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatoken.model.kernels import block

# Values in cublasLt.h and its includes: data types, attributes of a matmul and of a preference,
# epilogues.
FP32, BF16, COMPUTE_FP32 = 0, 14, 68
TRANSPOSE_A, EPILOGUE, BIAS, AUX, AUX_STRIDE = 3, 7, 8, 11, 12
MAX_WORKSPACE = 1
GELU_AUX_BIAS, DGELU = 164, 192
WORKSPACE_BYTES = 32 << 20


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


def _multiply(
    left_NC: Tensor, weight: Tensor, up_NF: Tensor, epilogue: int, bias_F: Tensor | None = None
) -> Tensor:
    """Return the product of `left` and `weight` (C, F), or (F, C) transposed, after an epilogue.

    cuBLASLt is column-major and sees a tensor (R, S) as a matrix (S, R) with leading dimension S,
    so it computes the transposed product, with `left` as its right operand.
    """
    N, C = left_NC.shape
    F = up_NF.shape[1]
    out_NF = torch.empty_like(up_NF)
    attributes = {
        TRANSPOSE_A: c_int(bias_F is not None),
        EPILOGUE: c_int(epilogue),
        BIAS: c_size_t(0 if bias_F is None else bias_F.data_ptr()),
        AUX: c_size_t(up_NF.data_ptr()),
        AUX_STRIDE: c_size_t(F),
    }
    matmul = _create("cublasLtMatmulDescCreate", COMPUTE_FP32, FP32)
    for attribute, value in attributes.items():
        _call("cublasLtMatmulDescSetAttribute", matmul, attribute, byref(value), sizeof(value))
    layout = partial(_create, "cublasLtMatrixLayoutCreate", BF16)
    weights = layout(*weight.T.shape, weight.shape[1])
    layouts = weights, layout(C, N, C), layout(F, N, F)
    algorithm: Any = None  # what cuBLASLt recommends without a workspace
    workspace = left_NC.new_empty(0)
    if epilogue == DGELU:  # without a workspace, as slow as separate kernels
        algorithm = _find_algorithm(matmul.value, *(each.value for each in layouts))
        workspace = left_NC.new_empty(WORKSPACE_BYTES, dtype=torch.uint8)
    out = out_NF.data_ptr(), layouts[2]
    _call(
        *("cublasLtMatmul", torch.cuda.current_blas_handle(), matmul),  # type: ignore[no-untyped-call]
        *(byref(c_float(1)), weight.data_ptr(), weights, left_NC.data_ptr(), layouts[1]),
        *(byref(c_float(0)), *out, *out, algorithm, workspace.data_ptr(), workspace.nbytes),
        torch.cuda.current_stream().cuda_stream,
    )
    return out_NF


@cache
def _find_algorithm(matmul: int, a: int, b: int, out: int) -> Any:
    """Return the algorithm that cuBLASLt recommends with a workspace, given its descriptors."""
    preference = _create("cublasLtMatmulPreferenceCreate")
    limit = c_uint64(WORKSPACE_BYTES)
    arguments = preference, MAX_WORKSPACE, byref(limit), sizeof(limit)
    _call("cublasLtMatmulPreferenceSetAttribute", *arguments)
    found = (c_uint64 * 12)()  # a cublasLtMatmulHeuristicResult_t, which begins with the algorithm
    described = (c_void_p(each) for each in (matmul, a, b, out, out))
    query = *described, preference, 1, found, byref(c_int())
    _call("cublasLtMatmulAlgoGetHeuristic", torch.cuda.current_blas_handle(), *query)  # type: ignore[no-untyped-call]
    return found


@torch.library.custom_op("megatoken::linear_gelu", mutates_args=())
def linear_gelu(x_NC: Tensor, weight_FC: Tensor, bias_F: Tensor) -> tuple[Tensor, Tensor]:
    """Return gelu(up) and up = x weight^T + bias, both (N, F)."""
    up_NF = x_NC.new_empty(len(x_NC), len(bias_F))
    return _multiply(x_NC, weight_FC, up_NF, GELU_AUX_BIAS, bias_F), up_NF


@torch.library.custom_op("megatoken::gelu_gradient", mutates_args=())
def gelu_gradient(dy_NC: Tensor, weight_CF: Tensor, up_NF: Tensor) -> Tensor:
    """Return the gradient of `up`. dy: gradient of gelu(up) weight^T."""
    return _multiply(dy_NC, weight_CF, up_NF, DGELU)


linear_gelu.register_fake(lambda x, weight, _: (x @ weight.T, x @ weight.T))
gelu_gradient.register_fake(lambda dy, weight, up: torch.empty_like(up))


class _MLP(torch.autograd.Function):
    """A linear layer with bias, GELU, and another linear layer with bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up_FC: Tensor, up_F: Tensor, *down: Tensor) -> Tensor:
        gelu_NF, up_NF = linear_gelu(x, up_FC, up_F)
        ctx.save_for_backward(x, up_FC, down[0], gelu_NF, up_NF)
        return linear(gelu_NF, *down)

    @staticmethod
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor, ...]:
        x_NC, up_FC, down_CF, gelu_NF, up_NF = ctx.saved_tensors
        dup_NF = gelu_gradient(dy_NC.contiguous(), down_CF, up_NF)
        du = dup_NF @ up_FC, dup_NF.T @ x_NC, dup_NF.sum(0)
        return *du, dy_NC.T @ gelu_NF, dy_NC.sum(0)


def gelu_mlp(*inputs: Tensor) -> Tensor:
    """Compute the MLP of x (N, C), with weight and bias of its two layers."""
    return _MLP.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


KERNELS = replace(block.KERNELS, gelu_mlp=gelu_mlp)
