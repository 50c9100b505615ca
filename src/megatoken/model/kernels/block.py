"""Operations of a transformer block, by name: torch's, or the native CPU kernels.

`int8` is only for decoding, with the weights of model/native/int8.py; `fp8` only for the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from megatoken.model.kernels import cublaslt, fp8
from megatoken.model.native import int8
from megatoken.model.native import ops as native
from megatoken.model.native.block import FusedBlock
from megatoken.model.native.products import linear as native_linear


@dataclass(frozen=True, kw_only=True)
class BlockKernels:
    """An implementation of each operation of a block.

    linear: x (..., in), weight (out, in), bias (out,) or None -> (..., out). norm: x (..., C),
    weight (C,), bias (C,) or None, eps, rms -> (..., C). gelu: x, approximate=`tanh` or `none` ->
    like x. swiglu: gate, up -> silu(gate) * up. linear_gelu: x (N, in), weight, bias -> gelu
    (N, out) of linear with approximate=`tanh`, and its input; None for separate operations. fused_block:
    all operations of a block in one call (model/native/block.py), or None.
    """

    linear: Callable[..., Tensor]
    norm: Callable[..., Tensor]
    gelu: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    linear_gelu: Callable[..., Tensor] | None = None
    fused_block: Callable[..., Tensor] | None = None


def torch_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, rms: bool) -> Tensor:
    """Compute LayerNorm, or with `rms` RMSNorm, with torch."""
    if rms:
        return F.rms_norm(x, weight.shape, weight.type_as(x), eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up with torch."""
    return F.silu(gate) * up


TORCH = BlockKernels(linear=F.linear, norm=torch_norm, gelu=F.gelu, swiglu=torch_swiglu)
MIXED = replace(TORCH, norm=native.norm, gelu=native.gelu, swiglu=native.swiglu)
BLOCK = {
    "torch": TORCH,
    "cublaslt": replace(TORCH, linear_gelu=cublaslt.linear_gelu),
    "torch+native": MIXED,
    "native": replace(MIXED, linear=native_linear, fused_block=FusedBlock.apply),
    "int8": replace(MIXED, linear=int8.linear),
    "fp8": replace(TORCH, linear=fp8.linear),
}
