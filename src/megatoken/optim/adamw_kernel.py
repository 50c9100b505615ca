"""AdamW of all parameters in one launch, as a Triton kernel for NVIDIA GPUs.

It reads the gradients in their own dtype, and writes the low-precision copy of the weights in the
same pass: with gradients and copies in bf16, it moves 30 bytes per parameter.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatoken.system.triton_jit import jit, tl

BLOCK = 2048  # parameters per program
WARPS = 8
ALIGNMENT = 16  # bytes; the widest load


def update_group(
    rows: Sequence[Sequence[Tensor]], group: dict[str, Any], found_inf: Tensor, grad_scale: Tensor
) -> None:
    """Update the parameters of a group as torch's fused AdamW does, but for their step numbers.

    rows: per parameter: the fp32 weight, exp_avg, exp_avg_sq, gradient, low-precision copy, step.
    found_inf, grad_scale: nothing changes if the first is 1; gradients are divided by the second.
    """
    *_, gradient, copy, step = rows[0]
    first_blocks, owners = map_blocks(tuple(row[0].numel() for row in rows), step.device)
    addresses = [
        [*(tensor.data_ptr() for tensor in row), row[0].numel(), first_block]
        for row, first_block in zip(rows, first_blocks, strict=True)
    ]
    table = torch.tensor(addresses, pin_memory=step.is_cuda).to(step.device, non_blocking=True)
    beta1, beta2 = group["betas"]
    _adamw[(len(owners),)](
        table,
        owners,
        found_inf,
        grad_scale,
        group["lr"],
        1 - group["lr"] * group["weight_decay"],
        group["eps"],
        1 - beta1,
        1 - beta2,
        math.log(beta1),
        math.log(beta2),
        GRADIENT=getattr(tl, str(gradient.dtype).removeprefix("torch.")),
        COPY=getattr(tl, str(copy.dtype).removeprefix("torch.")),
        ALIGNED=all(number % ALIGNMENT == 0 for row in addresses for number in (*row[:5], row[6])),
        COLUMNS=table.shape[1],
        SIZE=BLOCK,
        num_warps=WARPS,
    )


@lru_cache(maxsize=2)  # a model has two groups
def map_blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[list[int], Tensor]:
    """Return the number of each tensor's first block, and on the device each block's tensor."""
    n_blocks = [math.ceil(size / BLOCK) for size in sizes]
    owners = torch.repeat_interleave(torch.tensor(n_blocks))
    return [0, *accumulate(n_blocks[:-1])], owners.to(device)


@jit
def _locate(row, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _correct_bias(step, log_beta):
    # 1 - beta^step; near 0 as a series, because the difference would lose digits.
    x = step * log_beta
    tail = 1 + x * (1 / 4) * (1 + x * (1 / 5) * (1 + x * (1 / 6)))
    series = -x * (1 + x * (1 / 2) * (1 + x * (1 / 3) * tail))
    return tl.where(x > -0.125, series, 1 - tl.exp(x))


@jit
def _adamw(
    table,
    owners,
    found_inf,
    grad_scale,
    lr,
    decay,
    eps,
    rate1,
    rate2,
    log_beta1,
    log_beta2,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):
    if tl.load(found_inf) == 0:
        block = tl.program_id(0)
        row = table + tl.load(owners + block) * COLUMNS
        size = tl.load(row + 6)
        if ALIGNED:
            size = tl.multiple_of(size, 16)
        # Each thread has 4 neighbors, 16 bytes in fp32; more would move between threads.
        columns = tl.arange(0, SIZE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
        at = (block - tl.load(row + 7)) * SIZE + columns
        mask = at < size
        params = _locate(row, 0, tl.float32, ALIGNED) + at
        averages = _locate(row, 1, tl.float32, ALIGNED) + at
        squares = _locate(row, 2, tl.float32, ALIGNED) + at
        gradients = _locate(row, 3, GRADIENT, ALIGNED) + at
        copies = _locate(row, 4, COPY, ALIGNED) + at
        param = tl.load(params, mask)
        average = tl.load(averages, mask)
        square = tl.load(squares, mask)
        gradient = tl.load(gradients, mask).to(tl.float32) * (1 / tl.load(grad_scale))
        step = tl.load(_locate(row, 5, tl.float32, False)) + 1
        average += rate1 * (gradient - average)
        square += rate2 * (gradient * gradient - square)
        root = tl.sqrt(square) * (1 / tl.sqrt(_correct_bias(step, log_beta2)))
        step_size = lr / _correct_bias(step, log_beta1)
        param = param * decay - step_size * average / (root + eps)
        tl.store(params, param, mask)
        tl.store(averages, average, mask)
        tl.store(squares, square, mask)
        tl.store(copies, param.to(COPY), mask)
