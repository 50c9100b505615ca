"""Cross-entropy of rows of logits, which are overwritten by their gradient: softmax minus one at the target.

Logits x may be capped first: c tanh(x / c) = 2 c s - c with s = sigmoid(2 x / c), which torch computes much faster than
tanh on a CPU; the softmax ignores the -c. The gradient is then times 4 s (1 - s).

softmax_cross_entropy takes a few passes of torch over the rows, in fp32. The fused Triton kernel reads a row twice and
writes it once, in its dtype, with sums in fp32. Columns from `vocab_size` on are padding: no probability, no gradient.
The native kernel (native/kernels/cross_entropy.cc) does the same on a CPU. The caller zeroes the gradient of ignored
rows. LOSS lists all three.

Without Triton this module can be imported, the kernel not run; TRITON_INTERPRET=1 runs it on a CPU, as tests do.

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

BLOCK = 1 << 13  # logits that a program holds at a time
WARPS = 32


class CrossEntropyFn(Protocol):
    """Logits (N, V), targets (N), real vocabulary, cap of the logits (0: none) -> losses (N); the logits are
    overwritten by their gradient."""

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
    """-log p of every row's target in nats (N,), fp32, 0 where the target is negative.

    overwrite: leave the gradient of the rows' sum in `logits_NV`; otherwise its contents are undefined afterwards.
    """
    scores_NV = logits_NV.float()  # the logits themselves where they are fp32
    if softcap:
        sigmoid_NV = (scores_NV * (2 / softcap)).sigmoid_()
        torch.mul(sigmoid_NV, 2 * softcap, out=scores_NV)
    scores_NV[:, vocab_size:] = -torch.inf
    target_N1 = targets_N.clamp(min=0)[:, None]
    # In place: two passes over the rows; log-sum-exp and softmax apart would take five.
    log_p_NV = torch.log_softmax(scores_NV, -1, out=scores_NV)
    loss_N = -log_p_NV.gather(1, target_N1).squeeze(1) * (targets_N >= 0)
    if overwrite:
        grad_NV = log_p_NV.exp_()
        grad_NV.scatter_add_(1, target_N1, torch.full_like(target_N1, -1, dtype=torch.float32))
        if softcap:
            torch.ops.aten.sigmoid_backward.grad_input(
                grad_NV, sigmoid_NV, grad_input=grad_NV
            ).mul_(4)
        if grad_NV.dtype != logits_NV.dtype:
            logits_NV.copy_(grad_NV)
    return loss_N


def fused_softmax_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, vocab_size: int, softcap: float = 0.0, *, overwrite: bool
) -> Tensor:
    """As `softmax_cross_entropy`, by one kernel with a program per row."""
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
    counted = target >= 0
    known = counted & (target < vocab_size)  # padding has no probability
    score = tl.load(logits + tl.where(known, target, 0), mask=known, other=float("-inf")).to(
        tl.float32
    )
    if SOFTCAP:
        score = tl.where(known, _cap(score, SOFTCAP), float("-inf"))
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(
        0, vocab_size, BLOCK
    ):  # sum of exp(x - top), rescaled whenever the maximum rises
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
    tl.store(loss + row, tl.where(counted, tl.log(total) + top - score, 0.0))


LOSS: dict[str, CrossEntropyFn] = {
    "torch": softmax_cross_entropy,
    "triton": fused_softmax_cross_entropy,
    "native": native.softmax_cross_entropy,
}
