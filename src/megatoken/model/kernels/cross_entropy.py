"""Cross-entropy of rows of logits, which are overwritten by their gradient: softmax minus one-hot.

Logits x may be capped first: c tanh(x / c) = 2 c s - c with s = sigmoid(2 x / c), which is much
faster than tanh on a CPU; the softmax ignores the -c. The gradient is then multiplied by 4 s (1 -
s). Columns from `vocab_size` on are padding, without probability or gradient. The caller zeroes the
gradient of ignored rows.

`softmax_cross_entropy` makes a few passes in fp32 with torch. The Triton kernel reads a row twice
and writes it once, with sums in fp32; the native kernel (native/kernels/cross_entropy.cc) does the
same on a CPU. Without Triton this module can still be imported; TRITON_INTERPRET=1 runs the kernel
on a CPU, as tests do.

Shapes: N rows, V padded vocabulary.
"""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from megatoken.native import ops as native

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    import triton

    jit: Any = triton.jit
    tl: Any = triton.language
else:
    jit, tl = (lambda kernel: kernel), SimpleNamespace(constexpr=int)

BLOCK = 1 << 13  # logits that a program holds at once
WARPS = 32


class CrossEntropyFn(Protocol):
    """Logits (N, V), targets (N), vocabulary size, softcap (0: none) -> losses (N).

    Overwrites the logits by their gradient.
    """

    def __call__(
        self,
        logits_NV: Tensor,
        targets_N: Tensor,
        vocab_size: int,
        softcap: float,
        *,
        overwrite: bool,
    ) -> Tensor: ...


def softmax_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, vocab_size: int, softcap: float = 0.0, *, overwrite: bool
) -> Tensor:
    """Return -log p of every row's target in nats (N,), fp32; 0 for negative targets.

    overwrite: leave the gradient of the rows' sum in `logits_NV`. Otherwise it is left undefined.
    """
    scores_NV = logits_NV.float()  # fp32 logits themselves, not a copy
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
        if softcap:
            torch.ops.aten.sigmoid_backward.grad_input(grad_NV, sigmoid_NV, grad_input=grad_NV)
            grad_NV.mul_(4)
        if grad_NV.dtype != logits_NV.dtype:
            logits_NV.copy_(grad_NV)
    return loss_N


def fused_softmax_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, vocab_size: int, softcap: float = 0.0, *, overwrite: bool
) -> Tensor:
    """Compute `softmax_cross_entropy` by one Triton kernel with a program per row."""
    N, V = logits_NV.shape
    loss_N = torch.empty(N, dtype=torch.float32, device=logits_NV.device)
    options = {"OVERWRITE": overwrite, "SOFTCAP": softcap, "BLOCK": BLOCK, "num_warps": WARPS}
    _cross_entropy[(N,)](logits_NV, targets_N, loss_N, vocab_size, V, **options)
    return loss_N


@jit
def _cap(x, SOFTCAP: tl.constexpr):
    return SOFTCAP * (2 * tl.sigmoid(x * (2 / SOFTCAP)) - 1)  # tanh, which Triton lacks


@jit
def _cross_entropy(
    logits,
    targets,
    loss,
    vocab_size,
    V,
    OVERWRITE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * V
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    is_target = target >= 0
    in_vocab = is_target & (target < vocab_size)  # padding has no probability
    at_target = logits + tl.where(in_vocab, target, 0)
    score = tl.load(at_target, mask=in_vocab, other=float("-inf")).to(tl.float32)
    if SOFTCAP:
        score = tl.where(in_vocab, _cap(score, SOFTCAP), float("-inf"))
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    # Sum exp(x - top), rescaled whenever the maximum rises.
    for first in range(0, vocab_size, BLOCK):
        at = first + columns
        x = tl.load(logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        if SOFTCAP:
            x = tl.where(at < vocab_size, _cap(x, SOFTCAP), float("-inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    if OVERWRITE:
        for first in range(0, V, BLOCK):
            at = first + columns
            x = tl.load(logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
            if SOFTCAP:
                x = tl.where(at < vocab_size, _cap(x, SOFTCAP), float("-inf"))
            d = tl.exp(x - top) / total - tl.where(at == target, 1.0, 0.0)
            if SOFTCAP:
                d *= tl.where(at < vocab_size, 1 - (x / SOFTCAP) * (x / SOFTCAP), 0.0)
            tl.store(logits + at, d.to(logits.dtype.element_ty), mask=at < V)
    tl.store(loss + row, tl.where(is_target, tl.log(total) + top - score, 0.0))


LOSS: dict[str, CrossEntropyFn] = {
    "torch": softmax_cross_entropy,
    "triton": fused_softmax_cross_entropy,
    "native": native.softmax_cross_entropy,
}
