"""Count the parameters and FLOPs of a model from its config, without torch.

FLOPs per token have two published definitions: 6N + 12*L*d*T for full attention (PaLM, Chowdhery et
al. 2022, appendix B), and 6N + 6*L*d*T for causal attention (llm.c), because half of the attention
matrix is masked. N counts the weights used in matmuls, including the output layer once, whether or
not it is tied. It excludes norms, biases, embeddings and value embeddings, which no matmul uses.
Grouped-query attention saves parameters but no attention FLOPs, because every query is still
compared with every key. In a layer with a window of w keys, full attention counts w keys per query,
and causal attention counts w (2T - w) / 2T on average.

Users' norms, MLPs and blocks are counted by building a block without memory, which needs torch.
"""

import math
from functools import cache

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.rooms import list_own, load_entry
from megatoken.model.extensions import count_additions


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, without the vocabulary's padding rows."""
    d = config.d_model
    others = config.seq_len * d if config.pos_emb == "learned" else 0
    others += (1 + config.embedding_norm) * _count_norm_parameters(config, d)
    others += 2 * config.n_layer if config.residual_scales else 0
    others += (d + 1) * config.smear + config.backout + count_additions(config).parameters
    return (
        _count_embeddings(config, config.vocab_size)
        + config.n_layer * count_block_parameters(config)
        + others
    )


def count_decayed_parameters(config: ModelConfig) -> int:
    """Return the number of parameters with weight decay: those in matrices and embeddings.

    The vocabulary's padding rows are included.
    """
    added = count_additions(config)
    own = 0
    if not added.freezes:
        own = config.n_layer * _block_matrices(config)
        own += _count_embeddings(config, config.padded_vocab_size)
        own += config.seq_len * config.d_model * (config.pos_emb == "learned")
    return own + config.n_layer * added.block_parameters + added.decayed


def count_trained_parameters(config: ModelConfig) -> int:
    """Return the number of parameters that train, including the vocabulary's padding rows."""
    added = count_additions(config)
    if not added.freezes:
        return count_padded_parameters(config)
    return config.n_layer * added.block_parameters + added.parameters


def describe_parameters(config: ModelConfig) -> str:
    """Describe the number of parameters, and how many of them train if others are frozen."""
    is_frozen = count_additions(config).freezes
    trained = f", {count_trained_parameters(config):,} trained" if is_frozen else ""
    return f"{count_parameters(config):,} parameters{trained}"


def count_block_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of one block."""
    added = count_additions(config).block_parameters
    if _has_own_parts(config):
        return sum(_measure(config)[:2]) + added
    d = config.d_model
    f = config.d_ff
    widths = {"qkv": sum(config.qkv_rows), "out": d, "mlp": (1 + config.is_gated) * f + d}
    biases = sum(width for part, width in widths.items() if config.has_bias(part))
    norms = (4 if config.norm_position == "both" else 2) * _count_norm_parameters(config, d)
    if config.qk_norm:
        q, k, _ = config.qkv_rows
        width = 2 * config.d_head if config.qk_norm_over == "head" else q + k
        norms += _count_norm_parameters(config, width)
    return _block_matrices(config) + biases + norms + added


def count_value_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Return the number of trainable parameters in all value embeddings and their gates."""
    per_head = vocab_size * config.d_head + config.d_model
    return len(config.value_embedding_layers) * config.kv_heads * per_head


def _count_embeddings(config: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters in all tables with a row per token id.

    They are the token embedding, the output layer if untied, and value embeddings with their gates.
    """
    tables = (1 if config.tie_embeddings else 2) * vocab_size * config.d_model
    return tables + count_value_parameters(config, vocab_size)


def _has_own_parts(config: ModelConfig) -> bool:
    names = (getattr(config, kind) in list_own(kind) for kind in ("norm", "mlp", "block"))
    return any(names)


@cache
def _measure(config: ModelConfig, norm_width: int = 0) -> tuple[int, int, int, int]:
    """Return `measure_parts` of model/gpt.py, which needs torch."""
    sizes: tuple[int, int, int, int] = load_entry("measure", "parts")(config, norm_width)
    return sizes


def count_mlp_outputs(config: ModelConfig) -> int:
    """Return the numbers per token that the MLP's matrices put out, except the last one."""
    if not _has_own_parts(config):
        return (1 + config.is_gated) * config.d_ff
    return _measure(config)[2] - config.d_model


def _count_norm_parameters(config: ModelConfig, width: int) -> int:
    if config.norm in list_own("norm"):
        return _measure(config, width)[3]
    return 2 * width if config.has_bias("norm") and config.norm != "rmsnorm" else width


def count_matmul_parameters(config: ModelConfig) -> int:
    """Return N, the number of weights used in matmuls, with the output layer counted once."""
    gates = count_value_parameters(config, vocab_size=0)
    return config.n_layer * _block_matrices(config) + gates + config.vocab_size * config.d_model


def _block_matrices(config: ModelConfig) -> int:
    if _has_own_parts(config):
        return _measure(config)[0]
    d = config.d_model
    attention = sum(config.qkv_rows) + config.attention_width
    return d * attention + (2 + config.is_gated) * d * config.d_ff


def flops_per_token(config: ModelConfig, *, causal: bool) -> int:
    """Return the FLOPs per token of forward and backward at full context.

    Frozen weights have no gradient, so each takes 4 FLOPs instead of 6.

    causal: whether to count only the unmasked half of attention.
    """
    T = config.seq_len
    keys = [min(window or T, T) for window in config.windows]
    if causal:
        attention = sum(6 * config.attention_width * w * (2 * T - w) // T for w in keys)
    else:
        attention = sum(12 * config.attention_width * w for w in keys)
    added = count_additions(config)
    own = (4 if added.freezes else 6) * count_matmul_parameters(config)
    return own + 6 * config.n_layer * added.block_parameters + attention


def describe_mfu(rate: float, config: ModelConfig, peak_flops: float) -> dict[str, float | None]:
    """Return {"mfu": ..., "mfu_causal": ...} at `rate` tokens/s; None if the peak is 0.

    mfu counts the FLOPs of full attention, mfu_causal only the causal half.
    """
    share = rate / peak_flops if peak_flops else None
    return {
        name: share and share * flops_per_token(config, causal=causal)
        for name, causal in (("mfu", False), ("mfu_causal", True))
    }


def expected_initial_loss(config: ModelConfig) -> float:
    """Return ln V, the loss in nats of a uniform prediction; a new model starts close to it."""
    return math.log(config.vocab_size)


def count_padded_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, including the vocabulary's padding rows."""
    unpadded = _count_embeddings(config, config.vocab_size)
    padded = _count_embeddings(config, config.padded_vocab_size)
    return count_parameters(config) + padded - unpadded
