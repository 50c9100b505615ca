"""Compute the memory and FLOPs of optimizers from the model's config, without torch."""

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.rooms import load_entry
from megatoken.model.extensions import count_additions
from megatoken.model.flops import (
    count_matmul_parameters,
    count_padded_parameters,
    count_trained_parameters,
)
from megatoken.model.memory import FP32

ORTHOGONALIZE_STEPS = 5
# Bytes of fp32 state per parameter: in a hidden matrix, and in any other tensor.
STATE_BYTES: dict[str, tuple[int, int]] = {"adamw": (8, 8), "muon": (4, 8)}


def count_optimizer_bytes(name: str, model: ModelConfig) -> int:
    """Return the bytes of an unsharded model's optimizer state, including vocabulary padding."""
    size = STATE_BYTES.get(name) or load_entry("optimizer", name).bytes_per_param
    per_hidden, per_other = (size, size) if isinstance(size, int) else size
    if count_additions(model).freezes:
        return per_other * count_trained_parameters(model)
    hidden = count_matmul_parameters(model) - model.vocab_size * model.d_model
    return per_hidden * hidden + per_other * (count_padded_parameters(model) - hidden)


def count_saved_bytes(name: str, model: ModelConfig) -> int:
    """Return the bytes of a checkpoint: fp32 weights and optimizer state, including padding."""
    return FP32 * count_padded_parameters(model) + count_optimizer_bytes(name, model)
