"""Cross-entropy of rows of logits, which are overwritten by their gradient: softmax minus one-hot.

Logits x may be capped first, to c tanh(x / c). This equals 2 c s - c with s = sigmoid(2 x / c),
which is much faster than tanh on a CPU, and the softmax ignores the -c. The gradient is then
multiplied by 4 s (1 - s). Columns from `vocab_size` on are padding, with neither probability nor
gradient. Rows without a target have no gradient.

`softmax_cross_entropy` makes a few passes in fp32 with torch. The Triton kernel reads a row twice
and writes it once, with sums in fp32; the native kernel (model/native/kernels/cross_entropy.cc) does the
same on a CPU. This module can be imported without Triton. TRITON_INTERPRET=1 runs the Triton kernel
on a CPU, and tests/model/compile_kernels.py compiles it for GPUs on a machine that has none.

Shapes: N rows, V padded vocabulary.
"""

import math
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatoken.model.kernels.fp8 import SOFTMAX_FACTOR
from megatoken.model.native import ops as native

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    import triton

    jit: Any = triton.jit
    tl: Any = triton.language
else:
    jit, tl = (lambda kernel: kernel), SimpleNamespace(constexpr=int)

LOG2_E: Any = tl.constexpr(math.log2(math.e))
WARPS = 32  # per row
LOAD_BYTES = 16  # of logits that a thread loads at once


# Logits (N, V), targets (N,), vocabulary size, softcap (0 for none), overwrite= -> losses (N,).
# Overwrites the logits. If `overwrite` is set, they then hold their gradient; otherwise, their
# content is undefined.
CrossEntropyFn = Callable[..., Tensor]


def softmax_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, vocab_size: int, softcap: float = 0.0, *, overwrite: bool
) -> Tensor:
    """Return -log p (N,) of each row's target in nats, in fp32; 0 for negative targets.

    overwrite: whether to leave the gradient of the summed losses in `logits_NV`, whose content is
    otherwise undefined afterwards.
    """
    scores_NV = logits_NV.float()  # no copy if the logits are in fp32
    if softcap:
        sigmoid_NV = (scores_NV * (2 / softcap)).sigmoid_()
        torch.mul(sigmoid_NV, 2 * softcap, out=scores_NV)
    scores_NV[:, vocab_size:] = -torch.inf
    target_N1 = targets_N.clamp(min=0)[:, None]
    # In place: two passes over the rows. Separate log-sum-exp and softmax would take five.
    log_p_NV = torch.log_softmax(scores_NV, -1, out=scores_NV)
    loss_N = -log_p_NV.gather(1, target_N1).squeeze(1) * (targets_N >= 0)
    if overwrite:
        grad_NV = log_p_NV.exp_()
        grad_NV.scatter_add_(1, target_N1, torch.full_like(target_N1, -1, dtype=torch.float32))
        grad_NV.masked_fill_((targets_N < 0)[:, None], 0)
        if softcap:
            torch.ops.aten.sigmoid_backward.grad_input(grad_NV, sigmoid_NV, grad_input=grad_NV)
            grad_NV.mul_(4)
        if grad_NV.dtype != logits_NV.dtype:
            logits_NV.copy_(grad_NV)
    return loss_N


def fused_softmax_cross_entropy(
    logits_NV: Tensor,
    targets_N: Tensor,
    vocab_size: int,
    softcap: float = 0.0,
    *,
    overwrite: bool,
    grad8_NV: Tensor | None = None,
) -> Tensor:
    """Compute `softmax_cross_entropy` with a Triton kernel that runs one program per row.

    grad8_NV: where to store the gradient a second time, times SOFTMAX_FACTOR and in FP8 (E5M2).
    """
    N, V = logits_NV.shape
    loss_N = torch.empty(N, dtype=torch.float32, device=logits_NV.device)
    _cross_entropy[(N,)](
        logits_NV,
        targets_N,
        loss_N,
        logits_NV if grad8_NV is None else grad8_NV,
        vocab_size,
        V,
        OVERWRITE=overwrite,
        FACTOR=0.0 if grad8_NV is None else SOFTMAX_FACTOR,
        SOFTCAP=float(softcap),
        THREADS=32 * WARPS,
        WIDTH=LOAD_BYTES // logits_NV.element_size(),
        num_warps=WARPS,
    )
    return loss_N


@jit
def _load(logits, at, V, SOFTCAP: tl.constexpr, IN_ROW: tl.constexpr):
    """Load logits in fp32, capped. IN_ROW: whether `at` is known to be below V.

    V, unlike vocab_size, is known to be divisible by 16, without which loads are not vectorized.
    """
    HAS_CAP: tl.constexpr = SOFTCAP > 0  # Triton does not accept a float as a condition
    if IN_ROW:
        x = tl.load(logits + at).to(tl.float32)
    else:
        x = tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32)
    if HAS_CAP:
        x = SOFTCAP * (2 * tl.sigmoid(x * (2 / SOFTCAP)) - 1)  # tanh, which Triton lacks
    return x


@jit
def _gradient(x, log2_total, SOFTCAP: tl.constexpr):
    """Return softmax(x), times the derivative of the cap."""
    HAS_CAP: tl.constexpr = SOFTCAP > 0
    d = tl.exp2(x * LOG2_E - log2_total)
    if HAS_CAP:
        d *= 1 - (x / SOFTCAP) * (x / SOFTCAP)
    return d


@jit
def _store(logits, grad8, at, d, mask, FACTOR: tl.constexpr):
    """Store gradients in place of the logits and, if FACTOR is above 0, times FACTOR in FP8."""
    tl.store(logits + at, d.to(logits.dtype.element_ty), mask=mask)
    if FACTOR > 0:
        tl.store(grad8 + at, (d * FACTOR).to(grad8.dtype.element_ty), mask=mask)


@jit
def _cross_entropy(
    logits,
    targets,
    loss,
    grad8,
    vocab_size,
    V,
    OVERWRITE: tl.constexpr,
    FACTOR: tl.constexpr,
    SOFTCAP: tl.constexpr,
    THREADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    LOWEST: tl.constexpr = -2e38  # finite, so that a thread without logits adds 0, not NaN
    STEP: tl.constexpr = THREADS * WIDTH
    row = tl.program_id(0)
    logits += row.to(tl.int64) * V
    grad8 += row.to(tl.int64) * V
    # Each thread has its own maximum and sum, so loops have no barriers. Columns from `tail` on may
    # be padding; only there do loops compare columns, as instructions limit the kernel.
    columns = tl.arange(0, THREADS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tail = vocab_size // STEP * STEP
    target = tl.load(targets + row)
    is_target = target >= 0
    in_vocab = is_target & (target < vocab_size)  # padding has no probability
    score = _load(logits, tl.where(in_vocab, target, 0), V, SOFTCAP, True)
    tops = tl.full((THREADS,), LOWEST, tl.float32)
    sums = tl.zeros((THREADS,), tl.float32)
    # Sum exp(x - top), rescaled whenever the maximum rises.
    for first in range(0, tail, STEP):
        x = _load(logits, first + columns, V, SOFTCAP, True)
        higher = tl.maximum(tops, tl.max(x, 1))
        terms = tl.exp2(x * LOG2_E - (higher * LOG2_E)[:, None])
        sums = sums * tl.exp2((tops - higher) * LOG2_E) + tl.sum(terms, 1)
        tops = higher
    for first in range(tail, vocab_size, STEP):
        at = first + columns
        x = tl.where(at < vocab_size, _load(logits, at, V, SOFTCAP, False), LOWEST)
        higher = tl.maximum(tops, tl.max(x, 1))
        terms = tl.where(at < vocab_size, tl.exp2((x - higher[:, None]) * LOG2_E), 0.0)
        sums = sums * tl.exp2((tops - higher) * LOG2_E) + tl.sum(terms, 1)
        tops = higher
    top = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp2((tops - top) * LOG2_E), 0)
    if OVERWRITE:
        # An infinite total for rows without a target makes their gradient 0.
        log2_total = tl.where(is_target, top * LOG2_E + tl.log2(total), float("inf"))
        for first in range(0, tail, STEP):
            x = _load(logits, first + columns, V, SOFTCAP, True)
            _store(logits, grad8, first + columns, _gradient(x, log2_total, SOFTCAP), None, FACTOR)
        for first in range(tail, V, STEP):
            at = first + columns
            x = _load(logits, at, V, SOFTCAP, False)
            d = tl.where(at < vocab_size, _gradient(x, log2_total, SOFTCAP), 0.0)
            _store(logits, grad8, at, d, at < V, FACTOR)
        tl.debug_barrier()  # before the target's gradient is overwritten
        d = _gradient(score, log2_total, SOFTCAP) - _gradient(score, score * LOG2_E, SOFTCAP)
        _store(logits, grad8, target, d, in_vocab, FACTOR)
    score = tl.where(in_vocab, score, float("-inf"))
    tl.store(loss + row, tl.where(is_target, tl.log(total) + top - score, 0.0))


LOSS: dict[str, CrossEntropyFn] = {
    "torch": softmax_cross_entropy,
    "triton": fused_softmax_cross_entropy,
    "native": native.softmax_cross_entropy,
}
