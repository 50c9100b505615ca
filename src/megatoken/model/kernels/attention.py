"""Causal self-attention: written out, by torch's kernels, and in blocks that skip the upper triangle.

softmax(q k^T / sqrt(D)) v, every query seeing itself and earlier keys (Vaswani et al. 2017). Keys and values may have
fewer heads, each shared by a group of neighbouring query heads (Ainslie et al. 2023). Absent: sampling's attention over
a cache, which has no triangle (model/gpt.py).

Shapes: B batch, H heads, K heads of keys and values, T time, D head width, N = B*H, Q queries of a block, S keys that
a block of queries sees.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

SHORT = 256  # tokens; up to here the smaller block is the faster one


def choose_block(T: int) -> int:
    """Queries at once: few enough that a block's scores stay in the caches and little of the triangle is wasted."""
    return 64 if T <= SHORT else 128


def spread_heads(x_BKTD: Tensor, n_head: int) -> Tensor:
    """A key head for every query head (B, H, T, D): copies for the heads that share one; itself where none do."""
    group = n_head // x_BKTD.shape[1]
    return x_BKTD if group == 1 else x_BKTD.repeat_interleave(group, dim=1)


def explicit_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, dropout: float) -> Tensor:
    """The formula, all T x T scores at once."""
    H, T, D = q_BHTD.shape[-3:]
    k_BHTD, v_BHTD = spread_heads(k_BKTD, H), spread_heads(v_BKTD, H)
    scores_BHTT = q_BHTD @ k_BHTD.transpose(-2, -1) / math.sqrt(D)
    later_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).triu(1)
    weights_BHTT = scores_BHTT.masked_fill(later_TT, -torch.inf).softmax(-1)
    return F.dropout(weights_BHTT, dropout) @ v_BHTD


def flash_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, dropout: float) -> Tensor:
    """torch's own kernel: on CUDA whichever backend it prefers."""
    (H, T), K = q_BHTD.shape[1:3], k_BKTD.shape[1]
    return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, dropout_p=dropout, is_causal=T > 1, enable_gqa=K != H)


def backend_attention(backend: SDPBackend, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, dropout: float) -> Tensor:
    """torch's kernel by one backend and no other: RuntimeError where that one cannot."""
    with sdpa_kernel(backend):
        return flash_attention(q_BHTD, k_BKTD, v_BKTD, dropout)


def switch_flash(form: str) -> None:
    """Put what a form of attention needs behind torch's flash backend, for this whole process: for `fa3` and `fa4` that
    version of FlashAttention, for any other torch's own.

    Raises ImportError or RuntimeError where that version is not installed or does not run on this card.
    """
    version = {"fa3": "FA3", "fa4": "FA4"}.get(form)
    if current_flash_attention_impl() == version:
        return
    if version:
        activate_flash_attention_impl(version)
    else:
        restore_flash_attention_impl()


def flex_attention_causal(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, dropout: float) -> Tensor:
    """torch's FlexAttention with the causal mask; without dropout only, with it the flash kernel answers.

    Compiled on CUDA; written out elsewhere, where it has no backward.
    """
    if dropout:
        return flash_attention(q_BHTD, k_BKTD, v_BKTD, dropout)
    compiled = q_BHTD.is_cuda and not torch.compiler.is_compiling()
    flex = _compile_flex() if compiled else flex_attention
    (H, T), K = q_BHTD.shape[1:3], k_BKTD.shape[1]
    y: Tensor = flex(q_BHTD, k_BKTD, v_BKTD, block_mask=_causal_mask(T, q_BHTD.device), enable_gqa=K != H)
    return y


@cache
def _compile_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@cache
def _causal_mask(T: int, place: torch.device) -> BlockMask:
    return create_block_mask(lambda _b, _h, query, key: query >= key, None, None, T, T, device=place)


def blocked_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, dropout: float) -> Tensor:
    """A block of queries at a time against the keys it can see: half the products of the full square.

    Without dropout only; with it the flash kernel answers.
    """
    if dropout:
        return flash_attention(q_BHTD, k_BKTD, v_BKTD, dropout)
    H = q_BHTD.shape[1]
    y: Tensor = _Blocked.apply(q_BHTD, spread_heads(k_BKTD, H), spread_heads(v_BKTD, H))  # type: ignore[no-untyped-call]
    return y


class _Blocked(torch.autograd.Function):
    """Keeps each block's weights for the backward: T*T/2 numbers a head, nothing is computed twice."""

    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        B, H, T, D = q_BHTD.shape
        # Every head's rows in one piece: batched products read them many times.
        q, k, v = (x.reshape(B * H, T, D) for x in (q_BHTD * (1 / math.sqrt(D)), k_BHTD, v_BHTD))
        block = choose_block(T)
        later_QQ = torch.full((block, block), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
        # Laid out as the product that follows wants it, which then keeps this tensor instead of a copy.
        y_BHTD = q_BHTD.new_empty(B, T, H, D).transpose(1, 2)
        weights = []
        for begin in range(0, T, block):
            end = min(begin + block, T)
            size = end - begin
            scores_NQS = torch.bmm(q[:, begin:end], k[:, :end].transpose(1, 2))
            scores_NQS[:, :, begin:].add_(later_QQ[:size, :size])
            torch.softmax(scores_NQS, -1, out=scores_NQS)
            y_BHTD[:, :, begin:end] = torch.bmm(scores_NQS, v[:, :end]).view(B, H, size, D)
            weights.append(scores_NQS)
        ctx.save_for_backward(q, k, v, y_BHTD, *weights)
        return y_BHTD

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, y_BHTD, *weights = ctx.saved_tensors
        N, T, D = q.shape
        grad_NTD = grad_BHTD.reshape(N, T, D)
        # d scores = weights * (d weights - sum of d weights * weights), and that sum is d y . y
        along_NT1 = (grad_BHTD * y_BHTD).sum(-1).view(N, T, 1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for weights_NQS, begin in zip(weights, range(0, T, choose_block(T)), strict=True):
            end = begin + weights_NQS.shape[1]
            grad_NQD = grad_NTD[:, begin:end]
            dv[:, :end] += torch.bmm(weights_NQS.transpose(1, 2), grad_NQD)
            d_NQS = torch.bmm(grad_NQD, v[:, :end].transpose(1, 2))
            d_NQS.sub_(along_NT1[:, begin:end]).mul_(weights_NQS)
            dq[:, begin:end] = torch.bmm(d_NQS, k[:, :end])
            dk[:, :end] += torch.bmm(d_NQS.transpose(1, 2), q[:, begin:end])
        dq.mul_(1 / math.sqrt(D))
        dq, dk, dv = (x.view(grad_BHTD.shape) for x in (dq, dk, dv))
        return dq, dk, dv
