"""Parameters, FLOPs and bytes of a model, by arithmetic, without torch.

FLOPs per token have two published definitions. Full attention: 6N + 12*L*d*T (PaLM, Chowdhery et
al. 2022, appendix B). Causal: 6N + 6*L*d*T (llm.c), because half of the attention matrix is masked. N
counts parameters in matrix products, including the output layer once, tied or not. Embeddings and
value embeddings are lookups; norms and biases are not products. Shared key/value heads save
parameters but no attention FLOPs: every query meets every key. In a layer with a window of w keys,
full attention is w keys per query, causal attention w (2T - w) / 2T on average.
"""

import math

from megatoken.config.model_config import ModelConfig


def count_parameters(config: ModelConfig) -> int:
    """Trainable parameters, with the real vocabulary (padding rows are not counted)."""
    d = config.d_model
    others = config.seq_len * d if config.pos_emb == "learned" else 0
    others += (1 + config.embedding_norm) * _count_norm_parameters(config, d)
    others += 2 * config.n_layer if config.residual_scales else 0
    others += d + 1 if config.value_head else 0
    return (
        _count_embeddings(config, config.vocab_size)
        + config.n_layer * count_block_parameters(config)
        + others
    )


def count_block_parameters(config: ModelConfig) -> int:
    """Trainable parameters of one block."""
    d, f, gates = config.d_model, config.d_ff, int(config.mlp == "swiglu")
    biases = (d + _kv_width(config)) + d + (1 + gates) * f + d if config.bias else 0
    norms = 2 * _count_norm_parameters(config, d) + 2 * config.qk_norm * _count_norm_parameters(
        config, config.d_head
    )
    return _block_matrices(config) + biases + norms


def count_value_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Trainable parameters of all value embeddings with so many rows, and of their gates."""
    return (
        len(config.value_embedding_layers)
        * config.kv_heads
        * (vocab_size * config.d_head + config.d_model)
    )


def _count_embeddings(config: ModelConfig, vocab_size: int) -> int:
    """Parameters with a row for each token id, and the gates of value embeddings."""
    tables = (1 if config.tie_embeddings else 2) * vocab_size * config.d_model
    return tables + count_value_parameters(config, vocab_size)


def _count_norm_parameters(config: ModelConfig, width: int) -> int:
    return 2 * width if config.bias and config.norm == "layernorm" else width


def count_matmul_parameters(config: ModelConfig) -> int:
    """N: weights in matrix products, the output layer counted once."""
    gates = count_value_parameters(config, vocab_size=0)
    return config.n_layer * _block_matrices(config) + gates + config.vocab_size * config.d_model


def _block_matrices(config: ModelConfig) -> int:
    d, products = config.d_model, 3 if config.mlp == "swiglu" else 2
    return d * (d + _kv_width(config)) + d * d + products * d * config.d_ff


def _kv_width(config: ModelConfig) -> int:
    """Numbers in the keys and values of a token."""
    return 2 * config.kv_heads * config.d_head


def flops_per_token(config: ModelConfig, *, causal: bool) -> int:
    """FLOPs of forward and backward for one token at full context, by the causal or the full-attention definition."""
    T = config.seq_len
    keys = [min(window or T, T) for window in config.windows]
    attention = sum(
        6 * config.d_model * w * (2 * T - w) // T if causal else 12 * config.d_model * w
        for w in keys
    )
    return 6 * count_matmul_parameters(config) + attention


def expected_initial_loss(config: ModelConfig) -> float:
    """ln V: the loss in nats of a uniform prediction, which an initialized model is close to."""
    return math.log(config.vocab_size)


def count_padded_parameters(config: ModelConfig) -> int:
    """Trainable parameters in memory: the vocabulary with its padding rows."""
    padding = _count_embeddings(config, config.padded_vocab_size) - _count_embeddings(
        config, config.vocab_size
    )
    return count_parameters(config) + padding
