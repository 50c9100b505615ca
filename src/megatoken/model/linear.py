"""The linear layer, with one difference: a single row on a CPU is multiplied by all cores.

In: rows and a weight. Out: rows @ weight.T + bias. Generating text one token at a time multiplies one row by every
weight, so its speed is that of reading the weights; MKL's product of one row by a matrix reads with one core (16 GB/s
of 34 on a 2-core EPYC 7003). Slices of the weight, a slice a core, multiplied as one batch read with all of them.
Nothing is copied. Training never takes this path. Absent: any other precision or device, where F.linear is best.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST_WEIGHTS = 1 << 18  # 1 MiB: below it waking the other cores costs more than they bring
HAS_MKL = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


class Linear(nn.Linear):
    """nn.Linear that hands its product to `multiply`."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)


def multiply(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x (..., I) times weight (O, I) transposed, plus bias (O,): (..., O). Equal to F.linear up to rounding."""
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.numel() != x.shape[-1]:
        return F.linear(x, weight_OI, bias_O)
    out, width = weight_OI.shape
    slices = _count_slices(out, torch.get_num_threads())
    fp32 = x.dtype == weight_OI.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if not (fp32 and HAS_MKL) or slices == 1 or out * width < FEWEST_WEIGHTS:
        return F.linear(x, weight_OI, bias_O)
    rows_K1I = x.reshape(1, 1, width).expand(slices, 1, width)
    weight_KIO = weight_OI.view(slices, out // slices, width).transpose(1, 2)
    y = torch.bmm(rows_K1I, weight_KIO).view(*x.shape[:-1], out)
    return y if bias_O is None else y.add_(bias_O)


@cache
def _count_slices(rows: int, cores: int) -> int:
    """The most equal slices of `rows` that `cores` can take, one each."""
    return next(k for k in range(cores, 0, -1) if rows % k == 0)
