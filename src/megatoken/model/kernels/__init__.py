"""Operations of the model that have several implementations, equal in values but not in speed.

The model starts with those of torch: in attention.py, block.py and cross_entropy.py. The entries of
model/room.py name all. A `Kernels` names one implementation of each operation.
"""

from dataclasses import dataclass


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
