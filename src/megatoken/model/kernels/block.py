"""Operations of a transformer block, by torch; model/room.py lists other implementations.

Of these, `int8` is only for decoding, with the weights of model/native/int8.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BlockKernels:
    """An implementation of each operation of a block.

    linear: x (..., in), weight (out, in), bias (out,) or None -> (..., out). norm: x (..., C),
    weight (C,), bias (C,) or None, eps, rms -> (..., C). gelu: x, approximate=`tanh` or `none` ->
    like x. swiglu: gate, up -> silu(gate) * up. gelu_mlp: x (N, C), and weight and bias of two
    linear layers -> (N, C), with tanh GELU between them; None for separate operations. fuse: a
    Block of model/gpt.py -> a function (x, cos_sin) -> y that computes the whole block, or None if
    it does not support this block; None if there is no such function.
    """

    linear: Callable[..., Tensor]
    norm: Callable[..., Tensor]
    gelu: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    gelu_mlp: Callable[..., Tensor] | None = None
    fuse: Callable[[Any], Callable[..., Tensor] | None] | None = None


def torch_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, rms: bool) -> Tensor:
    """Compute LayerNorm, or with `rms` RMSNorm, with torch."""
    if rms:
        return F.rms_norm(x, weight.shape, weight.type_as(x), eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up with torch."""
    return F.silu(gate) * up


KERNELS = BlockKernels(linear=F.linear, norm=torch_norm, gelu=F.gelu, swiglu=torch_swiglu)
