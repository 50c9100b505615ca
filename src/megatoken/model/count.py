"""Parameters, FLOPs and bytes of a model, by arithmetic: no torch, nothing is allocated.

FLOPs a token have two published readings. Full attention: 6N + 12*L*d*T (PaLM, Chowdhery et al. 2022, appendix B).
Causal: 6N + 6*L*d*T (llm.c), since half of the attention matrix is never needed. N counts parameters in matrix
products, the tied head once; embeddings are look-ups, norms and biases are not products.
"""

import math

from megatoken.presets import Shape


def count_parameters(shape: Shape) -> int:
    """All trainable numbers, with the real vocabulary (padding rows are not counted)."""
    d, f = shape.d_model, shape.d_ff
    attention = (3 * d * d + 3 * d) + (d * d + d)
    mlp = (d * f + f) + (f * d + d)
    norms = 2 * 2 * d
    return (shape.vocab_size + shape.seq_len) * d + shape.n_layer * (attention + mlp + norms) + 2 * d


def count_matmul_parameters(shape: Shape) -> int:
    """N: weights that take part in matrix products, the tied output layer counted once."""
    d, f = shape.d_model, shape.d_ff
    return shape.n_layer * (4 * d * d + 2 * d * f) + shape.vocab_size * d


def flops_per_token(shape: Shape, *, causal: bool) -> int:
    """FLOPs of forward and backward for one token at full context, in the reading asked for."""
    attention = (6 if causal else 12) * shape.n_layer * shape.d_model * shape.seq_len
    return 6 * count_matmul_parameters(shape) + attention


def expected_initial_loss(shape: Shape) -> float:
    """ln V: the loss in nats of a model that knows nothing."""
    return math.log(shape.vocab_size)


def state_bytes(shape: Shape) -> int:
    """Bytes of fp32 weights and AdamW's two moments as they are saved and held, padding included."""
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.d_model
    return 12 * (count_parameters(shape) + padding)
