"""Causal attention in blocks of queries with torch's batched matmuls, for CPUs without kernels.

Shapes: as in attention.py; N = B*H, Q queries of a block.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatoken.model.kernels.attention import Mask, explicit_with_dropout, repeat_kv


@explicit_with_dropout
def blocked_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, mask: Mask, causal: bool, window: int = 0
) -> Tensor:
    """Compute causal attention in blocks of queries, each with only the keys that it sees.

    This takes about half the FLOPs of all T x T scores, and fewer with a window.
    """
    assert causal
    assert mask is None
    H, T = q_BHTD.shape[1:3]
    k_BHTD = repeat_kv(k_BKSD, H)
    v_BHTD = repeat_kv(v_BKSD, H)
    y: Tensor = _Blocked.apply(q_BHTD, k_BHTD, v_BHTD, window or T)  # type: ignore[no-untyped-call]
    return y


class _Blocked(torch.autograd.Function):
    """Causal attention in blocks. Saves the weights for the backward, T*T/2 numbers per head."""

    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: int) -> Tensor:
        B, H, T, D = q_BHTD.shape
        # Make heads contiguous, because batched matmuls read them many times.
        q, k, v = (x.reshape(B * H, T, D) for x in (q_BHTD * (1 / math.sqrt(D)), k_BHTD, v_BHTD))
        # Small enough blocks that scores stay in cache and few masked scores are computed.
        block = 64 if T <= 256 else 128
        ctx.block = block
        ctx.window = window
        causal_QQ = torch.full((block, block), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
        # The layout that the output projection reads and saves, so that it makes no copy.
        y_BHTD = q_BHTD.new_empty(B, T, H, D).transpose(1, 2)
        weights = []
        for begin in range(0, T, block):
            end = min(begin + block, T)
            size = end - begin
            first = max(0, begin + 1 - window)
            scores_NQS = torch.bmm(q[:, begin:end], k[:, first:end].transpose(1, 2))
            scores_NQS[:, :, begin - first :].add_(causal_QQ[:size, :size])
            n_far = end - first - window  # keys outside the window of some queries of the block
            if n_far > 0:
                far_QS = torch.full((size, n_far), -torch.inf, dtype=q.dtype, device=q.device)
                scores_NQS[:, :, :n_far].add_(far_QS.tril(n_far - size))
            torch.softmax(scores_NQS, -1, out=scores_NQS)
            y_BHTD[:, :, begin:end] = torch.bmm(scores_NQS, v[:, first:end]).view(B, H, size, D)
            weights.append(scores_NQS)
        ctx.save_for_backward(q, k, v, y_BHTD, *weights)
        return y_BHTD

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y_BHTD, *weights = ctx.saved_tensors
        N, T, D = q.shape
        grad_NTD = grad_BHTD.reshape(N, T, D)
        # d scores = weights * (d weights - sum(d weights * weights)); the sum is d y . y (Dao et
        # al. 2022).
        sum_NT1 = (grad_BHTD * y_BHTD).sum(-1).view(N, T, 1)
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        for weights_NQS, begin in zip(weights, range(0, T, ctx.block), strict=True):
            end = begin + weights_NQS.shape[1]
            keys = slice(max(0, begin + 1 - ctx.window), end)
            grad_NQD = grad_NTD[:, begin:end]
            dv[:, keys] += torch.bmm(weights_NQS.transpose(1, 2), grad_NQD)
            d_NQS = torch.bmm(grad_NQD, v[:, keys].transpose(1, 2))
            d_NQS.sub_(sum_NT1[:, begin:end]).mul_(weights_NQS)
            dq[:, begin:end] = torch.bmm(d_NQS, k[:, keys])
            dk[:, keys] += torch.bmm(d_NQS.transpose(1, 2), q[:, begin:end])
        dq.mul_(1 / math.sqrt(D))
        dq, dk, dv = (x.view(grad_BHTD.shape) for x in (dq, dk, dv))
        return dq, dk, dv, None
