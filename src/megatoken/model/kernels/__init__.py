"""The operations of a block that exist in several forms: same values, different speed.

A form is chosen from outside, by name, for a machine (train/choose.py measures which wins); the model calls whatever
it was given. The first of each table is plain PyTorch, the twin that tests hold every other form to.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatoken.model.kernels.attention import blocked_attention, explicit_attention, flash_attention
from megatoken.model.kernels.linear import numpy_linear, onednn_linear

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows (..., I), weight (O, I), bias (O) -> (..., O)
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v (B, H, T, D), dropout -> (B, H, T, D), causal

LINEAR: dict[str, Multiply] = {"torch": F.linear, "numpy": numpy_linear, "onednn": onednn_linear}
ATTENTION: dict[str, Attend] = {
    "explicit": explicit_attention,
    "flash": flash_attention,
    "blocked": blocked_attention,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One form of each operation, by name."""

    linear: str = "torch"
    attention: str = "flash"

    def __str__(self) -> str:
        return f"linear {self.linear}, attention {self.attention}"
