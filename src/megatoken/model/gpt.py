"""The model: a transformer; switches of `ModelConfig` make it GPT-2, LLaMA or newer.

| | GPT-2 | LLaMA |
|---|---|---|
| norm, mlp | LayerNorm, tanh GELU | RMSNorm, SwiGLU |
| pos_emb | learned | rotary, on queries and keys (model/rope.py) |
| n_kv_head | n_head | fewer: a group of query heads shares each |
| bias | yes | no |
| tie_embeddings | yes | only in small models |

Sources: Radford et al. 2019; Touvron et al. 2023; Dubey et al. 2024.

Switches that are off in both:

| switch | effect | source |
|---|---|---|
| qk_norm | normalize queries and keys, which bounds logits | Henry et al. 2020; Qwen3 |
| mlp=relu2 | square of ReLU | So et al. 2021 (Primer) |
| zero_init | projections into the stream start at 0 | Yang et al. 2022 (muP) |
| embedding_norm | normalize the embedding | Scao et al. 2022 (BLOOM) |
| residual_scales | a block's input is a x + b embedding | Jordan et al. 2024 (modded-nanogpt) |
| value_embeddings | add a gated embedding to some values | the same; Zhou et al. 2024 |
| smear | add a gated share of the preceding embedding | modded-nanogpt, nanochat |
| backout | subtract a share of the middle block's output | the same |
| window | a query sees that many tokens in some layers | Beltagy et al. 2020; Mistral |
| logit_softcap | bound logits by a tanh (model/loss.py) | Riviere et al. 2024 (Gemma 2) |
| mlp=geglu | tanh GELU with a gate | Shazeer 2020; Gemma |
| embedding_scale | multiply the embedding by sqrt(d_model) | Vaswani et al. 2017; Gemma |
| norm_position | norms after attention and MLP, or on both sides | Liu et al. 2021; OLMo 2, Gemma 3 |
| qk_norm_over=width | one norm for all heads of a token | Walsh et al. 2025 (OLMo 2) |
| rope_local_theta | another rotary base in layers with a window | Gemma 3 |
| nope_interval | no rotary embedding in some layers | Yang et al. 2025; SmolLM3 |
| bias_in=qkv | biases only of queries, keys and values | Bai et al. 2023 (Qwen) |

Shapes: B batch, T time, C d_model, H query heads, K key/value heads, D head width, F d_ff, V padded
vocabulary, S keys (cached and new).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import ConfigError
from megatoken.base.rooms import load_entry
from megatoken.base.system.torch_compat import is_compiled
from megatoken.model.dropout import Dropout, Module, fold_in
from megatoken.model.extensions import load_extensions
from megatoken.model.kernels.attention import (
    attend_documents,
    find_attention,
    flash_attention,
    masked_attention,
    supports_window,
)
from megatoken.model.kernels.block import KERNELS, BlockKernels
from megatoken.model.loss import cap_logits, cross_entropy
from megatoken.model.masks import Cache, TreeMask, build_masks
from megatoken.model.rope import CosSin, apply_rotary, rotary_cos_sin

INIT_STD = 0.02


class AddedModule(Module):
    """A module that an extension adds to the model (model/extensions.py)."""

    def draw_initial(self, name: str, generator: torch.Generator) -> Tensor:
        """Return the initial values of a parameter, unsharded, on the CPU: zeros by default."""
        return torch.zeros(self.get_parameter(name).shape, device="cpu")


class Linear(nn.Linear):
    """nn.Linear without random initialization."""

    kernels = KERNELS
    __call__: Callable[..., Tensor]

    def reset_parameters(self) -> None:
        """Do nothing: `init_weights` sets all weights, without torch's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding without random initialization."""

    __call__: Callable[..., Tensor]

    def reset_parameters(self) -> None:
        """Do nothing, as in `Linear`."""


class Norm(Module):
    """LayerNorm (Ba et al. 2016), or RMSNorm (Zhang and Sennrich 2019), which has no bias.

    A room adds another norm as an entry of the kind "norm": a subclass with its own `forward`.

    width: size of the normalized last dimension. initial: values of the parameters, by name.
    """

    kernels = KERNELS
    initial: ClassVar[dict[str, float]] = {"weight": 1.0, "bias": 0.0}

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.width = width
        self.rms = config.norm == "rmsnorm"
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(width))
        has_bias = config.has_bias("norm") and not self.rms
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.kernels.norm(x_BTC, self.weight, self.bias, self.eps, rms=self.rms)


def build_norm(config: ModelConfig, width: int = 0) -> Norm:
    """Return the norm that `model.norm` names. width: 0 for d_model."""
    norm: type[Norm] = _load_part("norm", config, Norm)
    return norm(config, width or config.d_model)


def _load_part(kind: str, config: ModelConfig, base: type[Module]) -> Any:
    """Import the class that `model.<kind>` names. Raises ConfigError if it is not a `base`."""
    part = load_entry(kind, getattr(config, kind))
    if not (isinstance(part, type) and issubclass(part, base)):
        raise ConfigError(f"{part} is not a subclass of {base.__name__}", f"model.{kind}")
    return part


class Attention(Module):
    """Causal self-attention, with q, k and v computed by one packed projection.

    softmax(q k^T) v is in kernels/attention.py; `set_attention` chooses its implementation.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_fn = self.masked_attention_fn = flash_attention  # with a cache or a mask
        self.heads = [config.n_head, config.kv_heads, config.kv_heads]  # of q, k and v
        self.d_head = config.d_head
        self.layer = layer
        self.window = {"window": config.windows[layer]} if config.windows[layer] else {}
        self.drop = Dropout(config.dropout, site=1)
        rows = config.qkv_rows
        self.qkv = Linear(config.d_model, sum(rows), bias=config.has_bias("qkv"))
        self.out = Linear(config.attention_width, config.d_model, bias=config.has_bias("out"))
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            is_per_head = config.qk_norm_over == "head"
            self.q_norm = build_norm(config, config.d_head if is_per_head else rows[0])
            self.k_norm = build_norm(config, config.d_head if is_per_head else rows[1])
        self.value_tokens = self.value_gate = None
        if layer in config.value_embedding_layers:
            self.value_tokens = Embedding(config.padded_vocab_size, config.kv_heads * config.d_head)
            self.value_gate = Linear(config.d_model, config.kv_heads, bias=False)

    def forward(
        self,
        x_BTC: Tensor,
        ids_BT: Tensor,
        cache: Cache | None,
        cos_sin: CosSin | None,
        mask: Tensor | None,
        dropout_keys_B: Tensor | None,
    ) -> Tensor:
        B, T, _ = x_BTC.shape
        q, k, v = self.qkv(x_BTC).view(B, T, -1, self.d_head).split_with_sizes(self.heads, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q = _normalize(self.q_norm, q).type_as(v)
            k = _normalize(self.k_norm, k).type_as(v)
        if self.value_tokens is not None and self.value_gate is not None:
            gate_BTK1 = 2 * self.value_gate(x_BTC).sigmoid()[..., None]  # starts at 1
            v = v + (gate_BTK1 * self.value_tokens(ids_BT).view_as(v)).type_as(v)
        if cos_sin is not None:
            q = apply_rotary(q, cos_sin)
            k = apply_rotary(k, cos_sin)
        q, k, v = (x_BTHD.transpose(1, 2) for x_BTHD in (q, k, v))
        dropout = None if dropout_keys_B is None else partial(self.drop, dropout_keys_B)
        if cache is None and mask is None:
            y_BHTD = self.attention_fn(
                q, k, v, mask=None, causal=True, dropout=dropout, **self.window
            )
        elif mask is not None and mask.dim() == 1:
            y_BHTD = attend_documents(
                self.masked_attention_fn, q, k, v, bounds=mask, dropout=dropout, **self.window
            )
        else:
            if cache is not None:
                k, v = cache.append(self.layer, k, v)
            causal = mask is None and k.shape[2] == T
            y_BHTD = self.masked_attention_fn(q, k, v, mask=mask, causal=causal, dropout=dropout)
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, -1))


def _normalize(norm: Norm, x_BTHD: Tensor) -> Tensor:
    """Normalize each head or, with a norm of that width, all heads of a token together."""
    B, T, _, _ = x_BTHD.shape
    return norm(x_BTHD.reshape(B, T, -1, norm.width)).view(x_BTHD.shape)


class MLP(Module):
    """A feed-forward network with GELU, squared ReLU, SwiGLU or GEGLU, chosen by `config.mlp`.

    `gelu` and `geglu` use GPT-2's tanh approximation, and `gelu-erf` is exact. Sources: Hendrycks
    and Gimpel 2016 (GELU), So et al. 2021 (squared ReLU), Shazeer 2020 (SwiGLU, GEGLU).

    An entry of the kind "mlp" is a subclass with its own `forward`, or `__init__` and `forward`.
    """

    kernels = KERNELS
    recompute_activation = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gelu_approximate = "none" if config.mlp == "gelu-erf" else "tanh"
        self.is_relu2 = config.mlp == "relu2"
        self.is_swiglu = config.mlp == "swiglu"
        bias = config.has_bias("mlp")
        self.gate = Linear(config.d_model, config.d_ff, bias=bias) if config.is_gated else None
        self.up = Linear(config.d_model, config.d_ff, bias=bias)
        self.down = Linear(config.d_ff, config.d_model, bias=bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        up, down = self.up, self.down
        gelu_mlp = self.kernels.gelu_mlp if type(up) is type(down) is Linear else None
        if gelu_mlp and torch.is_grad_enabled() and not self.recompute_activation:
            inputs = x_BTC.flatten(0, 1), up.weight, up.bias, down.weight, down.bias
            return gelu_mlp(*inputs).view_as(x_BTC)
        gate_BTF = None if self.gate is None else self.gate(x_BTC)
        up_BTF = self.up(x_BTC)
        if self.recompute_activation:
            # Only what the backward of `down` reads is recomputed, not `down` itself.
            y_BTC: Tensor = checkpoint(self._project_down, up_BTF, gate_BTF, use_reentrant=False)
            return y_BTC
        return self._project_down(up_BTF, gate_BTF)

    def _project_down(self, up_BTF: Tensor, gate_BTF: Tensor | None) -> Tensor:
        if self.is_relu2:
            relu_BTF = F.relu(up_BTF)
            return self.down(relu_BTF * relu_BTF)  # autocast would square in fp32
        if gate_BTF is None:
            return self.down(self.kernels.gelu(up_BTF, approximate=self.gelu_approximate))
        if self.is_swiglu:
            return self.down(self.kernels.swiglu(gate_BTF, up_BTF))
        return self.down(self.kernels.gelu(gate_BTF, approximate=self.gelu_approximate) * up_BTF)


class Block(Module):
    """Attention, then the MLP, each on the normalized residual stream.

    With `norm_position`, their results are normalized instead of or in addition to the stream.

    The stream is passed as two terms, whose sum opens the next block. A compiled block then adds
    them in the kernel of its norm, and does not write a sum that its backward would not read.

    An entry of the kind "block" is a subclass with its own `forward`.
    """

    __call__: Callable[..., tuple[Tensor, Tensor | None]]  # type: ignore[assignment]

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        has_pre, has_post = (config.norm_position in (side, "both") for side in ("pre", "post"))
        self.norm1 = build_norm(config) if has_pre else None
        self.attention = Attention(config, layer)
        self.post_norm1 = build_norm(config) if has_post else None
        self.norm2 = build_norm(config) if has_pre else None
        mlp: type[MLP] = _load_part("mlp", config, MLP)
        self.mlp = mlp(config)
        self.post_norm2 = build_norm(config) if has_post else None
        self.drop1 = Dropout(config.dropout, site=2)
        self.drop2 = Dropout(config.dropout, site=3)

    def forward(
        self,
        x_BTC: Tensor,
        ids_BT: Tensor,
        cache: Cache | None,
        cos_sin: CosSin | None,
        mask: Tensor | None,
        dropout_keys_B: Tensor | None = None,
        term_BTC: Tensor | None = None,
        mix: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the two terms of the stream: before the MLP, and the MLP's result.

        term_BTC: what to add to x. mix: scales of that sum and of the embedding, and the embedding
        (B, T, C), with `residual_scales`.
        """
        x_BTC = add_term(x_BTC, term_BTC)
        if mix is not None:
            scale, embedding_scale, embedding_BTC = mix
            x_BTC = scale * x_BTC + embedding_scale * embedding_BTC
        fuse = self.mlp.kernels.fuse
        fused = fuse(self) if fuse and cache is None else None
        if fused and mask is None:
            return fused(x_BTC, cos_sin), None
        # `fused` computes in the dtype of the weights; with a mask, disable autocast likewise.
        with torch.autocast(x_BTC.device.type, enabled=False) if fused else nullcontext():
            y_BTC = _apply(self.norm1, x_BTC)
            y_BTC = self.attention(y_BTC, ids_BT, cache, cos_sin, mask, dropout_keys_B)
            x_BTC = x_BTC + self.drop1(dropout_keys_B, _apply(self.post_norm1, y_BTC))
            y_BTC = _apply(self.post_norm2, self.mlp(_apply(self.norm2, x_BTC)))
            return x_BTC, self.drop2(dropout_keys_B, y_BTC)


def add_term(x_BTC: Tensor, term_BTC: Tensor | None) -> Tensor:
    """Return the residual stream, given as a block returns it."""
    return x_BTC if term_BTC is None else x_BTC + term_BTC


def _apply(norm: Norm | None, x_BTC: Tensor) -> Tensor:
    return x_BTC if norm is None else norm(x_BTC)


class GPT(Module):
    """A decoder-only transformer. Calling it returns hidden states, not logits.

    `logits` returns logits and `loss` the mean loss.

    vocab_size: used if the config has none. Raises ConfigError if neither sets it.
    seed: determines the initial weights, which are the same on every device. With None, or on the
        meta device, weights are left uninitialized, to be loaded by the caller.
    """

    activation_checkpointing = "none"
    attention_name = "flash"

    def __init__(
        self, config: ModelConfig, vocab_size: int | None = None, seed: int | None = 0
    ) -> None:
        super().__init__()
        config = config.resolve(vocab_size or 0)
        if not config.vocab_size:
            fix = "set it, or pass the tokenizer's vocab_size to GPT"
            raise ConfigError("the vocabulary size is unknown", "model.vocab_size", fix)
        self.config = config
        self.tokens = Embedding(config.padded_vocab_size, config.d_model)
        self.positions = None
        if config.pos_emb == "learned":
            self.positions = Embedding(config.seq_len, config.d_model)
        self.embedding_norm = build_norm(config) if config.embedding_norm else None
        self.drop = Dropout(config.dropout, site=0)
        self.residual_scales = self.embedding_scales = None
        if config.residual_scales:
            self.residual_scales = nn.Parameter(torch.ones(config.n_layer))
            self.embedding_scales = nn.Parameter(torch.zeros(config.n_layer))
        self.smear_gate = self.smear_scale = self.backout_scale = None
        if config.smear:
            self.smear_gate = nn.Parameter(torch.zeros(config.d_model))
            self.smear_scale = nn.Parameter(torch.zeros(1))
        if config.backout:
            self.backout_scale = nn.Parameter(torch.zeros(1))
        block: type[Block] = _load_part("block", config, Block)
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.n_layer))
        self.norm = build_norm(config)
        self.head = None
        if not config.tie_embeddings:
            self.head = Linear(config.d_model, config.padded_vocab_size, bias=False)
        if buffers := [name for name, _ in self.named_buffers()]:
            raise ConfigError(f"a buffer is not saved: {buffers[0]}", fix="compute it in forward")
        for extension in load_extensions(config):
            extension.apply(self)
        if seed is not None and not self.tokens.weight.is_meta:
            for name, values in init_weights(self, seed):
                self.get_parameter(name).data.copy_(values)

    def forward(
        self,
        ids_BT: Tensor,
        cache: Cache | None = None,
        tree_mask: TreeMask | None = None,
        dropout_keys_B: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, T, C) of `ids_BT` (int64).

        cache: keys and values of the preceding tokens; the keys and values of `ids_BT` are added.
        tree_mask: for rows that hold several sequences or trees; cannot be combined with a cache.
        dropout_keys_B: keys from `sequence_keys` for dropout in training. With None, they are drawn
            from torch's generator.
        """
        if not (self.training and self.config.dropout):
            dropout_keys_B = None
        elif dropout_keys_B is None:
            dropout_keys_B = torch.randint(2**32, ids_BT.shape[:1], device=ids_BT.device)
        T = ids_BT.shape[1]
        positions, mask, window_mask = build_masks(ids_BT, cache, tree_mask, self.config.window)
        cos_sin = local_cos_sin = rotary_cos_sin(self.config, positions)
        if self.config.rope_local_theta:
            local_cos_sin = rotary_cos_sin(self.config, positions, local=True)
        x_BTC = self._embed(ids_BT, positions, cache, mask)
        x_BTC = embedding_BTC = middle_BTC = self.drop(dropout_keys_B, x_BTC)
        recomputes = self.activation_checkpointing == "block" and cache is None
        recomputes = recomputes and torch.is_grad_enabled()
        term_BTC = mix = None
        if is_compiled(self.blocks[0]) and not recomputes:  # None would compile a second graph
            term_BTC = torch.zeros_like(x_BTC, requires_grad=x_BTC.requires_grad)
        for layer, (block, window) in enumerate(zip(self.blocks, self.config.windows, strict=True)):
            if self.residual_scales is not None and self.embedding_scales is not None:
                mix = self.residual_scales[layer], self.embedding_scales[layer], embedding_BTC
            # Blocks get keys, not the layer's number, so that one compiled block serves all layers.
            keys_B = None if dropout_keys_B is None else fold_in(dropout_keys_B, 1 + layer)
            block_mask = window_mask if window else mask
            block_cos_sin = local_cos_sin if window else cos_sin
            if layer in self.config.nope_layers:
                block_cos_sin = None
            run: Callable[..., tuple[Tensor, Tensor | None]] = block
            if recomputes:
                run = partial(checkpoint, block, use_reentrant=False)
                x_BTC, term_BTC = add_term(x_BTC, term_BTC), None  # both would be kept
            inputs = x_BTC, ids_BT, cache, block_cos_sin, block_mask, keys_B, term_BTC, mix
            x_BTC, term_BTC = run(*inputs)
            if self.backout_scale is not None and layer == self.config.n_layer // 2:
                middle_BTC = add_term(x_BTC, term_BTC)
        x_BTC = add_term(x_BTC, term_BTC)
        if self.backout_scale is not None:
            x_BTC = x_BTC - self.backout_scale * middle_BTC
        if cache is not None:
            cache.advance(T)
        return self.norm(x_BTC)

    def _embed(
        self, ids_BT: Tensor, positions: Tensor, cache: Cache | None, mask: Tensor | None
    ) -> Tensor:
        """Return the embeddings (B, T, C). positions, mask: as from `build_masks`."""
        x_BTC = self.tokens(ids_BT)
        if self.config.embedding_scale:
            x_BTC = x_BTC * math.sqrt(self.config.d_model)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(positions)
        if self.embedding_norm is not None:
            x_BTC = self.embedding_norm(x_BTC)
        if self.smear_gate is not None:
            x_BTC = x_BTC + self._smear(x_BTC, positions, cache, mask)
        return x_BTC

    def _smear(
        self, x_BTC: Tensor, positions: Tensor, cache: Cache | None, mask: Tensor | None
    ) -> Tensor:
        """Return the gated share of each preceding embedding; 0 for the first token.

        positions, mask: as from `build_masks`.
        """
        assert self.smear_gate is not None
        assert self.smear_scale is not None
        gate_BT1 = (x_BTC * self.smear_gate).sum(-1, keepdim=True).sigmoid()
        gate_BT1 = self.smear_scale * gate_BT1 * (positions > 0)[..., None]
        rows_B1 = torch.arange(len(x_BTC), device=x_BTC.device)[:, None]
        if cache is not None:
            halves = cache.append(self.config.n_layer, *x_BTC[:, None].chunk(2, dim=-1))
            x_BTC = torch.cat([half[rows_B1, 0, positions - 1] for half in halves], dim=-1)
        elif mask is None or mask.dim() == 1:
            x_BTC = x_BTC.roll(1, dims=1)
        else:
            is_before = mask[:, 0] & (positions[:, None] == positions[..., None] - 1)
            x_BTC = x_BTC[rows_B1, is_before.int().argmax(-1)]
        return gate_BT1 * x_BTC

    @property
    def lm_head_weight(self) -> Tensor:
        """The output layer's weight (V, C); if tied, it is the token embedding."""
        return self.tokens.weight if self.head is None else self.head.weight

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Apply the output layer to hidden states (..., C); return logits (..., vocab_size).

        Logits of padding ids are cut off.
        """
        logits = self.norm.kernels.linear(hidden, self.lm_head_weight, None)
        return cap_logits(logits[..., : self.config.vocab_size], self.config.logit_softcap)

    def logits(self, ids_BT: Tensor) -> Tensor:
        """Return logits (B, T, vocab_size) for the token that follows each token of `ids_BT`."""
        return self.lm_head(self(ids_BT))

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats over the targets; negative targets are ignored.

        For use in scripts: the training loop calls `cross_entropy` directly (train/step.py).
        """
        total, count = cross_entropy(
            self(inputs_BT),
            self.lm_head_weight,
            targets_BT,
            vocab_size=self.config.vocab_size,
            softcap=self.config.logit_softcap,
        )
        return total / count


def measure_parts(config: ModelConfig, norm_width: int = 0) -> tuple[int, int, int, int]:
    """Build a block and a norm without memory, and measure them.

    Returns the numbers of the block's parameters that are in matrices and elsewhere, the rows of
    its MLP's matrices, and the number of the norm's parameters.
    """
    block_class: type[Block] = _load_part("block", config, Block)
    with torch.device("meta"):
        block = block_class(replace(config, value_embeddings=False), 0)
        norm = build_norm(config, norm_width)
    own, mlp, others = (list(part.parameters()) for part in (block, block.mlp, norm))
    in_matrices = sum(each.numel() for each in own if each.dim() >= 2)
    elsewhere = sum(each.numel() for each in own) - in_matrices
    rows = sum(len(each) for each in mlp if each.dim() >= 2)
    return in_matrices, elsewhere, rows, sum(each.numel() for each in others)


def set_attention(model: GPT, name: str) -> None:
    """Select an implementation of attention. Raises ConfigError if it cannot compute the model."""
    attention_fn = find_attention(name)
    if model.config.window and not supports_window(name):
        fix = "use auto, or model.window=0"
        raise ConfigError(f"attention {name!r} has no windows", "machine.attention", fix)
    model.attention_name = name
    for module in model.modules():
        if isinstance(module, Attention):
            module.attention_fn = attention_fn
            module.masked_attention_fn = masked_attention(name)


def set_block_kernels(model: nn.Module, kernels: BlockKernels) -> None:
    """Select the implementation of matmuls, norms and activations."""
    for module in model.modules():
        if isinstance(module, (Linear, Norm, MLP)):
            module.kernels = kernels


def copy_kernels(model: GPT, source: GPT) -> None:
    """Select the same kernels as in `source`."""
    set_attention(model, source.attention_name)
    set_block_kernels(model, source.norm.kernels)


def list_own_classes(model: nn.Module) -> list[str]:
    """Return the classes of a model's modules that are not ours or torch's, as `module:Class`."""
    classes = {type(each) for each in model.modules()}
    return sorted(
        f"{each.__module__}:{each.__qualname__}"
        for each in classes
        if each.__module__.partition(".")[0] not in ("megatoken", "torch")
    )


def set_activation_checkpointing(model: GPT, mode: str) -> None:
    """Choose what the backward recomputes: `none`, `gelu` (MLP activations) or `block`."""
    model.activation_checkpointing = mode
    for module in model.modules():
        if isinstance(module, MLP):
            module.recompute_activation = mode == "gelu"


def init_weights(
    model: GPT, seed: int, *, added_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, initial values) of every parameter, unsharded, on the CPU.

    Only the names and shapes of `model`'s parameters are read. All architectures use GPT-2's rule,
    since the LLaMA papers publish none: Normal(0, 0.02) for matrices and embeddings, divided by
    sqrt(2 n_layer) for the two projections into the residual stream; biases and the vocabulary's
    padding rows 0; norms 1, and other vectors `initial` of their module or 0. Gates of value
    embeddings, smear and backout are 0. With `zero_init`, the two projections and an untied output
    layer are also 0. Extensions draw their own values.

    added_only: whether to yield only the parameters of extensions.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * model.config.n_layer)
    into_stream = ("attention.out.weight", "mlp.down.weight")
    zeros: tuple[str, ...] = ("value_gate.weight",)
    if model.config.zero_init:
        zeros += (*into_stream, "head.weight")
    for name, parameter in model.named_parameters():
        module_name, _, own_name = name.rpartition(".")
        owner = model.get_submodule(module_name)
        if isinstance(owner, AddedModule):
            yield name, owner.draw_initial(own_name, generator)
        if added_only or isinstance(owner, AddedModule):
            continue
        values = torch.zeros(parameter.shape, device="cpu")
        if parameter.dim() < 2:
            initial = getattr(owner, "initial", {"residual_scales": 1.0})
            values.fill_(initial.get(own_name, 0.0))
        elif not name.endswith(zeros):
            std = residual_std if name.endswith(into_stream) else INIT_STD
            values.normal_(0.0, std, generator=generator)
        if name.endswith(("tokens.weight", "head.weight")):
            values[model.config.vocab_size :] = 0.0
        yield name, values
