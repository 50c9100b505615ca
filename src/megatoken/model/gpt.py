"""GPT-2, LLaMA and what came after: pre-norm transformers that differ in a few switches of `ModelConfig`.

| | GPT-2 | LLaMA |
|---|---|---|
| norm, mlp | LayerNorm, tanh GELU | RMSNorm, SwiGLU |
| pos_emb | learned | rotary, applied to queries and keys (model/rope.py) |
| n_kv_head | n_head | fewer: each shared by a group of query heads |
| bias, tie_embeddings | biases, the token embedding as output layer | no biases, large models with an output layer |

Sources: Radford et al. 2019; Touvron et al. 2023, Dubey et al. 2024.

More switches, off in both:

| switch | what it does | source |
|---|---|---|
| qk_norm | normalizes queries and keys of each head, which bounds attention's logits | Henry et al. 2020; Qwen3 |
| mlp=relu2 | squares ReLU | So et al. 2021 (Primer) |
| zero_init | projections into the stream and an output layer of its own start at 0 | Yang et al. 2022 (muP) |
| embedding_norm | normalizes the embedding | Scao et al. 2022 (BLOOM) |
| residual_scales | a block's input is a x + b embedding, a and b for each layer | Jordan et al. 2024 (modded-nanogpt) |
| value_embeddings | every other layer adds a gated embedding of the token to its values | the same; Zhou et al. 2024 |
| window | in some layers a query sees that many tokens | Beltagy et al. 2020; Jiang et al. 2023 (Mistral) |
| logit_softcap | bounds logits by a tanh (model/loss.py) | Riviere et al. 2024 (Gemma 2) |

Shapes: B batch, T time, C d_model, H heads, K heads of keys and values, D head width, F d_ff, V padded vocabulary,
S keys (cached and new).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatoken.config.model_config import ModelConfig
from megatoken.errors import ConfigError
from megatoken.model.dropout import Dropout, fold_in
from megatoken.model.kernels import ATTENTION, BLOCK, WITHOUT_WINDOW, masked_attention
from megatoken.model.kv_cache import KeyValueCache
from megatoken.model.loss import cap_logits, cross_entropy
from megatoken.model.rope import CosSin, apply_rotary, rotary_cos_sin

INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class TreeMask:
    """For rows that are trees of tokens: every token's position, and which tokens it attends to."""

    positions_BT: Tensor
    attn_mask_BTT: Tensor  # [b, t, s]: t attends to s


def separate_conversations(starts_BT: Tensor) -> TreeMask:
    """For rows of several sequences: positions restart at each, and none sees another.

    starts_BT: the place in the row at which each token's own sequence begins.
    """
    places = torch.arange(starts_BT.shape[1], device=starts_BT.device)
    is_same_BTT = starts_BT[:, :, None] == starts_BT[:, None, :]
    return TreeMask(places - starts_BT, is_same_BTT & (places[:, None] >= places))


class Linear(nn.Linear):
    """x W^T + b."""

    kernels = BLOCK["torch"]

    def reset_parameters(self) -> None:
        """Leave memory as it is: `init_weights` has the model's rule, and torch's would draw from the global RNG."""

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """Rows of a table by id."""

    def reset_parameters(self) -> None:
        """As in `Linear`."""


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016), with a bias where the model has biases, or RMSNorm (Zhang and Sennrich 2019).

    width: of the last dimension; 0: d_model.
    """

    kernels = BLOCK["torch"]

    def __init__(self, config: ModelConfig, width: int = 0) -> None:
        super().__init__()
        width = width or config.d_model
        self.rms, self.eps = config.norm == "rmsnorm", config.norm_eps
        self.weight = nn.Parameter(torch.ones(width))
        biased = config.bias and config.norm == "layernorm"
        self.bias = nn.Parameter(torch.zeros(width)) if biased else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.kernels.norm(x_BTC, self.weight, self.bias, self.eps, rms=self.rms)


class Attention(nn.Module):
    """Causal self-attention with one packed projection for queries, keys and values."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_fn = ATTENTION["flash"]
        self.masked_attention_fn = masked_attention("flash")  # with a cache or a mask
        self.heads = [
            config.n_head,
            config.kv_heads,
            config.kv_heads,
        ]  # of queries, keys and values
        self.d_head, self.layer = config.d_head, layer
        self.window = {"window": config.windows[layer]} if config.windows[layer] else {}
        self.drop = Dropout(config.dropout, site=1)
        self.qkv = Linear(config.d_model, sum(self.heads) * config.d_head, bias=config.bias)
        self.out = Linear(config.d_model, config.d_model, bias=config.bias)
        self.q_norm = Norm(config, config.d_head) if config.qk_norm else None
        self.k_norm = Norm(config, config.d_head) if config.qk_norm else None
        has_values, kv_heads = layer in config.value_embedding_layers, config.kv_heads
        self.value_tokens = (
            Embedding(config.padded_vocab_size, kv_heads * config.d_head) if has_values else None
        )
        self.value_gate = Linear(config.d_model, kv_heads, bias=False) if has_values else None

    def forward(
        self,
        x_BTC: Tensor,
        ids_BT: Tensor,
        cache: KeyValueCache | None,
        cos_sin: CosSin | None,
        mask: Tensor | None,
        dropout_keys_B: Tensor | None,
    ) -> Tensor:
        B, T, _ = x_BTC.shape
        q, k, v = self.qkv(x_BTC).view(B, T, -1, self.d_head).split_with_sizes(self.heads, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)
        if (
            self.value_tokens is not None and self.value_gate is not None
        ):  # the gates start at 2 sigmoid(0) = 1
            v = v + (
                2
                * self.value_gate(x_BTC).sigmoid()[..., None]
                * self.value_tokens(ids_BT).view_as(v)
            ).type_as(v)
        if cos_sin is not None:
            q, k = apply_rotary(q, cos_sin), apply_rotary(k, cos_sin)
        q, k, v = (x_BTHD.transpose(1, 2) for x_BTHD in (q, k, v))
        dropout = None if dropout_keys_B is None else partial(self.drop, dropout_keys_B)
        if cache is None and mask is None:
            y_BHTD = self.attention_fn(
                q, k, v, mask=None, causal=True, dropout=dropout, **self.window
            )
        else:
            if cache is not None:
                k, v = cache.append(self.layer, k, v)
            causal = mask is None and k.shape[2] == T
            y_BHTD = self.masked_attention_fn(q, k, v, mask=mask, causal=causal, dropout=dropout)
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """GELU (Hendrycks and Gimpel 2016) between two projections, or gated SwiGLU (Shazeer 2020).

    GELU is GPT-2's tanh approximation or, by `gelu-erf`, exact; `relu2` is the square of ReLU (So et al. 2021).
    """

    kernels = BLOCK["torch"]
    recompute_activation = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gelu_approximate = "none" if config.mlp == "gelu-erf" else "tanh"
        self.is_relu2 = config.mlp == "relu2"
        self.gate = (
            Linear(config.d_model, config.d_ff, bias=config.bias)
            if config.mlp == "swiglu"
            else None
        )
        self.up = Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down = Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate_BTF = None if self.gate is None else self.gate(x_BTC)
        if (
            self.recompute_activation
        ):  # not the projection after it: recomputing ends with what the backward reads
            return checkpoint(self._project_down, self.up(x_BTC), gate_BTF, use_reentrant=False)  # type: ignore[no-any-return]
        return self._project_down(self.up(x_BTC), gate_BTF)

    def _project_down(self, up_BTF: Tensor, gate_BTF: Tensor | None) -> Tensor:
        if self.is_relu2:
            relu_BTF = F.relu(up_BTF)
            return self.down(relu_BTF * relu_BTF)  # type: ignore[no-any-return] # autocast would square in fp32
        if gate_BTF is None:
            return self.down(self.kernels.gelu(up_BTF, approximate=self.gelu_approximate))  # type: ignore[no-any-return]
        return self.down(self.kernels.swiglu(gate_BTF, up_BTF))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer block: attention, then the MLP, each on the normalized residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm1 = Norm(config)
        self.attention = Attention(config, layer)
        self.norm2 = Norm(config)
        self.mlp = MLP(config)
        self.drop1, self.drop2 = Dropout(config.dropout, site=2), Dropout(config.dropout, site=3)

    def forward(
        self,
        x_BTC: Tensor,
        ids_BT: Tensor,
        cache: KeyValueCache | None,
        cos_sin: CosSin | None,
        mask: Tensor | None,
        dropout_keys_B: Tensor | None = None,
    ) -> Tensor:
        y_BTC = self.attention(self.norm1(x_BTC), ids_BT, cache, cos_sin, mask, dropout_keys_B)
        x_BTC = x_BTC + self.drop1(dropout_keys_B, y_BTC)
        return x_BTC + self.drop2(dropout_keys_B, self.mlp(self.norm2(x_BTC)))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """`model(ids)` gives hidden states, `model.logits(ids)` logits, `model.loss(inputs, targets)` the mean loss.

    vocab_size: the tokenizer's, used where the config leaves it open (ConfigError if neither has it). seed: of the
    initial weights, the same on every device; None, or parameters on the meta device: memory is left uninitialized
    for a caller who loads weights.
    """

    recompute_blocks = False
    attention_name = "flash"

    def __init__(
        self, config: ModelConfig, vocab_size: int | None = None, seed: int | None = 0
    ) -> None:
        super().__init__()
        self.config = config = config.resolve(vocab_size or 0)
        if not config.vocab_size:
            fix = "set it, or pass the tokenizer's vocab_size to GPT"
            raise ConfigError("the vocabulary size is unknown", "model.vocab_size", fix)
        self.tokens = Embedding(config.padded_vocab_size, config.d_model)
        self.positions = (
            Embedding(config.seq_len, config.d_model) if config.pos_emb == "learned" else None
        )
        self.embedding_norm = Norm(config) if config.embedding_norm else None
        self.drop = Dropout(config.dropout, site=0)
        self.residual_scales = (
            nn.Parameter(torch.ones(config.n_layer)) if config.residual_scales else None
        )
        self.embedding_scales = (
            nn.Parameter(torch.zeros(config.n_layer)) if config.residual_scales else None
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = Norm(config)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.d_model, config.padded_vocab_size, bias=False)
        )
        self.value_head = Linear(config.d_model, 1) if config.value_head else None
        if seed is not None and not self.tokens.weight.is_meta:
            for name, values in init_weights(self, seed):
                self.get_parameter(name).data.copy_(values)

    def forward(
        self,
        ids_BT: Tensor,
        cache: KeyValueCache | None = None,
        tree_mask: TreeMask | None = None,
        dropout_keys_B: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, T, C) of `ids_BT` (int64), which follow the tokens in `cache` and are added to it.

        tree_mask: for rows that are not one sequence each; without a cache.
        dropout_keys_B: of `model.dropout.sequence_keys`, with dropout in training; None: from torch's random state.
        """
        if not (self.training and self.config.dropout):
            dropout_keys_B = None
        elif dropout_keys_B is None:
            dropout_keys_B = torch.randint(2**32, ids_BT.shape[:1], device=ids_BT.device)
        past, T = 0 if cache is None else cache.length, ids_BT.shape[1]
        positions = torch.arange(T, device=ids_BT.device) if cache is None else cache.place(T)
        mask = None
        if tree_mask is not None:
            positions, mask = tree_mask.positions_BT, tree_mask.attn_mask_BTT[:, None]
        elif positions.dim() == 2:  # rows of different lengths, a token each
            mask = (torch.arange(past + 1, device=ids_BT.device) <= positions)[:, None, None]
        elif past and T > 1:  # the lower right corner of the causal square
            mask = torch.ones(1, 1, T, past + T, dtype=torch.bool, device=ids_BT.device).tril(past)
        window_mask = None
        if self.config.window and not (cache is None and mask is None):
            keys = positions if cache is None else torch.arange(past + T, device=ids_BT.device)
            window_mask = self._window_mask(positions, keys, mask)
        cos_sin = rotary_cos_sin(self.config, positions)
        x_BTC = self.tokens(ids_BT)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(positions)
        if self.embedding_norm is not None:
            x_BTC = self.embedding_norm(x_BTC)
        x_BTC = embedding_BTC = self.drop(dropout_keys_B, x_BTC)
        for layer, (block, window) in enumerate(zip(self.blocks, self.config.windows, strict=True)):
            block_mask = window_mask if window else mask
            if self.residual_scales is not None and self.embedding_scales is not None:
                x_BTC = (
                    self.residual_scales[layer] * x_BTC
                    + self.embedding_scales[layer] * embedding_BTC
                )
            # A block gets keys of its own instead of its number, so that a compiled block serves all layers.
            keys_B = None if dropout_keys_B is None else fold_in(dropout_keys_B, 1 + layer)
            if self.recompute_blocks and cache is None and torch.is_grad_enabled():
                x_BTC = checkpoint(
                    block, x_BTC, ids_BT, None, cos_sin, block_mask, keys_B, use_reentrant=False
                )
            else:
                x_BTC = block(x_BTC, ids_BT, cache, cos_sin, block_mask, keys_B)
        if cache is not None:
            cache.advance(T)
        return self.norm(x_BTC)  # type: ignore[no-any-return]

    def _window_mask(self, positions: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` within the window, (B or 1, 1, T, S), for queries at (T,) or (B, T), keys at (S,) or (B, S)."""
        queries_BT, keys_BS = (x if x.dim() == 2 else x[None] for x in (positions, keys))
        distance = (queries_BT[:, :, None] - keys_BS[:, None, :])[:, None]
        return (distance < self.config.window) & (distance >= 0 if mask is None else mask)

    @property
    def lm_head_weight(self) -> Tensor:
        """The output layer's weight (V, C): the token embedding's, or a matrix of its own."""
        return self.tokens.weight if self.head is None else self.head.weight

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (..., real vocabulary) of hidden states (..., C); padding ids have none."""
        logits = self.norm.kernels.linear(hidden, self.lm_head_weight, None)[
            ..., : self.config.vocab_size
        ]
        return cap_logits(logits, self.config.logit_softcap)

    def values(self, hidden: Tensor) -> Tensor:
        """A number (...), fp32, for every hidden state (..., C) of a model with a value head."""
        assert self.value_head is not None
        return (hidden.float() * self.value_head.weight[0].float()).sum(
            -1
        ) + self.value_head.bias.float()

    def logits(self, ids_BT: Tensor) -> Tensor:
        """Logits (B, T, real vocabulary) of the token after each of `ids_BT`."""
        return self.lm_head(self(ids_BT))

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats of the targets that are not negative."""
        hidden_BTC = self(inputs_BT)
        config, weight = self.config, self.lm_head_weight
        total, count = cross_entropy(
            hidden_BTC,
            weight,
            targets_BT,
            vocab_size=config.vocab_size,
            softcap=config.logit_softcap,
        )
        return total / count


def set_attention(model: GPT, name: str) -> None:
    """Select the implementation of attention. Raises ConfigError for a name that is not registered."""
    if name not in ATTENTION:
        raise ConfigError(
            f"no attention {name!r}", "machine.attention", f"choose one of {', '.join(ATTENTION)}"
        )
    if model.config.window and name in WITHOUT_WINDOW:
        raise ConfigError(
            f"attention {name!r} has no windows", "machine.attention", "use auto, or model.window=0"
        )
    model.attention_name = name
    for part in model.modules():
        if isinstance(part, Attention):
            part.attention_fn, part.masked_attention_fn = ATTENTION[name], masked_attention(name)


def set_block_kernels(model: nn.Module, name: str) -> None:
    """Select the implementations of products, norms and activations by a name in BLOCK."""
    for part in model.modules():
        if isinstance(part, (Linear, Norm, MLP)):
            part.kernels = BLOCK[name]


def copy_kernels(model: GPT, source: GPT) -> None:
    """Compute with the implementations with which another model does."""
    set_attention(model, source.attention_name)
    set_block_kernels(
        model, next(name for name, kernels in BLOCK.items() if kernels is source.norm.kernels)
    )


def set_activation_checkpointing(model: GPT, mode: str) -> None:
    """Recompute in the backward instead of keeping: `none`, `gelu` (the MLP's activation) or `block`."""
    model.recompute_blocks = mode == "block"
    for part in model.modules():
        if isinstance(part, MLP):
            part.recompute_activation = mode == "gelu"


def get_activation_checkpointing(model: GPT) -> str:
    """The mode that `set_activation_checkpointing` was given."""
    if model.recompute_blocks:
        return "block"
    return (
        "gelu"
        if any(isinstance(part, MLP) and part.recompute_activation for part in model.modules())
        else "none"
    )


def init_weights(model: GPT, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, initial values) of every parameter, whole and on the CPU; reads only the model's names and shapes.

    Normal(0, 0.02) for matrices and embeddings, divided by sqrt(2 n_layer) for the two projections that write
    into the residual stream; biases 0, norms 1, padding rows of the vocabulary 0: GPT-2's rule. LLaMA's papers publish
    none; the same rule for both lets a comparison of the two compare nothing else. Gates of value embeddings, the value
    head and what `zero_init` names are 0; scales make each block's input the residual stream alone.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * model.config.n_layer)
    into_stream, tables = (
        ("attention.out.weight", "mlp.down.weight"),
        ("tokens.weight", "head.weight"),
    )
    zero = ["value_gate.weight", "value_head.weight"]
    zero += [*into_stream, "head.weight"] if model.config.zero_init else []
    for name, parameter in model.named_parameters():
        values = torch.zeros(parameter.shape, device="cpu")
        if parameter.dim() < 2:
            is_one = ("norm" in name and name.endswith("weight")) or name == "residual_scales"
            values.fill_(1.0 if is_one else 0.0)
        elif not name.endswith(tuple(zero)):
            std = residual_std if name.endswith(into_stream) else INIT_STD
            values.normal_(0.0, std, generator=generator)
        if name.endswith(tables):
            values[model.config.vocab_size :] = 0.0
        yield name, values
