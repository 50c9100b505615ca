"""The native kernels as differentiable torch operations.

Shapes: N rows (B*T), C channels, V padded vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.model.kernels import block
from megatoken.model.kernels.cross_entropy import OutputLayer
from megatoken.model.native.library import DTYPES
from megatoken.model.native.products import matmul
from megatoken.model.native.selection import loaded_library


def norm(
    x: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float, *, rms: bool = False
) -> Tensor:
    """Compute F.layer_norm, or with `rms` F.rms_norm, over the last dimension."""
    weight_C = weight_C.type_as(x)
    bias_C = None if bias_C is None else bias_C.type_as(x)
    if not torch.is_grad_enabled():
        return _normalize(x.contiguous(), weight_C, bias_C, eps, rms)[0]
    y: Tensor = _Norm.apply(x, weight_C, bias_C, eps, rms)  # type: ignore[no-untyped-call]
    return y


def _normalize(
    x: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float, rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and the mean and the scale of each row (N,), in fp32."""
    C = x.shape[-1]
    N = x.numel() // C
    y = torch.empty_like(x)
    mean_N, scale_N = x.new_empty(2, N, dtype=torch.float32)
    arguments = x, None, None, weight_C, bias_C, y, mean_N, scale_N
    loaded_library().call("norm_forward", DTYPES[x.dtype], *arguments, N, C, eps, rms)
    return y, mean_N, scale_N


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_C: Tensor, bias_C: Tensor | None, eps: float, rms: bool
    ) -> Tensor:
        x = x.contiguous()
        y, mean_N, scale_N = _normalize(x, weight_C, bias_C, eps, rms)
        ctx.save_for_backward(x, weight_C, mean_N, scale_N)
        ctx.rms = rms
        ctx.has_bias = bias_C is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_C, mean_N, scale_N = ctx.saved_tensors
        N = len(mean_N)
        C = len(weight_C)
        dx = torch.empty_like(x)
        dweight_C = x.new_empty(C, dtype=torch.float32)
        dbias_C = torch.empty_like(dweight_C) if ctx.has_bias else None
        dy = dy.contiguous()
        arguments = dy, None, x, mean_N, scale_N, weight_C, dx, dweight_C, dbias_C
        loaded_library().call("norm_backward", DTYPES[x.dtype], *arguments, N, C, ctx.rms)
        dbias_C = None if dbias_C is None else dbias_C.to(x.dtype)
        return dx, dweight_C.to(x.dtype), dbias_C, None, None


def gelu(x: Tensor, *, approximate: str = "tanh") -> Tensor:
    """Compute F.gelu; only the tanh approximation uses a native kernel."""
    return _activate("gelu", x) if approximate == "tanh" else F.gelu(x, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute F.silu(gate) * up."""
    return _activate("swiglu", gate, up)


def _activate(name: str, *inputs: Tensor) -> Tensor:
    inputs = tuple(x.contiguous() for x in inputs)
    if not torch.is_grad_enabled():
        return _apply(name, inputs)
    return _Activation.apply(name, *inputs)  # type: ignore[no-untyped-call, no-any-return]


def _apply(name: str, inputs: tuple[Tensor, ...]) -> Tensor:
    y = torch.empty_like(inputs[0])
    loaded_library().call(f"{name}_forward", DTYPES[y.dtype], *inputs, y, y.numel())
    return y


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, *inputs: Tensor) -> Tensor:
        ctx.name = name
        ctx.save_for_backward(*inputs)
        return _apply(name, inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in inputs]
        tensors = dy.contiguous(), *inputs, *gradients
        loaded_library().call(f"{ctx.name}_backward", DTYPES[dy.dtype], *tensors, dy.numel())
        return None, *gradients


def softmax_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, vocab_size: int, softcap: float = 0.0, *, overwrite: bool
) -> Tensor:
    """Compute model.kernels.cross_entropy.softmax_cross_entropy on contiguous rows."""
    loss_N = torch.empty(len(logits_NV), dtype=torch.float32)
    arguments = (logits_NV, targets_N.contiguous(), loss_N, *logits_NV.shape)
    options = (vocab_size, softcap, overwrite)
    loaded_library().call("cross_entropy", DTYPES[logits_NV.dtype], *arguments, *options)
    return loss_N


class NativeLayer(OutputLayer):
    """An output layer with native kernels."""

    softmax = staticmethod(softmax_cross_entropy)
    matmul = staticmethod(matmul)


KERNELS = replace(block.KERNELS, norm=norm, gelu=gelu, swiglu=swiglu)
