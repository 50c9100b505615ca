"""What an optimizer keeps and computes, by arithmetic, without torch."""

from megatoken.config.model_config import ModelConfig
from megatoken.model.flops import count_matmul_parameters, count_padded_parameters

FP32 = 4
ORTHOGONALIZE_STEPS = 5
# Bytes of state for a parameter, in fp32: in a matrix of a hidden layer, and in any other tensor.
STATE_BYTES: dict[str, tuple[int, int]] = {"adamw": (8, 8), "muon": (4, 8)}


def count_optimizer_bytes(name: str, model: ModelConfig) -> int:
    """Bytes of the optimizer's state for a whole model, padding included."""
    per_hidden, per_other = STATE_BYTES[name]
    hidden = count_matmul_parameters(model) - model.vocab_size * model.d_model
    return per_hidden * hidden + per_other * (count_padded_parameters(model) - hidden)


def count_saved_bytes(name: str, model: ModelConfig) -> int:
    """Bytes of a checkpoint: fp32 weights and optimizer state, padding included."""
    return FP32 * count_padded_parameters(model) + count_optimizer_bytes(name, model)


def count_optimizer_flops(name: str, model: ModelConfig) -> int:
    """FLOPs of the optimizer's matrix products in one step: Newton-Schulz of muon, on queries, keys, values apart."""
    if name != "muon":
        return 0
    d, f = model.d_model, model.d_ff
    shapes = [
        *((rows, d) for rows in model.qkv_rows),
        (d, d),
        *[(f, d)] * (3 if model.mlp == "swiglu" else 2),
    ]
    shapes = [*shapes * model.n_layer, *[(model.kv_heads, d)] * len(model.value_embedding_layers)]
    sizes = [(min(shape), max(shape)) for shape in shapes]
    return ORTHOGONALIZE_STEPS * sum(4 * n * n * m + 2 * n**3 for n, m in sizes)
