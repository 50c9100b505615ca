"""Estimate the activation memory of a micro-batch from the config, without torch.

The estimate is for an uncompiled model; a compiled one saves less for the backward.
"""

from dataclasses import dataclass

from megatoken.base.config.model_config import ModelConfig
from megatoken.model.extensions import count_additions
from megatoken.model.flops import (
    count_block_parameters,
    count_mlp_outputs,
    count_padded_parameters,
    count_trained_parameters,
)

FP32 = 4  # bytes
# Default rows of logits per chunk: small enough for a CPU's caches, large enough to fill a GPU.
LOSS_CHUNK = {"cpu": 1024, "mps": 4096, "cuda": 4096}
FUSED_LOSS_CHUNK = 16384  # if our kernel computes the loss in place, with weights held in bf16


def resolve_loss_chunk(loss_chunk: int | str, device_type: str, *, is_fused: bool) -> int:
    """Return how many rows of logits to hold at once.

    is_fused: whether an unsharded model is held in low precision, and our kernel computes the loss.
    """
    if isinstance(loss_chunk, int):
        return loss_chunk
    return FUSED_LOSS_CHUNK if device_type == "cuda" and is_fused else LOSS_CHUNK[device_type]


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Memory of a micro-batch in bytes, when its loss is computed and at the end of its backward.

    blocks: activations saved for the backward.
    low_precision: copies of the weights in the dtype of matmuls.
    loss: logits and their gradients, or the backward of the last block if that takes more.
    end: gradients before they are added to the accumulated ones: that of the embedding. With
        master weights, all new gradients.
    """

    blocks: int
    low_precision: int
    loss: int
    end: int


def count_activation_bytes(
    config: ModelConfig,
    tokens: int,
    *,
    precision: str,
    checkpointing: str,
    loss_chunk: int,
    sharded_blocks: int,
    uses_master_weights: bool,
    tp_size: int,
) -> ActivationBytes:
    """Estimate the activation memory of a micro-batch of `tokens` in bytes.

    loss_chunk: how many rows of logits are held at once; 0 for all.
    sharded_blocks: of how many blocks full weights or gradients exist only in the backward; 0 if
        weights are not sharded. Otherwise they are gathered in low precision, and the residual
        stream is in low precision. With 0, autocast casts the weights, and the stream is fp32.
    uses_master_weights: whether weights are held in low precision on CUDA. The stream then is as
        well, and our kernel computes the loss in place.
    tp_size: tensor-parallel ranks, which gather the inputs of matmuls from each other's `tokens`.
    """
    d = config.d_model
    has_gradient = not count_additions(config).freezes
    head = has_gradient * config.padded_vocab_size * d
    item = FP32 if precision == "fp32" else 2  # bytes of a number in matmuls
    is_low = uses_master_weights or sharded_blocks > 0  # weights in the dtype of matmuls
    residual = item if is_low else FP32
    block = _block_bytes_per_token(config, item, residual, checkpointing == "gelu")
    block += config.residual_scales * residual * d
    gathered = (tp_size - 1) * item * d
    block += (2 + config.is_gated) * gathered
    saved, recomputed = block, 0
    if checkpointing == "block":
        saved = residual * d
        recomputed = block + item * config.d_ff * config.is_gated  # with a gradient of the MLP's
    root = head if config.tie_embeddings else 2 * head
    root += d * config.seq_len * (config.pos_emb == "learned" and head > 0)
    copies = 2 + config.tie_embeddings  # of the embedding's gradient: its uses, and their sum
    end = root * (item + 2 * FP32) if sharded_blocks else copies * FP32 * head
    low_precision = 0
    if uses_master_weights:
        end = item * (count_trained_parameters(config) + (copies - 1) * head)
        low_precision = item * count_padded_parameters(config)
    elif not sharded_blocks and item != FP32:
        low_precision = item * config.n_layer * count_block_parameters(config)
    rows = min(loss_chunk or tokens, tokens)
    loss = _loss_bytes(config, rows, precision, rows == tokens, is_low, uses_master_weights)
    head_gradient = (item if uses_master_weights else FP32) * head
    backward = tokens * (max(4 * residual * d, recomputed) + 3 * gathered)
    backward += sharded_blocks * item * count_block_parameters(config) // tp_size
    loss = max(loss, head_gradient + backward)
    if tp_size > 1:  # every rank computes the logits of its tokens with the full output layer
        loss += residual * config.padded_vocab_size * d
    return ActivationBytes(
        blocks=tokens * (saved * config.n_layer + _bytes_outside_blocks(config, item, residual)),
        low_precision=low_precision // tp_size,
        loss=loss,
        end=end // tp_size,
    )


def _loss_bytes(
    config: ModelConfig,
    rows: int,
    precision: str,
    one_chunk: bool,
    is_low: bool,
    uses_master_weights: bool,
) -> int:
    """Return the bytes of the logits, the output layer's gradient and the cast of its weight.

    rows: of logits that are held at once. one_chunk: whether these are all. is_low: whether the
        weight is in the dtype of matmuls.
    """
    weight = config.padded_vocab_size * config.d_model
    head = 0 if count_additions(config).freezes else weight
    logits = rows * config.padded_vocab_size
    tanh = FP32 * logits if config.logit_softcap and not uses_master_weights else 0
    if precision == "fp32":
        return FP32 * (logits + head) + tanh
    # fp32 softmax and summed chunk gradients; the weight's gradient in both precisions. In fp16,
    # torch's formula also holds fp32 log-probabilities and a copy of the logits.
    per_logit = 2 * (2 + FP32) if precision == "fp16" else 2 + FP32 * (not uses_master_weights)
    softmax = logits * per_logit + tanh + (not one_chunk) * head * FP32
    gradient = 2 if is_low and one_chunk else FP32 + 2  # the matmul's result itself, or a sum
    cast = 0 if is_low else 2 * weight
    return max(softmax, 2 * logits + head * gradient) + cast


def _bytes_outside_blocks(config: ModelConfig, item: int, residual: int) -> int:
    """Return the bytes per token that the embeddings and the last norm save for the backward."""
    kv = config.kv_heads * config.d_head  # of value embeddings: the table's rows, and the sum
    values = len(config.value_embedding_layers) * kv * (item + residual)
    norms = item + config.embedding_norm * 2 * FP32
    return values + config.d_model * (residual * (3 + 2 * config.smear + config.backout) + norms)


def _block_bytes_per_token(
    config: ModelConfig, item: int, residual: int, recompute_gelu: bool
) -> int:
    """Return the bytes per token that one block saves for the backward.

    item: bytes of a number in matmuls. residual: bytes of a number in the residual stream.
    """
    d = config.d_model
    q, kv, _ = config.qkv_rows
    n_norms = 4 if config.norm_position == "both" else 2
    size = n_norms * residual * d  # inputs of the norms
    size += n_norms * (item * d + 8)  # their outputs, which matmuls read; mean and scale
    size += item * (q + 2 * kv)  # queries, keys, values
    # Rotated, and normalized, queries and keys.
    size += item * (q + kv) * ((config.pos_emb == "rotary") + config.qk_norm)
    size += item * q + FP32 * config.n_head  # attention's output; a sum of exponents per head
    size += item * count_additions(config).block_outputs
    return size + item * count_mlp_outputs(config) * (1 if recompute_gelu else 2)
