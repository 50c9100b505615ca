"""Cross-entropy of hidden states against targets, as (sum, count), without the full logits.

A sum and a count make gradient accumulation and data parallelism exact: whoever differentiates divides once, by the
count of the whole batch. Logits exist for one chunk of rows at a time, in fp32; padding ids get no probability.
Targets below zero are not counted.

Shapes: N rows (B*T), C d_model, V padded vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatoken.model.kernels import LOSS, Lose


def cross_entropy(
    hidden_BTC: Tensor,
    unembedding_VC: Tensor,
    targets_BT: Tensor,
    *,
    vocab_size: int,
    chunk: int = 1024,
    lose: Lose = LOSS["torch"],
) -> tuple[Tensor, Tensor]:
    """(sum of -log p over counted targets in nats, their number); differentiable in the first two arguments.

    chunk: rows of logits held at once; 0 holds them all and leaves everything to torch; lose: the form of a chunk's
    softmax. Products run in the dtype of `hidden_BTC`, or autocast's.
    """
    device = hidden_BTC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BTC.dtype
    hidden_NC, targets_N = hidden_BTC.flatten(0, 1), targets_BT.flatten()
    count = (targets_N >= 0).sum()
    with torch.autocast(device, enabled=False):
        if chunk == 0:
            return _sum_of_rows(hidden_NC, unembedding_VC, targets_N, vocab_size, dtype), count
        if dtype == torch.float16:
            # The logits' gradient underflows fp16 unless the loss scale is in it, and that comes with the backward:
            # so fp16 makes each chunk's logits again there.
            rows = zip(torch.split(hidden_NC, chunk), torch.split(targets_N, chunk), strict=True)
            parts = [
                checkpoint(_sum_of_rows, h, unembedding_VC, t, vocab_size, dtype, use_reentrant=False) for h, t in rows
            ]
            return torch.stack(parts).sum(), count
        total: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_NC, unembedding_VC, targets_N, vocab_size, chunk, dtype, lose
        )
        return total, count


def _sum_of_rows(h_NC: Tensor, w_VC: Tensor, targets_N: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """The plain twin: one product, one cross-entropy."""
    logits_NV = F.linear(h_NC.to(dtype), w_VC.to(dtype)).float()[:, :vocab_size]
    return F.cross_entropy(logits_NV, targets_N, reduction="sum", ignore_index=-1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Makes the logits' gradient in the forward, chunk by chunk, while they are at hand: nothing is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        h_NC: Tensor,
        w_VC: Tensor,
        targets_N: Tensor,
        vocab_size: int,
        chunk: int,
        dtype: torch.dtype,
        lose: Lose,
    ) -> Tensor:
        h_low, w_low = h_NC.to(dtype), w_VC.to(dtype)
        wanted = any(ctx.needs_input_grad[:2])
        grad_h = torch.empty_like(h_NC) if wanted else None
        grad_w: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=h_NC.device)
        # One room for every chunk's logits, and for their gradient after them.
        room_NV = torch.empty(min(chunk, len(h_NC)), len(w_VC), dtype=dtype, device=h_NC.device)
        for start in range(0, len(h_NC), chunk):
            rows = slice(start, start + chunk)
            targets = targets_N[rows]
            logits_NV = torch.mm(h_low[rows], w_low.T, out=room_NV[: len(targets)])
            total += lose(logits_NV, targets, vocab_size, overwrite=wanted).sum()
            if grad_h is not None:
                # Rows that do not count are struck out of the narrow factors instead of the wide gradient.
                counted_N1 = (targets >= 0)[:, None]
                torch.mul(logits_NV @ w_low, counted_N1, out=grad_h[rows])
                grad_w = _add_product(grad_w, logits_NV.T, h_low[rows] * counted_N1)
        if grad_h is not None and grad_w is not None:
            ctx.gradients = grad_h, grad_w.to(w_VC.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        # Handed over instead of copied: the unembedding's gradient is the largest tensor of a small model's step.
        (grad_h, grad_w), ctx.gradients = ctx.gradients, None
        return grad_h.mul_(grad_total), grad_w.mul_(grad_total), None, None, None, None, None


def _add_product(total: Tensor | None, a_VN: Tensor, b_NC: Tensor) -> Tensor:
    """total + a b in fp32, where no total yet means zero."""
    if total is None:
        return (a_VN @ b_NC).float()
    if a_VN.dtype == torch.float32:
        return total.addmm_(a_VN, b_NC)
    return total.add_(a_VN @ b_NC)
