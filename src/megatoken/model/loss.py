"""Cross-entropy of hidden states against targets, as (sum, count), without the full logits.

The sum is not divided by the count here, so that gradient accumulation and data parallelism are
exact: the caller divides once, by the count of the global batch. Logits exist for one chunk of rows
at a time, their softmax is in fp32, and padding ids get no probability.

Shapes: N rows (B*T), C d_model, V padded vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatoken.model.kernels.cross_entropy import OutputLayer

# An entry of the kind "loss_term": a function of fp32 logits (N, V), the targets (B, T) of whole
# sequences, and the indices (N,) of the logits' tokens among them. Returns N values.
Term = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy(
    hidden_BTC: Tensor,
    lm_head_VC: Tensor,
    targets_BT: Tensor,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    chunk: int = 1024,
    output_layer: type[OutputLayer] = OutputLayer,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy (-log p) of the targets in nats, and the number of targets.

    Targets below 0 are ignored. Gradients flow to hidden states and weight. Matmuls run in the
    dtype of autocast if it is enabled, else in that of `hidden_BTC`.

    softcap: see `cap_logits`.
    chunk: how many rows of logits to hold in memory at once. With 0, all logits are computed and
        differentiated by torch's autograd.
    output_layer: what computes each chunk, an entry of the kind "output_layer" (model/room.py).
    """
    device = hidden_BTC.device.type
    dtype = product_dtype(hidden_BTC)
    hidden_NC = hidden_BTC.flatten(0, 1)
    targets_N = targets_BT.flatten()
    count = (targets_N >= 0).sum()
    if device == "cpu" and 0 < count < len(targets_N):  # elsewhere the host would wait
        index_N = torch.nonzero(targets_N >= 0)[:, 0]
        hidden_NC = hidden_NC.index_select(0, index_N)
        targets_N = targets_N[index_N]
    options = (vocab_size, softcap, dtype)
    with torch.autocast(device, enabled=False):
        if chunk == 0:
            return _plain_cross_entropy(hidden_NC, lm_head_VC, targets_N, *options), count
        if dtype == torch.float16:
            # The logits' gradient underflows in fp16 without the loss scale, which only the
            # backward has, so each chunk's logits are recomputed there.
            chunks = zip(torch.split(hidden_NC, chunk), torch.split(targets_N, chunk), strict=True)
            sums = [
                checkpoint(
                    _plain_cross_entropy, h_NC, lm_head_VC, t_N, *options, use_reentrant=False
                )
                for h_NC, t_N in chunks
            ]
            return torch.stack(sums).sum(), count
        total = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_NC, lm_head_VC, targets_N, *options, chunk, output_layer
        )
        return total, count


def sum_terms(
    terms: Sequence[Term],
    hidden_BTC: Tensor,
    lm_head_VC: Tensor,
    targets_BT: Tensor,
    rows_BT: Tensor,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    chunk: int = 1024,
) -> list[Tensor]:
    """Return the sum of each term over the tokens that have a target.

    Each chunk's logits are recomputed in the backward.

    targets_BT: the targets of whole sequences, which terms see. rows_BT: which of their tokens the
        hidden states belong to, as indices into the flattened targets.
    chunk: how many rows of logits to hold in memory at once; 0 for all.
    """
    dtype = product_dtype(hidden_BTC)
    hidden_NC, rows_N = hidden_BTC.flatten(0, 1), rows_BT.flatten()

    def compute(h_NC: Tensor, w_VC: Tensor, r_N: Tensor) -> Tensor:
        logits_NV = _project(h_NC, w_VC, vocab_size, softcap, dtype)
        is_target_N = targets_BT.flatten()[r_N] >= 0
        values = [term(logits_NV, targets_BT, r_N) for term in terms]
        return torch.stack([(each_N * is_target_N).sum() for each_N in values])

    with torch.autocast(hidden_BTC.device.type, enabled=False):
        size = chunk or len(rows_N)
        chunks = zip(torch.split(hidden_NC, size), torch.split(rows_N, size), strict=True)
        sums = [
            checkpoint(compute, h_NC, lm_head_VC, r_N, use_reentrant=False) for h_NC, r_N in chunks
        ]
        return list(torch.stack(sums).sum(0))


def z_loss(logits_NV: Tensor, targets_BT: Tensor, rows_N: Tensor) -> Tensor:
    """Return log(Z)^2 of each softmax, which keeps logits small (PaLM, Chowdhery et al. 2022)."""
    return logits_NV.logsumexp(-1).square()


def label_smoothing(logits_NV: Tensor, targets_BT: Tensor, rows_N: Tensor) -> Tensor:
    """Return the cross-entropy against a uniform distribution minus that against the target.

    With a weight of w, targets have the probability 1 - w plus their share of w (Szegedy et al.
    2016).
    """
    logits_NT = logits_NV.gather(-1, targets_BT.flatten()[rows_N].clamp(min=0)[:, None])
    return logits_NT[:, 0] - logits_NV.mean(-1)


def cap_logits(logits: Tensor, softcap: float) -> Tensor:
    """Return softcap * tanh(logits / softcap) in fp32 (Gemma 2); with 0, logits are not changed."""
    if not softcap:
        return logits
    return 2 * softcap * torch.sigmoid(logits.float() * (2 / softcap)) - softcap


def product_dtype(hidden_BTC: Tensor) -> torch.dtype:
    """Return the dtype for matmuls: autocast's if it is enabled, else that of the hidden states."""
    device = hidden_BTC.device.type
    is_autocast = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_autocast else hidden_BTC.dtype


def _plain_cross_entropy(
    h_NC: Tensor,
    w_VC: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    softcap: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the summed cross-entropy, with all logits computed in one matmul."""
    logits_NV = _project(h_NC, w_VC, vocab_size, softcap, dtype)
    return F.cross_entropy(logits_NV, targets_N, reduction="sum", ignore_index=-1)


def _project(
    h_NC: Tensor, w_VC: Tensor, vocab_size: int, softcap: float, dtype: torch.dtype
) -> Tensor:
    logits_NV = F.linear(h_NC.to(dtype), w_VC.to(dtype)).float()[:, :vocab_size]
    return cap_logits(logits_NV, softcap)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes the gradients of hidden states and weight in its forward.

    The backward needs no logits, so they are neither saved nor recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h_NC: Tensor,
        w_VC: Tensor,
        targets_N: Tensor,
        vocab_size: int,
        softcap: float,
        dtype: torch.dtype,
        chunk: int,
        output_layer: type[OutputLayer],
    ) -> Tensor:
        needs_grad = any(ctx.needs_input_grad[:2])
        needs_weight = ctx.needs_input_grad[1]
        grad_h = torch.empty_like(h_NC) if needs_grad else None
        grad_w: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=h_NC.device)
        layer = output_layer(h_NC.to(dtype), w_VC.to(dtype), trains=needs_grad)
        # One buffer for every chunk's logits, then their gradient.
        buffer_NV = torch.empty(min(chunk, len(h_NC)), len(w_VC), dtype=dtype, device=h_NC.device)
        for start in range(0, len(h_NC), chunk):
            rows = slice(start, start + chunk)
            targets = targets_N[rows]
            logits_NV = buffer_NV[: len(targets)]
            layer.project(rows, logits_NV)
            losses_N = layer.softmax(logits_NV, targets, vocab_size, softcap, overwrite=needs_grad)
            total += losses_N.sum()
            if grad_h is not None:
                layer.grad_hidden(logits_NV, grad_h[rows])
                if needs_weight and grad_w is None:  # several chunks are summed in fp32
                    sum_dtype = torch.float32 if len(h_NC) > chunk else w_VC.dtype
                    grad_w = torch.empty_like(w_VC, dtype=sum_dtype)
                if grad_w is not None:
                    layer.matmul(logits_NV.T, layer.h_NC[rows], grad_w, accumulate=start > 0)
        if grad_h is not None:
            ctx.gradients = grad_h, None if grad_w is None else grad_w.to(w_VC.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        # Returned without a copy: the output layer's gradient is a small model's largest tensor.
        grad_h, grad_w = ctx.gradients
        ctx.gradients = None
        if grad_w is not None:
            grad_w.mul_(grad_total)
        return grad_h.mul_(grad_total), grad_w, *[None] * 6
