"""Matmuls with the native kernels (kernels/matmul.cc), and a linear layer built on them.

Shapes: N rows (B*T), I inputs, O outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.model.native.library import describe_matmul
from megatoken.model.native.selection import loaded_library


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute F.linear with a native kernel, or with torch's under autocast."""
    if torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight_OI, bias_O)
    if not torch.is_grad_enabled():
        return _multiply(x, weight_OI, bias_O)
    return _Linear.apply(x, weight_OI, bias_O)  # type: ignore[no-untyped-call, no-any-return]


def matmul(
    a_MK: Tensor,
    b_KN: Tensor,
    out: Tensor | None = None,
    *,
    accumulate: bool = False,
    bias_N: Tensor | None = None,
    row_sums_M: Tensor | None = None,
) -> Tensor:
    """Compute a @ b (M, N); each sum over K is in fp32.

    out: tensor to write to, or to add to if `accumulate` is set. bias_N: added to each row.
    row_sums_M: fp32 tensor that receives the sum of each row of a. Transposed views are not copied.
    """
    M, K = a_MK.shape
    N = b_KN.shape[1]
    assert b_KN.shape[0] == K
    assert a_MK.dtype == b_KN.dtype
    out = a_MK.new_empty(M, N) if out is None else out
    assert out.shape == (M, N)
    a_MK = _with_unit_stride(a_MK)
    b_KN = _with_unit_stride(b_KN)
    added = out if accumulate else None
    arguments = describe_matmul(a_MK, b_KN, out, bias_N, added, row_sums_M)
    loaded_library().call("matmul", arguments)
    return out


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if 1 in x.stride() else x.contiguous()


def _multiply(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    y_NO = matmul(x.reshape(-1, x.shape[-1]), weight_OI.t(), bias_N=bias_O)
    return y_NO.view(*x.shape[:-1], len(weight_OI))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return _multiply(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        x_NI = x.reshape(-1, x.shape[-1])
        dy_NO = dy.reshape(-1, dy.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = matmul(dy_NO, weight_OI).view(x.shape) if needs_x else None
        dbias_O = dy_NO.new_empty(len(weight_OI), dtype=torch.float32) if needs_bias else None
        dweight_OI = None
        if needs_weight or needs_bias:
            dweight_OI = matmul(dy_NO.t(), x_NI, row_sums_M=dbias_O)
        return dx, dweight_OI, None if dbias_O is None else dbias_O.to(dy.dtype)
