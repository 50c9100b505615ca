"""A transformer block in one native call (kernels/block.cc).

Shapes: B batch, T time, C d_model, H query heads, K key/value heads, D head width, F d_ff.
"""

from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatoken.model.gpt import MLP, Attention, Block, Linear, Norm
from megatoken.model.native import ops
from megatoken.model.native.attention import native_attention
from megatoken.model.native.library import DTYPES, BlockArguments, BlockParameters, addresses
from megatoken.model.native.products import linear
from megatoken.model.native.selection import loaded_library

GATE, DOWN = 8, 12  # indices of weights in `parameters`


def _call(
    name: str,
    sizes: Sequence[float],
    parameters: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None] = (),
) -> None:
    """Call a kernel. tensors: cos, sin, x, y, saved, stats, dy, dx of the struct BlockArguments."""
    pointers = BlockParameters(*addresses(parameters)), *addresses(tensors)
    block = BlockArguments(*sizes, *pointers, BlockParameters(*addresses(gradients)))
    loaded_library().call(name, byref(block))


class FusedBlock(torch.autograd.Function):
    """A block with causal attention, and SwiGLU if it has a gate, else tanh GELU.

    x: (B, T, C). heads: numbers of query, key and value heads. parameters: weight and bias of
    norm1, qkv, out, norm2, gate, up and down, in the dtype of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        heads: Sequence[int],
        eps: float,
        rms: bool,
        *parameters: Any,
    ) -> Tensor:
        x = x.contiguous()
        B, T, C = x.shape
        H, K, _ = heads
        F = parameters[DOWN].shape[1]
        D = C // H
        n_hidden = 2 if parameters[GATE] is None else 3
        y = torch.empty_like(x)
        saved = x.new_empty(B * T * (4 * C + (H + 2 * K) * D + n_hidden * F))
        stats = x.new_empty(B * T * (4 + H), dtype=torch.float32)
        cos, sin = cos_sin or (None, None)
        ctx.sizes = DTYPES[x.dtype], rms, eps, B, T, C, H, K, D, F
        tensors = cos, sin, x, y, saved, stats, None, None
        _call("block_forward", ctx.sizes, parameters, tensors)
        ctx.save_for_backward(cos, sin, x, saved, stats, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, x, saved, stats, *parameters = ctx.saved_tensors
        dx = torch.empty_like(x)
        gradients = [None if x is None else torch.empty_like(x) for x in parameters]
        tensors = cos, sin, x, None, saved, stats, dy.contiguous(), dx
        _call("block_backward", ctx.sizes, parameters, tensors, gradients)
        return dx, None, None, None, None, *gradients


def fuse(block: Block) -> Callable[..., Tensor] | None:
    """Return a function that computes the block in one call, or None for unsupported parts.

    Supported are causal attention of all heads, and GPT-2's or LLaMA's MLP.
    """
    attention, mlp, norm = block.attention, block.mlp, block.norm1
    linears = (attention.qkv, attention.out, mlp.up, mlp.down)
    is_plain = (
        attention.attention_fn is native_attention
        and type(norm) is type(block.norm2) is Norm
        and type(attention) is Attention
        and type(mlp) is MLP
        and block.post_norm1 is None
        and attention.heads[0] * attention.d_head == norm.width
        and not (attention.q_norm or attention.value_tokens or attention.window)
        and not (attention.drop.p or mlp.is_relu2 or mlp.recompute_activation)
        and (mlp.is_swiglu or (mlp.gate is None and mlp.gelu_approximate == "tanh"))
        and {type(layer) for layer in linears} == {Linear}
        and len({layer.bias is None for layer in linears}) == 1
    )
    if norm is None or not is_plain:
        return None
    layers = (norm, attention.qkv, attention.out, block.norm2, mlp.gate, mlp.up, mlp.down)
    parameters = [getattr(layer, name, None) for layer in layers for name in ("weight", "bias")]
    options = attention.heads, norm.eps, norm.rms
    return lambda x, cos_sin: FusedBlock.apply(x, cos_sin, *options, *parameters)  # type: ignore[no-untyped-call]


KERNELS = replace(ops.KERNELS, linear=linear, fuse=fuse)
