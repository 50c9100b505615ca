"""An update joins the residual stream, and the norm of the sum: two operations on the same rows.

LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019). Plain is torch's pair. Fused, for LayerNorm, reads
stream and update once and writes both results once; its backward makes the stream's gradient, the norm's and the column
sums for weight and bias in one reading; statistics in fp32.

Shapes: N rows, C width, P programs of a backward, each of which sums over its share of the rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.model.kernels.jit import jit, power_of_2, tl

PROGRAMS = 512  # of a backward: a few for every multiprocessor, so that partial sums stay small


def add_norm(
    x: Tensor, update: Tensor | None, weight_C: Tensor, bias_C: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + update, its LayerNorm), by torch."""
    x = x if update is None else x + update
    return x, F.layer_norm(x, weight_C.shape, weight_C, bias_C, eps)


def add_rms_norm(
    x: Tensor, update: Tensor | None, weight_C: Tensor, bias_C: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + update, its RMSNorm, which has no bias), by torch."""
    x = x if update is None else x + update
    return x, F.rms_norm(x, weight_C.shape, weight_C, eps)


def fused_add_norm(
    x: Tensor, update: Tensor | None, weight_C: Tensor, bias_C: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + update, its LayerNorm), by one kernel. The norm has autocast's dtype where that is on, else that of `x`."""
    if update is None:
        return add_norm(x, update, weight_C, bias_C, eps)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    total, normed = _AddNorm.apply(x, update, weight_C, bias_C, eps, dtype)
    return total, normed


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        C = x.shape[-1]
        x, update = x.contiguous(), update.contiguous()
        N = x.numel() // C
        total, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
        mean_N, scale_N = (torch.empty(N, dtype=torch.float32, device=x.device) for _ in range(2))
        block = power_of_2(C)
        _forward[(N,)](
            x, update, weight_C, bias_C, total, normed, mean_N, scale_N, C, eps, BLOCK=block, num_warps=_warps(block)
        )
        ctx.save_for_backward(total, weight_C, mean_N, scale_N)
        ctx.update_dtype = update.dtype
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
        total, weight_C, mean_N, scale_N = ctx.saved_tensors
        C, N = total.shape[-1], len(mean_N)
        grad_x = torch.empty_like(total)
        P = min(N, PROGRAMS)
        weight_PC, bias_PC = (torch.empty(P, C, dtype=torch.float32, device=total.device) for _ in range(2))
        block = power_of_2(C)
        _backward[(P,)](
            grad_total.contiguous(), grad_normed.contiguous(), total, weight_C, mean_N, scale_N, grad_x,
            weight_PC, bias_PC, N, C, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        grad_weight, grad_bias = (part.sum(0).to(weight_C.dtype) for part in (weight_PC, bias_PC))
        return grad_x, grad_x.to(ctx.update_dtype), grad_weight, grad_bias, None, None


def _warps(block: int) -> int:
    """Threads for a row, in groups of 32: about eight numbers each."""
    return min(max(block // 256, 1), 16)


@jit
def _forward(x, update, weight, bias, total, normed, mean, scale, C, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    at = row.to(tl.int64) * C + columns
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + tl.load(update + at, mask=inside, other=0.0)
    s = s.to(total.dtype.element_ty)  # what the stream keeps is what is normed, as in the plain form
    tl.store(total + at, s, mask=inside)
    s = s.to(tl.float32)
    middle = tl.sum(s, 0) / C
    away = tl.where(inside, s - middle, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(away * away, 0) / C + eps)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (away * factor * w + b).to(normed.dtype.element_ty), mask=inside)
    tl.store(mean + row, middle)
    tl.store(scale + row, factor)


@jit
def _backward(
    grad_total, grad_normed, total, weight, mean, scale, grad_x, weight_sums, bias_sums, N, C, BLOCK: tl.constexpr
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < C
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    bias_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, N, programs):
        at = tl.cast(row, tl.int64) * C + columns
        s = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(scale + row)
        z = tl.where(inside, (s - tl.load(mean + row)) * factor, 0.0)
        weight_sum += g * z
        bias_sum += g
        g = g * w
        d = (g - tl.sum(g, 0) / C - z * (tl.sum(g * z, 0) / C)) * factor
        d += tl.load(grad_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at, d.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(weight_sums + program * C + columns, weight_sum, mask=inside)
    tl.store(bias_sums + program * C + columns, bias_sum, mask=inside)
