"""Operations of the model that have several implementations, equal in values but not in speed.

ATTENTION, BLOCK and LOSS map names to implementations. A `Kernels` names one implementation of each
operation; train/kernel_autotune.py measures which are fastest.
"""

from dataclasses import dataclass

from megatoken.model.kernels.attention import (
    ATTENTION,
    CUDA_ONLY,
    WITHOUT_WINDOW,
    AttentionFn,
    attend_documents,
    masked_attention,
    register_attention,
)
from megatoken.model.kernels.block import BLOCK
from megatoken.model.kernels.cross_entropy import LOSS, CrossEntropyFn

__all__ = [
    "ATTENTION",
    "BLOCK",
    "CUDA_ONLY",
    "LOSS",
    "WITHOUT_WINDOW",
    "AttentionFn",
    "CrossEntropyFn",
    "attend_documents",
    "masked_attention",
    "register_attention",
]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which implementation to use for each operation, by name."""

    attention: str = "flash"
    loss: str = "torch"
    block: str = "torch"
    adamw: str = "torch"
    fp8: str = "off"
    mixed: str = "autocast"  # masters: weights held in low precision, with fp32 master weights

    def __str__(self) -> str:
        parts = [f"attention {self.attention}"]
        if self.loss == "triton":
            parts.append("fused loss")
        if self.block == "cublaslt":
            parts.append("GELU in matmuls")
        if self.block == "torch+native":
            parts.append("native norms and activations")
        if self.fp8 != "off":
            parts.append(f"fp8 {self.fp8}")
        native = [name for name in ("block", "loss") if getattr(self, name) == "native"]
        if native:
            parts.append(f"native {' + '.join(native)}")
        if self.mixed == "masters":
            parts.append("weights held in low precision")
        return ", ".join(parts)
