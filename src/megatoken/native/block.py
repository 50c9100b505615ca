"""A transformer block in one native call (kernels/block.cc).

Shapes: B batch, T time, C d_model, H query heads, K key/value heads, D head width, F d_ff.
"""

from collections.abc import Sequence
from ctypes import byref, c_void_p
from typing import Any

import torch
from torch import Tensor

from megatoken.native.library import DTYPES, Block, addresses
from megatoken.native.selection import loaded_library

GATE_WEIGHT, UP_WEIGHT = 8, 10  # indices in `parameters`


def fused_block(
    x_BTC: Tensor,
    parameters: Sequence[Tensor | None],
    cos_sin: tuple[Tensor, Tensor] | None,
    heads: Sequence[int],
    eps: float,
    *,
    rms: bool,
) -> Tensor:
    """Compute a block with causal attention, and SwiGLU if it has a gate, else tanh GELU.

    parameters: weight and bias of norm1, qkv, out, norm2, gate, up and down, in the dtype of x.
    heads: numbers of query, key and value heads.
    """
    y: Tensor = _Block.apply(  # type: ignore[no-untyped-call]
        x_BTC, cos_sin, heads, eps, rms, *parameters
    )
    return y


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        heads: Sequence[int],
        eps: float,
        rms: bool,
        *parameters: Tensor | None,
    ) -> Tensor:
        x = x.contiguous()
        B, T, C = x.shape
        H, K, _ = heads
        up = parameters[UP_WEIGHT]
        assert up is not None
        F = len(up)
        D = C // H
        n_hidden = 2 if parameters[GATE_WEIGHT] is None else 3
        y = torch.empty_like(x)
        saved = x.new_empty(B * T * (4 * C + (H + 2 * K) * D + n_hidden * F))
        stats = x.new_empty(B * T * (4 + H), dtype=torch.float32)
        call = Block(DTYPES[x.dtype], rms, eps, B, T, C, H, K, D, F)
        call.parameters = (c_void_p * 14)(*addresses(parameters))
        if cos_sin is not None:
            call.cos, call.sin = addresses(cos_sin)
        call.x, call.y, call.saved, call.stats = addresses((x, y, saved, stats))
        loaded_library().call("block_forward", byref(call))
        ctx.save_for_backward(x, saved, stats, *(cos_sin or (None, None)), *parameters)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, saved, stats, cos, sin, *parameters = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        gradients = [None if x is None else torch.empty_like(x) for x in parameters]
        call = ctx.call
        # Not where the forward had them if checkpointing recomputed them or FSDP gathered them again.
        call.x, call.saved, call.stats, call.cos, call.sin = addresses((x, saved, stats, cos, sin))
        call.parameters = (c_void_p * 14)(*addresses(parameters))
        call.dy, call.dx = addresses((dy, dx))
        call.gradients = (c_void_p * 14)(*addresses(gradients))
        loaded_library().call("block_backward", byref(call))
        return dx, None, None, None, None, *gradients
