"""Cross-entropy of hidden states against targets, as (sum, count), without the full logits.

Sum and count make gradient accumulation and data parallelism exact: the caller divides once, by the count of the whole
batch. Logits exist for one chunk of rows at a time, their softmax in fp32; padding ids get no probability.

Shapes: N rows (B*T), C d_model, V padded vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatoken.model.kernels import LOSS, CrossEntropyFn
from megatoken.native.products import matmul as native_matmul


def cross_entropy(
    hidden_BTC: Tensor,
    lm_head_VC: Tensor,
    targets_BT: Tensor,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    chunk: int = 1024,
    softmax_cross_entropy: CrossEntropyFn = LOSS["torch"],
) -> tuple[Tensor, Tensor]:
    """(sum of -log p of targets in nats, their number), without targets below 0; differentiable in hidden and weight.

    softcap: of `cap_logits`. chunk: rows of logits at once; 0: all, with torch's autograd and cross-entropy.
    softmax_cross_entropy: of LOSS, for a chunk's softmax. Matrix products run in the dtype of `hidden_BTC`, or
    autocast's.
    """
    device = hidden_BTC.device.type
    dtype = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BTC.dtype
    )
    hidden_NC, targets_N = hidden_BTC.flatten(0, 1), targets_BT.flatten()
    count = (targets_N >= 0).sum()
    if device == "cpu" and 0 < count < len(targets_N):  # elsewhere the host would wait
        index_N = torch.nonzero(targets_N >= 0)[:, 0]
        hidden_NC, targets_N = hidden_NC.index_select(0, index_N), targets_N[index_N]
    with torch.autocast(device, enabled=False):
        if chunk == 0:
            return _plain_cross_entropy(
                hidden_NC, lm_head_VC, targets_N, vocab_size, softcap, dtype
            ), count
        if dtype == torch.float16:
            # The logits' gradient underflows fp16 without the loss scale, which only the backward has: fp16 recomputes
            # each chunk's logits there.
            sums = [
                checkpoint(
                    _plain_cross_entropy,
                    h_NC,
                    lm_head_VC,
                    t_N,
                    vocab_size,
                    softcap,
                    dtype,
                    use_reentrant=False,
                )
                for h_NC, t_N in zip(
                    torch.split(hidden_NC, chunk), torch.split(targets_N, chunk), strict=True
                )
            ]
            return torch.stack(sums).sum(), count
        total: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_NC,
            lm_head_VC,
            targets_N,
            vocab_size,
            softcap,
            chunk,
            dtype,
            softmax_cross_entropy,
        )
        return total, count


def token_log_probs(
    hidden_BTC: Tensor,
    lm_head_VC: Tensor,
    targets_BT: Tensor,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """log p (B, T), fp32, of each target in softmax(logits / temperature), 0 for targets below 0; differentiable.

    chunk: rows of logits at once, which the backward computes again; 0: all at once, kept. Only rows with a target are
    computed.
    """
    device = hidden_BTC.device.type
    dtype = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BTC.dtype
    )
    targets_N = targets_BT.flatten()
    index_N = torch.nonzero(targets_N >= 0)[:, 0]
    hidden_NC, targets = hidden_BTC.flatten(0, 1)[index_N], targets_N[index_N]

    def score(h_NC: Tensor, t_N: Tensor) -> Tensor:
        logits_NV = F.linear(h_NC.to(dtype), lm_head_VC.to(dtype)).float()[:, :vocab_size]
        return -F.cross_entropy(cap_logits(logits_NV, softcap) / temperature, t_N, reduction="none")

    with torch.autocast(device, enabled=False):
        if chunk == 0:
            scores = score(hidden_NC, targets)
        else:
            pairs = zip(torch.split(hidden_NC, chunk), torch.split(targets, chunk), strict=True)
            scores = torch.cat(
                [checkpoint(score, h_NC, t_N, use_reentrant=False) for h_NC, t_N in pairs]
            )
        return scores.new_zeros(targets_N.shape).index_put((index_N,), scores).view_as(targets_BT)


def cap_logits(logits: Tensor, softcap: float) -> Tensor:
    """Logits bounded by `softcap` through c tanh(x / c), in fp32 (Gemma 2, Riviere et al. 2024); 0: as they are."""
    return (
        2 * softcap * torch.sigmoid(logits.float() * (2 / softcap)) - softcap if softcap else logits
    )


def _plain_cross_entropy(
    h_NC: Tensor,
    w_VC: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    softcap: float,
    dtype: torch.dtype,
) -> Tensor:
    """One matrix product, one cross-entropy: what the chunked form must equal."""
    logits_NV = cap_logits(
        F.linear(h_NC.to(dtype), w_VC.to(dtype)).float()[:, :vocab_size], softcap
    )
    return F.cross_entropy(logits_NV, targets_N, reduction="sum", ignore_index=-1)


def torch_matmul(
    a: Tensor, b: Tensor, out: Tensor | None = None, *, accumulate: bool = False
) -> Tensor:
    """The product a b, or `out` plus it; `out` may be wider."""
    if out is None or out.dtype == a.dtype:
        return (
            torch.addmm(out, a, b, out=out)
            if accumulate and out is not None
            else torch.mm(a, b, out=out)
        )
    return out.add_(a @ b) if accumulate else out.copy_(a @ b)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the logits' gradient in the forward, chunk by chunk, so that no logits are kept or recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        h_NC: Tensor,
        w_VC: Tensor,
        targets_N: Tensor,
        vocab_size: int,
        softcap: float,
        chunk: int,
        dtype: torch.dtype,
        softmax_cross_entropy: CrossEntropyFn,
    ) -> Tensor:
        h_low, w_low = h_NC.to(dtype), w_VC.to(dtype)
        needs_grad = any(ctx.needs_input_grad[:2])
        grad_h = torch.empty_like(h_NC) if needs_grad else None
        grad_w: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=h_NC.device)
        # The products are computed where the softmax is.
        matmul = native_matmul if softmax_cross_entropy is LOSS["native"] else torch_matmul
        # One buffer for every chunk's logits, and for their gradient after them.
        buffer_NV = torch.empty(min(chunk, len(h_NC)), len(w_VC), dtype=dtype, device=h_NC.device)
        for start in range(0, len(h_NC), chunk):
            rows = slice(start, start + chunk)
            targets = targets_N[rows]
            logits_NV = matmul(h_low[rows], w_low.T, buffer_NV[: len(targets)])
            total += softmax_cross_entropy(
                logits_NV, targets, vocab_size, softcap, overwrite=needs_grad
            ).sum()
            if grad_h is not None:
                # Ignored rows are zeroed in the narrow factors instead of the wide gradient.
                counted_N1 = (targets >= 0)[:, None]
                torch.mul(matmul(logits_NV, w_low), counted_N1, out=grad_h[rows])
                if grad_w is None:  # summed in fp32; a single chunk's needs no sum
                    grad_w = torch.empty_like(
                        w_VC, dtype=torch.float32 if len(h_NC) > chunk else w_VC.dtype
                    )
                matmul(logits_NV.T, h_low[rows] * counted_N1, grad_w, accumulate=start > 0)
        if grad_h is not None and grad_w is not None:
            ctx.gradients = grad_h, grad_w.to(w_VC.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        # Given away instead of copied: the output layer's gradient is the largest tensor of a small model's step.
        (grad_h, grad_w), ctx.gradients = ctx.gradients, None
        return grad_h.mul_(grad_total), grad_w.mul_(grad_total), None, None, None, None, None, None
