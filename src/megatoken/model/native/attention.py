"""Causal attention with the native kernels (kernels/attention.cc).

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head width.
"""

from typing import Any

import torch
from torch import Tensor

from megatoken.model.kernels.attention import Mask, explicit_with_dropout, flash_attention
from megatoken.model.native.library import DTYPES, views
from megatoken.model.native.selection import loaded_library


def attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
    """Compute F.scaled_dot_product_attention with enable_gqa.

    The backward recomputes the scores. Only causal attention has a gradient.
    """
    if causal:
        y: Tensor = _Attention.apply(q_BHTD, k_BKSD, v_BKSD)  # type: ignore[no-untyped-call]
        return y
    return _forward(q_BHTD, k_BKSD, v_BKSD, causal=False)[0]


@explicit_with_dropout
def native_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, mask: Mask, causal: bool
) -> Tensor:
    """Compute attention with the native CPU kernels, without windows.

    Calls with a mask use `flash_attention`.
    """
    # Torch decodes faster in fp32.
    decodes = not causal and q_BHTD.dtype == torch.bfloat16 and not torch.is_grad_enabled()
    if mask is not None or not (causal or decodes):
        return flash_attention(q_BHTD, k_BKSD, v_BKSD, mask=mask, causal=causal, dropout=None)
    return attention(q_BHTD, k_BKSD, v_BKSD, causal=causal)


def _contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return y, and the log-sum-exp (B, H, T) of each query's scores, to base 2."""
    q, k, v = (_contiguous_heads(x) for x in (q, k, v))
    B, H, T, D = q.shape
    # The layout that the output projection reads and saves, so that it makes no copy.
    y = q.new_empty(B, T, H, D).transpose(1, 2)
    lse = q.new_empty(B, H, T, dtype=torch.float32)
    sizes = (B, H, k.shape[1], T, k.shape[2], D)
    loaded_library().call(
        "attention_forward", DTYPES[q.dtype], *views(q, k, v, y), lse, *sizes, causal
    )
    return y, lse


class _Attention(torch.autograd.Function):
    """Causal attention that saves q, k, v, the output and the log-sum-exps, but no scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, lse = _forward(q, k, v, causal=True)
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        q, k, v, y, lse = (_contiguous_heads(x) for x in ctx.saved_tensors)
        B, H, T, D = q.shape
        K = k.shape[1]
        dy = _contiguous_heads(dy)
        # Views of one tensor, like q, k and v, which are views of the projection's output.
        packed = q.new_empty(B, T, H + 2 * K, D).transpose(1, 2)
        dq, dk, dv = packed.split_with_sizes([H, K, K], dim=1)
        arguments = *views(q, k, v, y, dy), lse, *views(dq, dk, dv), B, H, K, T, D
        loaded_library().call("attention_backward", DTYPES[q.dtype], *arguments)
        return dq, dk, dv
