"""The cross-entropy of cross_entropy.py as a Triton kernel, for GPUs.

It reads a row of logits twice and writes it once, with sums in fp32. This module can be imported
without Triton. TRITON_INTERPRET=1 runs the kernel on a CPU, and tests/model/compile_kernels.py
compiles it for GPUs on a machine that has none.

Shapes: N rows, V padded vocabulary.
"""

import math
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatoken.base.system.device import Device
from megatoken.model.kernels.cross_entropy import OutputLayer
from megatoken.model.kernels.fp8 import E5M2, SOFTMAX_FACTOR, FP8Layer

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


def misses_triton(device: Device) -> str:
    """Return why our Triton kernels cannot run on this device, or "" if they can."""
    if device.type != "cuda":
        return f"there is no GPU to run them ({device.type})"
    if not HAS_TRITON:
        return "Triton is not installed"
    if torch.version.hip:
        return "they are made for NVIDIA GPUs"
    if not device.is_ampere:
        return f"{device.name} is older than Ampere"
    return ""


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
    """Overwrite logits with gradients; if FACTOR is above 0, store FACTOR times them in `grad8`."""
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
    # be padding. Loops compare columns only there, because instructions limit the kernel.
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


class TritonLayer(OutputLayer):
    """An output layer with the Triton kernel."""

    softmax = staticmethod(fused_softmax_cross_entropy)


class FP8TritonLayer(FP8Layer):
    """An output layer with FP8 matmuls, whose softmax also writes its gradient in FP8."""

    def softmax(self, logits_NV: Tensor, *options: Any, overwrite: bool) -> Tensor:
        """Compute `fused_softmax_cross_entropy`; the first chunk of rows is the largest."""
        if overwrite and self.grad8_NV is None:
            self.grad8_NV = torch.empty_like(logits_NV, dtype=E5M2)
        grad8_NV = None if self.grad8_NV is None else self.grad8_NV[: len(logits_NV)]
        return fused_softmax_cross_entropy(
            logits_NV, *options, overwrite=overwrite, grad8_NV=grad8_NV
        )
