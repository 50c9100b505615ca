"""GPT-2 as released: pre-norm blocks, learned positions, tanh GELU, biases, tied output layer.

In: token ids. Out: hidden states after the final norm; the loss and the sampler apply `unembedding` themselves.
Source: Radford et al. 2019; residual projections start smaller by 1/sqrt(2 n_layer) as described there.
Absent: loss, parallelism, compilation, precision: all applied from outside.

Shapes: B batch, T time, C d_model, H heads, D head width, F d_ff, V padded vocabulary, S keys (cached and new).
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatoken.model.kernels import (
    ATTENTION,
    GELU,
    LINEAR,
    NORM,
    Activate,
    AddNorm,
    Attend,
    Kernels,
    Multiply,
)
from megatoken.model.kernels.attention import switch_flash
from megatoken.presets import Shape

INIT_STD = 0.02


class Cache(Protocol):
    """Keys and values of earlier tokens, kept per layer while sampling."""

    length: int

    def append(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]: ...


class Linear(nn.Linear):
    """x W^T + b by the chosen library."""

    multiply: Multiply = staticmethod(LINEAR["torch"])

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)


class Norm(nn.LayerNorm):
    """LayerNorm of a stream that an update joins on the way."""

    add_norm: AddNorm = staticmethod(NORM["torch"])

    def forward(self, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(x + update, its norm)."""
        return (x, super().forward(x)) if update is None else self.add_norm(x, update, self.weight, self.bias)


class Attention(nn.Module):
    """Causal self-attention over one packed query/key/value product."""

    attend: Attend = staticmethod(ATTENTION["flash"])

    def __init__(self, shape: Shape, layer: int, dropout: float) -> None:
        super().__init__()
        self.n_head, self.layer, self.dropout = shape.n_head, layer, dropout
        self.qkv = Linear(shape.d_model, 3 * shape.d_model)
        self.out = Linear(shape.d_model, shape.d_model)

    def forward(self, x_BTC: Tensor, cache: Cache | None = None) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = self.qkv(x_BTC).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        if cache is None:
            y_BHTD = self.attend(q, k, v, self.dropout if self.training else 0.0)
        else:
            y_BHTD = self._attend_to_cache(q, k, v, cache)
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))  # type: ignore[no-any-return]

    def _attend_to_cache(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
        past, T = cache.length, q.shape[-2]
        k, v = cache.append(self.layer, k, v)
        # A single new token may look at everything; several after a cached past need the mask's lower right corner.
        mask = torch.ones(T, past + T, dtype=torch.bool, device=q.device).tril(past) if past and T > 1 else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=past == 0 and T > 1)


class MLP(nn.Module):
    """Two products around a tanh GELU."""

    activate: Activate = staticmethod(GELU["torch"])
    recompute_gelu = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = Linear(shape.d_model, shape.d_ff)
        self.down = Linear(shape.d_ff, shape.d_model)

    def forward(self, x_BTC: Tensor) -> Tensor:
        make = self.activate(self.up, x_BTC)
        h_BTF = make()
        if not self.recompute_gelu or torch.compiler.is_compiling():  # the compiler does it unasked
            return self.down(h_BTF)  # type: ignore[no-any-return]
        storage = h_BTF.untyped_storage().data_ptr()

        def pack(kept: Tensor) -> Tensor | torch.Size:
            same = kept.is_contiguous() and kept.untyped_storage().data_ptr() == storage
            return kept.shape if same else kept

        def unpack(kept: Tensor | torch.Size) -> Tensor:
            return make().view(kept) if isinstance(kept, torch.Size) else kept

        with saved_tensors_hooks(pack, unpack):
            return self.down(h_BTF)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention of the norm, then the MLP of the norm, each an update of the stream."""

    def __init__(self, shape: Shape, layer: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = Norm(shape.d_model)
        self.attention = Attention(shape, layer, dropout)
        self.norm2 = Norm(shape.d_model)
        self.mlp = MLP(shape)
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x_BTC: Tensor, update_BTC: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        """The stream, and this block's last update of it: the norm that reads the sum next adds it."""
        x_BTC, h_BTC = self.norm1(x_BTC, update_BTC)
        x_BTC, h_BTC = self.norm2(x_BTC, self.drop(self.attention(h_BTC, cache)))
        return x_BTC, self.drop(self.mlp(h_BTC))


class GPT(nn.Module):
    """The network: ids in, hidden states out."""

    recompute_blocks = False

    def __init__(self, shape: Shape, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.padded_vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.seq_len, shape.d_model)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape, layer, dropout) for layer in range(shape.n_layer))
        self.norm = Norm(shape.d_model)

    def forward(self, ids_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Hidden states (B, T, C) of `ids_BT` (int64), which follow whatever `cache` holds and are added to it."""
        past = cache.length if cache is not None else 0
        places_T = torch.arange(past, past + ids_BT.shape[1], device=ids_BT.device)
        x_BTC = self.drop(self.tokens(ids_BT) + self.positions(places_T))
        update_BTC: Tensor | None = None
        for block in self.blocks:
            if self.recompute_blocks and cache is None and torch.is_grad_enabled():
                x_BTC, update_BTC = checkpoint(block, x_BTC, update_BTC, use_reentrant=False)
            else:
                x_BTC, update_BTC = block(x_BTC, update_BTC, cache)
        if cache is not None:
            cache.length += ids_BT.shape[1]
        return self.norm(x_BTC, update_BTC)[1]  # type: ignore[no-any-return]

    @property
    def unembedding(self) -> Tensor:
        """The output layer's weight (V, C): the token embedding itself."""
        return self.tokens.weight

    def logits(self, hidden_BTC: Tensor) -> Tensor:
        """Scores (B, T, real vocabulary): padding ids do not exist for whoever reads them."""
        return F.linear(hidden_BTC, self.unembedding)[..., : self.shape.vocab_size]


def use_kernels(module: nn.Module, kernels: Kernels) -> None:
    """Compute with these forms of the operations from now on; parameters stay, and values to within rounding."""
    switch_flash(kernels.attention)
    for part in module.modules():
        if isinstance(part, Linear):
            part.multiply = LINEAR[kernels.linear]
        elif isinstance(part, Attention):
            part.attend = ATTENTION[kernels.attention]
        elif isinstance(part, Norm):
            part.add_norm = NORM[kernels.norm]
        elif isinstance(part, MLP):
            part.activate = GELU[kernels.gelu]


def use_recompute(model: GPT, what: str) -> None:
    """Keep less for the backward and compute it again there: `none`, `gelu` (the MLP's wide output) or `block`."""
    model.recompute_blocks = what == "block"
    for part in model.modules():
        if isinstance(part, MLP):
            part.recompute_gelu = what == "gelu"


def initialize(model: GPT, seed: int) -> None:
    """Fill a model with GPT-2's initial weights; the same seed gives the same weights on any device.

    Normal(0, 0.02) for matrices and embeddings, divided by sqrt(2 n_layer) for the two projections that write
    into the residual stream; biases 0, norms 1, padding rows of the vocabulary 0.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * model.shape.n_layer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            std = residual_std if name.endswith(("attention.out.weight", "mlp.down.weight")) else INIT_STD
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
        model.tokens.weight[model.shape.vocab_size :] = 0.0
