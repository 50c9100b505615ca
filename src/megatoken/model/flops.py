"""Parameters, FLOPs and bytes of a model, by arithmetic, without torch.

FLOPs per token have two published definitions. Full attention: 6N + 12*L*d*T (PaLM, Chowdhery et al. 2022, appendix B).
Causal: 6N + 6*L*d*T (llm.c), because half of the attention matrix is masked. N counts parameters in matrix products,
the output layer once, tied or not; embeddings are look-ups, norms and biases are not products. Shared key/value heads
save parameters but none of attention's own FLOPs: every query meets every key.
"""

import math

from megatoken.config.model_config import ModelConfig


def count_parameters(config: ModelConfig) -> int:
    """Trainable parameters, with the real vocabulary (padding rows are not counted)."""
    d = config.d_model
    embeddings = config.vocab_size * d * (1 if config.tie_embeddings else 2)
    embeddings += config.seq_len * d if config.pos_emb == "learned" else 0
    return embeddings + config.n_layer * count_block_parameters(config) + _count_norm_parameters(config)


def count_block_parameters(config: ModelConfig) -> int:
    """Trainable parameters of one block."""
    d, f, gates = config.d_model, config.d_ff, int(config.mlp == "swiglu")
    biases = (d + _kv_width(config)) + d + (1 + gates) * f + d if config.bias else 0
    return _block_matrices(config) + biases + 2 * _count_norm_parameters(config)


def _count_norm_parameters(config: ModelConfig) -> int:
    return 2 * config.d_model if config.bias and config.norm == "layernorm" else config.d_model


def count_matmul_parameters(config: ModelConfig) -> int:
    """N: weights in matrix products, the output layer counted once."""
    return config.n_layer * _block_matrices(config) + config.vocab_size * config.d_model


def _block_matrices(config: ModelConfig) -> int:
    d, products = config.d_model, 3 if config.mlp == "swiglu" else 2
    return d * (d + _kv_width(config)) + d * d + products * d * config.d_ff


def _kv_width(config: ModelConfig) -> int:
    """Numbers in the keys and values of a token."""
    return 2 * config.kv_heads * config.d_head


def flops_per_token(config: ModelConfig, *, causal: bool) -> int:
    """FLOPs of forward and backward for one token at full context, by the causal or the full-attention definition."""
    attention = (6 if causal else 12) * config.n_layer * config.d_model * config.seq_len
    return 6 * count_matmul_parameters(config) + attention


def expected_initial_loss(config: ModelConfig) -> float:
    """ln V: the loss in nats of a uniform prediction, which an initialized model is close to."""
    return math.log(config.vocab_size)


def count_padded_parameters(config: ModelConfig) -> int:
    """Trainable parameters in memory: the vocabulary with its padding rows."""
    padding = (config.padded_vocab_size - config.vocab_size) * config.d_model * (1 if config.tie_embeddings else 2)
    return count_parameters(config) + padding


def state_bytes(config: ModelConfig) -> int:
    """Bytes of fp32 weights and AdamW's two moments as saved, padding included."""
    return 12 * count_padded_parameters(config)
