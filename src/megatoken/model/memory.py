"""Activation memory of a micro-batch, by arithmetic, without torch.

For the uncompiled step; torch.compile saves less for the backward.
"""

from dataclasses import dataclass

from megatoken.config.model_config import ModelConfig
from megatoken.model.flops import count_block_parameters

FP32 = 4  # bytes
# Default rows of logits per chunk: small enough for a CPU's caches, large enough to fill a GPU.
LOSS_CHUNK = {"cpu": 512, "mps": 4096, "cuda": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes of a micro-batch while its loss is computed, and at the end of its backward.

    blocks: activations saved for the backward.
    low_precision: copies of weights in the precision of matrix products.
    loss: logits and their gradients, or the last block's backward if that is larger.
    end: the new gradient of the embedding, in addition to the accumulated one.
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
) -> ActivationBytes:
    """Return the bytes of a micro-batch of `tokens`.

    sharded: weights are gathered in low precision, and so is the residual stream; otherwise autocast
    casts the weights and the stream is fp32. loss_chunk: rows of logits at once, 0 for all.
    """
    d, head, item = (
        config.d_model,
        config.padded_vocab_size * config.d_model,
        FP32 if precision == "fp32" else 2,
    )
    residual = item if sharded else FP32
    kept_mode = "none" if checkpointing == "block" else checkpointing
    block = (
        _block_bytes_per_token(config, item, residual, kept_mode)
        + config.residual_scales * residual * d
    )
    kv = config.kv_heads * config.d_head  # of value embeddings: what the table gives, and the sum
    values = len(config.value_embedding_layers) * kv * (item + (item if sharded else FP32))
    kept, again = (residual * d, block) if checkpointing == "block" else (block, 0)
    rows = min(loss_chunk or tokens, tokens)
    logits = rows * config.padded_vocab_size
    tanh = FP32 * logits if config.logit_softcap else 0
    if item == FP32:
        loss = FP32 * (logits + head) + tanh
    else:  # fp32 softmax and summed chunk gradients; the weight gradient in both precisions
        softmax = logits * (item + FP32) + tanh + (rows < tokens) * head * FP32
        # of one chunk of sharded weights the product is the gradient
        gradient = item if sharded and rows == tokens else FP32 + item
        loss = max(softmax, item * logits + head * gradient) + (not sharded) * item * head
    root = head * (1 if config.tie_embeddings else 2) + d * (
        config.seq_len if config.pos_emb == "learned" else 0
    )
    return ActivationBytes(
        blocks=tokens
        * (
            kept * config.n_layer
            + values
            + d * (3 * residual + item + config.embedding_norm * 2 * FP32)
        ),
        low_precision=0
        if sharded or item == FP32
        else item * config.n_layer * count_block_parameters(config),
        loss=max(loss, FP32 * head + tokens * max(4 * residual * d, again)),
        end=root * (item + 2 * FP32) if sharded else 2 * FP32 * head,
    )


def _block_bytes_per_token(
    config: ModelConfig, item: int, residual: int, checkpointing: str
) -> int:
    d, kv = config.d_model, config.d_head * config.kv_heads
    kept = 2 * residual * d  # the input of each norm
    kept += 2 * item * d + 16  # its output, which products read; mean and scale
    kept += 2 * FP32 * d if config.norm == "rmsnorm" else 0  # normalized, before the weight
    kept += item * (d + 2 * kv)  # queries, keys, values
    kept += item * (d + kv) if config.pos_emb == "rotary" else 0  # queries and keys, rotated
    if config.qk_norm:  # normalized in fp32, and with the weight
        kept += (d + kv) * (
            item + (FP32 if item == FP32 else 2 * FP32) * (config.norm == "rmsnorm")
        )
    kept += item * d + FP32 * config.n_head  # attention's output; a sum of exponents a head
    inputs = 2 if config.mlp == "swiglu" else 1
    return kept + item * config.d_ff * (inputs if checkpointing == "gelu" else 2 * inputs)
