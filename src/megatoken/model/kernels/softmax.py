"""Cross-entropy of rows of logits, which are overwritten by their gradient: softmax minus one at the target.

Plain is a few passes of torch over the rows, in fp32. Fused reads a row once and writes it once, in the dtype that it
has, with sums in fp32: a program holds the whole row where that is not too long, else it reads it again.
Columns from `vocab_size` on are padding: no probability, no gradient. Whoever calls strikes out rows that do not count.

Shapes: N rows, V padded vocabulary.
"""

import torch
from torch import Tensor

from megatoken.model.kernels.jit import jit, power_of_2, tl

LONGEST = 1 << 16  # numbers of a row that one program holds at once
PIECE = 1 << 13  # numbers at a time of longer rows
WARPS = 32


def lose(logits_NV: Tensor, targets_N: Tensor, vocab_size: int, *, overwrite: bool) -> Tensor:
    """-log p of every row's target in nats (N,), fp32, 0 where the target is negative, by torch.

    overwrite: leave the gradient of the rows' sum in `logits_NV`; otherwise what it holds afterwards is undefined.
    """
    scores_NV = logits_NV.float()  # the logits themselves where they are fp32
    scores_NV[:, vocab_size:] = -torch.inf
    target_N1 = targets_N.clamp(min=0)[:, None]
    # In place: two passes over the rows, where the sum of exponentials apart from the softmax takes five.
    log_p_NV = torch.log_softmax(scores_NV, -1, out=scores_NV)
    lost_N = -log_p_NV.gather(1, target_N1).squeeze(1) * (targets_N >= 0)
    if overwrite:
        d_NV = log_p_NV.exp_()
        d_NV.scatter_add_(1, target_N1, torch.full_like(target_N1, -1, dtype=torch.float32))
        if d_NV.dtype != logits_NV.dtype:
            logits_NV.copy_(d_NV)
    return lost_N


def fused_lose(logits_NV: Tensor, targets_N: Tensor, vocab_size: int, *, overwrite: bool) -> Tensor:
    """As `lose`, by one kernel."""
    N, V = logits_NV.shape
    lost_N = torch.empty(N, dtype=torch.float32, device=logits_NV.device)
    whole = V <= LONGEST
    _lose[(N,)](
        logits_NV,
        targets_N,
        lost_N,
        vocab_size,
        V,
        OVERWRITE=overwrite,
        WHOLE=whole,
        BLOCK=power_of_2(V) if whole else PIECE,
        num_warps=WARPS,
    )
    return lost_N


@jit
def _lose(
    logits, targets, lost, vocab_size, V, OVERWRITE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * V
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    counted = target >= 0
    known = counted & (target < vocab_size)  # padding has no probability
    score = tl.load(logits + tl.where(known, target, 0), mask=known, other=float("-inf")).to(tl.float32)
    if WHOLE:
        x = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
        top = tl.max(x, 0)
        p = tl.exp(x - top)
        total = tl.sum(p, 0)
        if OVERWRITE:
            d = p / total - tl.where(columns == target, 1.0, 0.0)
            tl.store(logits + columns, d.to(logits.dtype.element_ty), mask=columns < V)
    else:
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        for first in range(0, vocab_size, BLOCK):
            at = first + columns
            x = tl.load(logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
        if OVERWRITE:
            for first in range(0, V, BLOCK):
                at = first + columns
                x = tl.load(logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
                d = tl.exp(x - top) / total - tl.where(at == target, 1.0, 0.0)
                tl.store(logits + at, d.to(logits.dtype.element_ty), mask=at < V)
    tl.store(lost + row, tl.where(counted, tl.log(total) + top - score, 0.0))
