"""The wide half of the MLP: x W^T + b through a tanh GELU (Hendrycks and Gimpel 2016, the approximation of GPT-2); or,
by torch alone, through the exact one, or the product of x U^T with a gate, x G^T through a SiLU (SwiGLU, Shazeer 2020).

Plain is torch's. Fused leaves the bias out of the product and adds it inside the activation, so that one reading of the
gradient in the backward makes both the slope's product and the bias's column sums. tanh(z) is 2 sigmoid(2z) - 1.

Shapes: N rows, F the MLP's width, P programs of a backward.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatoken.model.kernels.jit import jit, tl

Make = Callable[[], Tensor]  # the product is done; the activation is made as often as this is called

STEEPNESS = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715
BLOCK = 1024  # numbers of a forward's program
ROWS, COLUMNS = 16, 64  # a backward's tile
PROGRAMS = 64  # of a backward that share the rows of the same columns


def gelu(up: nn.Linear, x: Tensor) -> Make:
    """GELU(x W^T + b), by torch."""
    return partial(F.gelu, up(x), approximate="tanh")


def erf_gelu(up: nn.Linear, x: Tensor) -> Make:
    """The exact GELU of x W^T + b, by torch."""
    return partial(F.gelu, up(x))


def fused_gelu(up: nn.Linear, x: Tensor) -> Make:
    """GELU(x W^T + b): torch's product, and one kernel for bias and GELU."""
    return partial(add_bias_gelu, F.linear(x, up.weight), up.bias)


def swiglu(gate: nn.Linear, up: nn.Linear, x: Tensor) -> Make:
    """SiLU(x G^T) * x U^T, by torch."""
    return partial(multiply_silu, gate(x), up(x))


def multiply_silu(gated: Tensor, product: Tensor) -> Tensor:
    """SiLU(gated) * product."""
    return F.silu(gated) * product


def add_bias_gelu(product: Tensor, bias_F: Tensor) -> Tensor:
    """GELU(product + bias), in one pass forward and one backward."""
    y: Tensor = _BiasGelu.apply(product, bias_F)
    return y


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, bias_F: Tensor) -> Tensor:
        product = product.contiguous()
        y = torch.empty_like(product)
        grid = (-(-product.numel() // BLOCK),)
        _forward[grid](product, bias_F, y, product.numel(), len(bias_F), STEEPNESS=STEEPNESS, CUBIC=CUBIC, BLOCK=BLOCK)
        ctx.save_for_backward(product, bias_F)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        product, bias_F = ctx.saved_tensors
        width = len(bias_F)
        N = product.numel() // width
        grad_product = torch.empty_like(product)
        P = min(-(-N // ROWS), PROGRAMS)
        sums_PF = torch.empty(P, width, dtype=torch.float32, device=grad.device)
        grid = (P, -(-width // COLUMNS))
        _backward[grid](
            grad.contiguous(), product, bias_F, grad_product, sums_PF, N, width,
            STEEPNESS=STEEPNESS, CUBIC=CUBIC, ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
        return grad_product, sums_PF.sum(0).to(bias_F.dtype)


@jit
def _forward(product, bias, y, size, width, STEEPNESS: tl.constexpr, CUBIC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    z = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(bias + at % width, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(STEEPNESS * z * (1.0 + CUBIC * z * z))
    tl.store(y + at, (z * gate).to(y.dtype.element_ty), mask=inside)


@jit
def _backward(
    grad, product, bias, grad_product, sums, N, width,
    STEEPNESS: tl.constexpr, CUBIC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    b = tl.load(bias + columns, mask=within, other=0.0).to(tl.float32)
    sum_of_columns = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(program * ROWS, N, programs * ROWS):
        rows = first + tl.arange(0, ROWS)
        at = rows[:, None].to(tl.int64) * width + columns[None, :]
        inside = (rows < N)[:, None] & within[None, :]
        z = tl.load(product + at, mask=inside, other=0.0).to(tl.float32) + b[None, :]
        gate = tl.sigmoid(STEEPNESS * z * (1.0 + CUBIC * z * z))
        slope = gate + z * gate * (1.0 - gate) * STEEPNESS * (1.0 + 3.0 * CUBIC * z * z)
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(grad_product + at, d.to(grad_product.dtype.element_ty), mask=inside)
        sum_of_columns += tl.sum(d, 0)
    tl.store(sums + program * width + columns, sum_of_columns, mask=within)
