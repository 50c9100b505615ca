"""The operations of a block that exist in several forms: same values, different speed.

A form is chosen from outside, by name, for a machine (train/choose.py measures which wins); the model calls whatever
it was given. The first of each table is plain PyTorch, the twin that tests hold every other form to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from megatoken.model.kernels.attention import (
    backend_attention,
    blocked_attention,
    explicit_attention,
    flash_attention,
    flex_attention_causal,
)
from megatoken.model.kernels.gelu import Make, fused_gelu, gelu
from megatoken.model.kernels.linear import numpy_linear, onednn_linear
from megatoken.model.kernels.norm import add_norm, add_rms_norm, fused_add_norm
from megatoken.model.kernels.softmax import fused_lose, lose

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # rows (..., I), weight (O, I), bias (O) -> (..., O)
# q (B, H, T, D), k and v (B, K, T, D), dropout -> (B, H, T, D), causal; K key heads, each for H / K query heads
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
# the linear layer before it, rows (..., C) -> what makes (..., F), now or again in the backward
Activate = Callable[[nn.Linear, Tensor], Make]
# x, update (..., C), weight, bias (C), epsilon -> x + update, its norm
AddNorm = Callable[[Tensor, Tensor | None, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


class Lose(Protocol):
    """Logits (N, V), targets (N), real vocabulary -> losses (N); the logits are overwritten by their gradient."""

    def __call__(self, logits_NV: Tensor, targets_N: Tensor, vocab_size: int, *, overwrite: bool) -> Tensor: ...


LINEAR: dict[str, Multiply] = {"torch": F.linear, "numpy": numpy_linear, "onednn": onednn_linear}
ATTENTION: dict[str, Attend] = {
    "explicit": explicit_attention,
    "flash": flash_attention,
    "blocked": blocked_attention,
    "cudnn": partial(backend_attention, SDPBackend.CUDNN_ATTENTION),
    # One backend of torch; `switch_flash` puts the version behind it.
    "fa2": partial(backend_attention, SDPBackend.FLASH_ATTENTION),
    "fa3": partial(backend_attention, SDPBackend.FLASH_ATTENTION),
    "fa4": partial(backend_attention, SDPBackend.FLASH_ATTENTION),
    "flex": flex_attention_causal,
}
CUDA_ONLY = ("cudnn", "fa2", "fa3", "fa4", "flex")
NORM: dict[str, dict[str, AddNorm]] = {
    "layernorm": {"torch": add_norm, "triton": fused_add_norm},
    "rmsnorm": {"torch": add_rms_norm},
}
GELU: dict[str, Activate] = {"torch": gelu, "triton": fused_gelu}
LOSS: dict[str, Lose] = {"torch": lose, "triton": fused_lose}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One form of each operation, by name."""

    linear: str = "torch"
    attention: str = "flash"
    norm: str = "torch"
    gelu: str = "torch"
    loss: str = "torch"

    def __str__(self) -> str:
        fused = [name for name in ("norm", "gelu", "loss") if getattr(self, name) != "torch"]
        return f"linear {self.linear}, attention {self.attention}" + (f", fused {' '.join(fused)}" if fused else "")
