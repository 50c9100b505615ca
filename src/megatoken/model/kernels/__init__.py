"""Operations of the model that have several implementations with the same values and different speed.

ATTENTION and LOSS map names to implementations; tests compare them with plain PyTorch. `Kernels` names one of each,
train/kernel_autotune.py measures which are fastest.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatoken.model.kernels.attention import ATTENTION, CUDA_ONLY, AttentionFn, masked_attention, register_attention
from megatoken.model.kernels.cross_entropy import LOSS, CrossEntropyFn

__all__ = ["ATTENTION", "CUDA_ONLY", "LOSS", "AttentionFn", "CrossEntropyFn", "masked_attention", "register_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The name of one implementation of each operation."""

    attention: str = "flash"
    loss: str = "torch"

    @classmethod
    def from_json(cls, names: Mapping[str, str]) -> "Kernels":
        """From a run folder's machine.json; older ones name implementations of other operations, too."""
        return cls(attention=names.get("attention", "flash"), loss=names.get("loss", "torch"))

    def __str__(self) -> str:
        return f"attention {self.attention}{', fused loss' if self.loss == 'triton' else ''}"
