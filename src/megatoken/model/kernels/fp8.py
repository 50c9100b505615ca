"""The output layer with FP8 matmuls and sums in fp32 (Micikevicius et al. 2022).

Activations and weights are rounded to e4m3, which has 3 bits of mantissa, and gradients to e5m2,
which has 2 and a wider range. Each tensor is first multiplied by the power of two that brings its
largest magnitude to the upper end of that range. NVIDIA GPUs since Ada have such matmuls; torch
computes the same on a CPU, but slower than in bf16.

Shapes: N rows, C d_model, V padded vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatoken.base.system.torch_compat import scaled_matmul
from megatoken.model.kernels.cross_entropy import OutputLayer

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
MULTIPLE = 16  # of all sizes of a product; only M of `matmul_nt` is free
EXPONENT = 0x7F800000  # exponent bits of fp32; they round a number down to a power of two
SMALLEST = 1e-30  # lower bound of a tensor's largest magnitude; avoids division by 0
SOFTMAX_FACTOR = 2.0**15  # of the logits' gradient, which is at most 1


class Scaled(NamedTuple):
    """A matrix of FP8 values, to be multiplied by a 0-d fp32 scale on the same device."""

    values: Tensor
    scale: Tensor

    def transpose(self) -> "Scaled":
        """Return the transposed matrix, contiguous as `matmul_nt` needs it."""
        return Scaled(self.values.T.contiguous(), self.scale)


def round_to_fp8(x: Tensor, dtype: torch.dtype) -> Scaled:
    """Round a bf16 matrix to `dtype`, E4M3 or E5M2."""
    largest = torch.linalg.vector_norm(x, torch.inf).float().clamp(min=SMALLEST)
    factor = torch.finfo(dtype).max / largest
    factor = (factor.view(torch.int32) & EXPONENT).view(torch.float32)
    return Scaled((x * factor.to(x.dtype)).to(dtype), 1 / factor)


def matmul_nt(a: Scaled, b: Scaled, out_MN: Tensor, *, fast: bool = False) -> None:
    """Write a (M, K) times the transposed b (N, K), the layout that the hardware reads, to `out`.

    fast: whether Hopper GPUs may keep sums in fewer bits than fp32, as is usual in the forward.
    """
    scaled_matmul(a.values, b.values.T, a.scale, b.scale, out_MN, fast=fast)


class FP8Layer(OutputLayer):
    """An output layer with FP8 matmuls for logits and hidden gradients, in training.

    The weight's gradient stays in bf16: an FP8 matmul cannot add to a sum, and would need a
    transposed copy of the logits' gradient.

    grad8_NV: gradients of logits in E5M2, multiplied by SOFTMAX_FACTOR, if the softmax writes them.
    """

    grad8_NV: Tensor | None = None

    def __init__(self, h_NC: Tensor, w_VC: Tensor, *, trains: bool) -> None:
        super().__init__(h_NC, w_VC, trains=trains)
        if trains:
            self.hidden8_NC = round_to_fp8(h_NC, E4M3)
            self.weight8_VC = round_to_fp8(w_VC, E4M3)
            self.weight8_CV = self.weight8_VC.transpose()
            self.softmax_scale = torch.full_like(self.weight8_VC.scale, 1 / SOFTMAX_FACTOR)

    def project(self, rows: slice, out_NV: Tensor) -> None:
        if not self.trains:
            return super().project(rows, out_NV)
        values_NC, scale = self.hidden8_NC
        matmul_nt(Scaled(values_NC[rows], scale), self.weight8_VC, out_NV, fast=True)

    def grad_hidden(self, grad_NV: Tensor, out_NC: Tensor) -> None:
        if self.grad8_NV is None:
            grad8_NV = (grad_NV * SOFTMAX_FACTOR).to(E5M2)
        else:
            grad8_NV = self.grad8_NV[: len(grad_NV)]
        matmul_nt(Scaled(grad8_NV, self.softmax_scale), self.weight8_CV, out_NC)
