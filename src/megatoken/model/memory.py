"""Estimate the activation memory of a micro-batch from the config, without torch.

The estimate is for an uncompiled model; a compiled one saves less for the backward.
"""

from dataclasses import dataclass

from megatoken.config.model_config import ModelConfig
from megatoken.model.flops import (
    count_block_parameters,
    count_padded_parameters,
    count_trained_parameters,
)

FP32 = 4  # bytes
# Default rows of logits per chunk: small enough for a CPU's caches, large enough to fill a GPU.
LOSS_CHUNK = {"cpu": 1024, "mps": 4096, "cuda": 4096}


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Memory of a micro-batch in bytes, when its loss is computed and at the end of its backward.

    blocks: activations saved for the backward.
    low_precision: copies of the weights in the dtype of matmuls.
    loss: logits and their gradients, or the backward of the last block if that takes more.
    end: the embedding's new gradient, before it is added to the accumulated one; with masters, all
        new gradients.
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
    sharded: bool,
    masters: bool,
) -> ActivationBytes:
    """Estimate the activation memory of a micro-batch of `tokens` in bytes.

    loss_chunk: how many rows of logits are held at once; 0 for all.
    sharded: whether weights are sharded. They are then gathered in low precision, and the residual
        stream is in low precision. Otherwise autocast casts the weights, and the stream is fp32.
    masters: whether weights are held in low precision on CUDA. The stream then is as well, our
        kernel computes the loss in place, and torch's fused RMSNorm saves only its input.
    """
    d = config.d_model
    head = 0 if config.lora_rank else config.padded_vocab_size * d  # with a gradient
    item = FP32 if precision == "fp32" else 2  # bytes of a number in matmuls
    residual = item if sharded or masters else FP32
    block = _block_bytes_per_token(
        config, item, residual, recompute_gelu=checkpointing == "gelu", fused_norm=masters
    )
    block += config.residual_scales * residual * d
    saved = block
    recomputed = 0
    if checkpointing == "block":
        saved = residual * d
        recomputed = block
    kv = config.kv_heads * config.d_head  # of value embeddings: the table's rows, and the sum
    values = len(config.value_embedding_layers) * kv * (item + residual)
    ends = d * (3 * residual + item + config.embedding_norm * 2 * FP32)  # embedding and last norm
    ends += d * residual * (2 * config.smear + config.backout)
    root = head if config.tie_embeddings else 2 * head
    if config.pos_emb == "learned" and head:
        root += d * config.seq_len
    end = root * (item + 2 * FP32) if sharded else 2 * FP32 * head
    low_precision = 0
    if masters:
        end = item * count_trained_parameters(config)
        low_precision = item * count_padded_parameters(config)
    elif not sharded and item != FP32:
        low_precision = item * config.n_layer * count_block_parameters(config)
    rows = min(loss_chunk or tokens, tokens)
    loss = _loss_bytes(
        config,
        rows,
        precision=precision,
        one_chunk=rows == tokens,
        sharded=sharded,
        masters=masters,
    )
    return ActivationBytes(
        blocks=tokens * (saved * config.n_layer + values + ends),
        low_precision=low_precision,
        loss=max(loss, FP32 * head + tokens * max(4 * residual * d, recomputed)),
        end=end,
    )


def _loss_bytes(
    config: ModelConfig, rows: int, *, precision: str, one_chunk: bool, sharded: bool, masters: bool
) -> int:
    """Return the bytes of the logits, the output layer's gradient and the cast of its weight.

    rows: of logits that are held at once. one_chunk: whether these are all.
    """
    weight = config.padded_vocab_size * config.d_model
    head = 0 if config.lora_rank else weight
    logits = rows * config.padded_vocab_size
    tanh = FP32 * logits if config.logit_softcap and not masters else 0
    if precision == "fp32":
        return FP32 * (logits + head) + tanh
    # fp32 softmax and summed chunk gradients; the weight's gradient in both precisions. In fp16,
    # torch's formula also holds fp32 log-probabilities and a copy of the logits.
    per_logit = 2 * (2 + FP32) if precision == "fp16" else 2 + FP32 * (not masters)
    softmax = logits * per_logit + tanh + (not one_chunk) * head * FP32
    # With sharded weights and one chunk, the matmul's result is the gradient.
    gradient = 2 if sharded and one_chunk else FP32 + 2
    cast = 0 if sharded or masters else 2 * weight
    return max(softmax, 2 * logits + head * gradient) + cast


def _block_bytes_per_token(
    config: ModelConfig, item: int, residual: int, *, recompute_gelu: bool, fused_norm: bool
) -> int:
    """Return the bytes per token that one block saves for the backward.

    item: bytes of a number in matmuls. residual: bytes of a number in the residual stream.
    """
    d = config.d_model
    q, kv, _ = config.qkv_rows
    n_norms = 4 if config.norm_position == "both" else 2
    is_rms = config.norm == "rmsnorm" and not fused_norm
    size = n_norms * residual * d  # inputs of the norms
    size += n_norms * (item * d + 8)  # their outputs, which matmuls read; mean and scale
    if is_rms:
        size += n_norms * FP32 * d  # normalized, before the weight
    size += item * (q + 2 * kv)  # queries, keys, values
    if config.pos_emb == "rotary":
        size += item * (q + kv)  # rotated queries and keys
    if config.qk_norm:  # normalized in fp32, and with the weight
        normalized = FP32 if item == FP32 else 2 * FP32
        size += (q + kv) * (item + normalized * is_rms)
    size += item * q + FP32 * config.n_head  # attention's output; a sum of exponents per head
    inputs = 1 + config.is_gated
    size += item * config.lora_rank * (5 + inputs)  # outputs of the adapters' A
    return size + item * config.d_ff * (inputs if recompute_gelu else 2 * inputs)
