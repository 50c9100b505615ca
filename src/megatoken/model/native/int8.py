"""Weights in 8 bits, and a linear layer that uses them, for decoding on a CPU.

Decoding spends most of its time on reading the weights, so smaller weights make it faster.

Shapes: N rows, I inputs, O outputs.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.model.native import ops
from megatoken.model.native.library import DTYPES
from megatoken.model.native.selection import loaded_library

MOST_ROWS = 16  # of x; with more, as in a prompt, the weights are converted to x's dtype first
LARGEST = 127


@dataclass(frozen=True)
class Int8Matrix:
    """A weight (O, I) as integers from -127 to 127 and an fp32 scale for each row (O,)."""

    values_OI: Tensor
    scales_O: Tensor

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype`."""
        return (self.values_OI * self.scales_O[:, None]).to(dtype)

    def __len__(self) -> int:
        return len(self.values_OI)


def round_to_int8(weight_OI: Tensor) -> Int8Matrix:
    """Round a weight to int8, scaled so that the largest magnitude in each row becomes 127.

    Rounding errors are thus at most 1/254 of that magnitude.
    """
    scales_O = weight_OI.float().abs().amax(1) / LARGEST
    divisors_O = torch.where(scales_O > 0, scales_O, 1.0)
    return Int8Matrix((weight_OI.float() / divisors_O[:, None]).round_().to(torch.int8), scales_O)


def linear(x: Tensor, weight_OI: Int8Matrix, bias_O: Tensor | None) -> Tensor:
    """Compute F.linear with 8-bit weights.

    Up to MOST_ROWS rows of x are rounded to integers of at least 13 bits and multiplied exactly.
    With more rows, the weights are converted to x's dtype.
    """
    width = x.shape[-1]
    outputs = len(weight_OI)
    N = x.numel() // width
    if N > MOST_ROWS:
        return F.linear(x, weight_OI.to(x.dtype), bias_O)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], outputs)
    arguments = x, weight_OI.values_OI, weight_OI.scales_O, bias_O, y
    loaded_library().call("int8_linear", DTYPES[x.dtype], *arguments, N, width, outputs)
    return y


KERNELS = replace(ops.KERNELS, linear=linear)
