"""y = x W^T + b and its gradients, through libraries other than the one torch would call: fp32 on a CPU.

numpy brings a BLAS of its own (OpenBLAS, or Accelerate on a Mac), and torch brings oneDNN beside MKL. Which is fastest
differs between processors and sizes by up to two times, so it is measured (train/choose.py).

Shapes: N rows, I and O a product's input and output.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


def numpy_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """F.linear by numpy's BLAS."""
    y: Tensor = _Linear.apply(x, weight_OI, bias_O, numpy_product)  # type: ignore[no-untyped-call]
    return y


def onednn_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """F.linear by oneDNN, which torch itself keeps for other precisions."""
    y: Tensor = _Linear.apply(x, weight_OI, bias_O, onednn_product)  # type: ignore[no-untyped-call]
    return y


def numpy_product(a_NI: Tensor, b_IO: Tensor) -> Tensor:
    """a b, either factor transposed or not; numpy lets go of the interpreter's lock meanwhile."""
    y_NO = torch.empty(a_NI.shape[0], b_IO.shape[1])
    np.matmul(a_NI.numpy(), b_IO.numpy(), out=y_NO.numpy())
    return y_NO


def onednn_product(a_NI: Tensor, b_IO: Tensor) -> Tensor:
    """a b, either factor transposed or not."""
    y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(a_NI, b_IO.t(), None, "none", [], "")
    return y_NO


class _Linear(torch.autograd.Function):
    """One product forward, two backward, by whoever multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.product, ctx.biased = product, bias_O is not None
        y_NO = product(x.flatten(0, -2), weight_OI.t())
        if bias_O is not None:
            y_NO.add_(bias_O)
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        grad_NO, product = grad.flatten(0, -2), ctx.product
        dx = product(grad_NO, weight_OI).view(x.shape) if ctx.needs_input_grad[0] else None
        dw = product(grad_NO.t(), x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return dx, dw, grad_NO.sum(0) if ctx.biased else None, None
