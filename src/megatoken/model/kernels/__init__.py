"""Operations of the model that have several implementations with the same values and different speed.

ATTENTION, BLOCK and LOSS map names to implementations; tests compare them with plain PyTorch. `Kernels` names one of
each, train/kernel_autotune.py measures which are fastest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatoken.model.kernels.attention import (
    ATTENTION,
    CUDA_ONLY,
    WITHOUT_WINDOW,
    AttentionFn,
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
    "masked_attention",
    "register_attention",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The name of one implementation of each operation."""

    attention: str = "flash"
    loss: str = "torch"
    block: str = "torch"
    adamw: str = "torch"

    @classmethod
    def from_json(cls, names: Mapping[str, str]) -> "Kernels":
        """Return the implementations named in a run folder's machine.json."""
        return cls(
            **{field.name: names[field.name] for field in fields(cls) if field.name in names}
        )

    def __str__(self) -> str:
        native = [name for name in ("block", "loss") if getattr(self, name) == "native"]
        ours = [
            *(["fused loss"] if self.loss == "triton" else []),
            *(["native norms and activations"] if self.block == "torch+native" else []),
            *([f"native {' + '.join(native)}"] if native else []),
        ]
        return ", ".join([f"attention {self.attention}", *ours])
