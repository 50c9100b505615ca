"""Parameters, FLOPs and bytes of a model, by arithmetic: no torch, nothing is allocated.

FLOPs a token have two published readings. Full attention: 6N + 12*L*d*T (PaLM, Chowdhery et al. 2022, appendix B).
Causal: 6N + 6*L*d*T (llm.c), since half of the attention matrix is never needed. N counts parameters in matrix
products, the output layer once, tied or not; embeddings are look-ups, norms and biases are not products. Heads that
share keys and values save parameters, none of attention's own FLOPs: every query still meets every key.
"""

import math

from megatoken.presets import Shape


def count_parameters(shape: Shape) -> int:
    """All trainable numbers, with the real vocabulary (padding rows are not counted)."""
    d, f, gates = shape.d_model, shape.d_ff, int(shape.mlp == "swiglu")
    norm = 2 * d if shape.bias and shape.norm == "layernorm" else d
    biases = (d + _kv_width(shape)) + d + (1 + gates) * f + d if shape.bias else 0
    embeddings = shape.vocab_size * d * (1 if shape.tied else 2)
    embeddings += shape.seq_len * d if shape.positions == "learned" else 0
    return embeddings + shape.n_layer * (_block_matrices(shape) + biases + 2 * norm) + norm


def count_matmul_parameters(shape: Shape) -> int:
    """N: weights that take part in matrix products, the output layer counted once."""
    return shape.n_layer * _block_matrices(shape) + shape.vocab_size * shape.d_model


def _block_matrices(shape: Shape) -> int:
    d, products = shape.d_model, 3 if shape.mlp == "swiglu" else 2
    return d * (d + _kv_width(shape)) + d * d + products * d * shape.d_ff


def _kv_width(shape: Shape) -> int:
    """Keys and values of a token."""
    return 2 * shape.kv_heads * shape.d_head


def flops_per_token(shape: Shape, *, causal: bool) -> int:
    """FLOPs of forward and backward for one token at full context, in the reading asked for."""
    attention = (6 if causal else 12) * shape.n_layer * shape.d_model * shape.seq_len
    return 6 * count_matmul_parameters(shape) + attention


def expected_initial_loss(shape: Shape) -> float:
    """ln V: the loss in nats of a model that knows nothing."""
    return math.log(shape.vocab_size)


def state_bytes(shape: Shape) -> int:
    """Bytes of fp32 weights and AdamW's two moments as they are saved and held, padding included."""
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.d_model * (1 if shape.tied else 2)
    return 12 * (count_parameters(shape) + padding)
