"""GPT-2 and LLaMA as released: pre-norm blocks, which differ in a handful of switches of their `Shape`.

| | GPT-2 | LLaMA |
|---|---|---|
| norm, mlp | LayerNorm, tanh GELU | RMSNorm, SwiGLU |
| positions | embedded with the tokens | queries and keys turned by their place (model/rotary.py) |
| kv_heads | one for each query head | one for a group of them |
| bias, tied | biases, the token embedding as output layer | no biases; the large ones have a matrix of their own |

In: token ids. Out: hidden states after the final norm; the loss and the sampler apply `unembedding` themselves.
Sources: Radford et al. 2019; Touvron et al. 2023, Dubey et al. 2024.
Absent: loss, parallelism, compilation, precision: all applied from outside.

Shapes: B batch, T time, C d_model, H heads, K heads of keys and values, D head width, F d_ff, V padded vocabulary,
S keys (cached and new).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
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
    Attend,
    Kernels,
    Multiply,
)
from megatoken.model.kernels.attention import switch_flash
from megatoken.model.kernels.gelu import Make, erf_gelu, swiglu
from megatoken.model.rotary import Turns, make_turns, turn
from megatoken.presets import Shape

INIT_STD = 0.02


class Cache(Protocol):
    """Keys and values of earlier tokens, kept per layer while sampling."""

    length: int

    def append(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Branches:
    """Rows that are not one sequence each: where every token stands, and which tokens of its row each attends to."""

    places_BT: Tensor
    sees_BTT: Tensor  # [b, t, s]: t attends to s


class Linear(nn.Linear):
    """x W^T + b by the chosen library."""

    multiply: Multiply = staticmethod(LINEAR["torch"])

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)


class Norm(nn.Module):
    """LayerNorm or RMSNorm of a stream that an update joins on the way."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kind, self.eps = shape.norm, shape.norm_eps
        self.weight = nn.Parameter(torch.ones(shape.d_model))
        biased = shape.bias and shape.norm == "layernorm"
        self.bias = nn.Parameter(torch.zeros(shape.d_model)) if biased else None
        self.add_norm = NORM[self.kind]["torch"]

    def forward(self, x: Tensor, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + update, its norm)."""
        return self.add_norm(x, update, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention over one packed query/key/value product."""

    attend: Attend = staticmethod(ATTENTION["flash"])

    def __init__(self, shape: Shape, layer: int, dropout: float) -> None:
        super().__init__()
        self.heads = [shape.n_head, shape.kv_heads, shape.kv_heads]  # of queries, keys and values
        self.d_head, self.layer, self.dropout = shape.d_head, layer, dropout
        self.qkv = Linear(shape.d_model, sum(self.heads) * shape.d_head, bias=shape.bias)
        self.out = Linear(shape.d_model, shape.d_model, bias=shape.bias)

    def forward(
        self, x_BTC: Tensor, cache: Cache | None = None, turns: Turns | None = None, branches: Branches | None = None
    ) -> Tensor:
        B, T, _ = x_BTC.shape
        q, k, v = self.qkv(x_BTC).view(B, T, -1, self.d_head).split_with_sizes(self.heads, dim=2)
        if turns is not None:
            q, k = turn(q, turns), turn(k, turns)
        q, k, v = (part_BTHD.transpose(1, 2) for part_BTHD in (q, k, v))
        if branches is not None:
            grouped = k.shape[1] != q.shape[1]
            y_BHTD = F.scaled_dot_product_attention(q, k, v, attn_mask=branches.sees_BTT[:, None], enable_gqa=grouped)
        elif cache is not None:
            y_BHTD = self._attend_to_cache(q, k, v, cache)
        else:
            y_BHTD = self.attend(q, k, v, self.dropout if self.training else 0.0)
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, -1))  # type: ignore[no-any-return]

    def _attend_to_cache(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Tensor:
        past, T = cache.length, q.shape[-2]
        k, v = cache.append(self.layer, k, v)
        # A single new token may look at everything; several after a cached past need the mask's lower right corner.
        mask = torch.ones(T, past + T, dtype=torch.bool, device=q.device).tril(past) if past and T > 1 else None
        grouped = k.shape[1] != q.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=past == 0 and T > 1, enable_gqa=grouped
        )


class MLP(nn.Module):
    """Two products around a GELU, or around one that a third gates."""

    activate: Activate = staticmethod(GELU["torch"])
    recompute_gelu = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kind = shape.mlp
        self.gate = Linear(shape.d_model, shape.d_ff, bias=shape.bias) if shape.mlp == "swiglu" else None
        self.up = Linear(shape.d_model, shape.d_ff, bias=shape.bias)
        self.down = Linear(shape.d_ff, shape.d_model, bias=shape.bias)

    def widen(self, x_BTC: Tensor) -> Make:
        """What makes (B, T, F) of the wide products."""
        if self.gate is not None:
            return swiglu(self.gate, self.up, x_BTC)
        return erf_gelu(self.up, x_BTC) if self.kind == "gelu-erf" else self.activate(self.up, x_BTC)

    def forward(self, x_BTC: Tensor) -> Tensor:
        make = self.widen(x_BTC)
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
        self.norm1 = Norm(shape)
        self.attention = Attention(shape, layer, dropout)
        self.norm2 = Norm(shape)
        self.mlp = MLP(shape)
        self.drop = nn.Dropout(dropout)

    def forward(
        self,
        x_BTC: Tensor,
        update_BTC: Tensor | None = None,
        cache: Cache | None = None,
        turns: Turns | None = None,
        branches: Branches | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The stream, and this block's last update of it: the norm that reads the sum next adds it."""
        x_BTC, h_BTC = self.norm1(x_BTC, update_BTC)
        x_BTC, h_BTC = self.norm2(x_BTC, self.drop(self.attention(h_BTC, cache, turns, branches)))
        return x_BTC, self.drop(self.mlp(h_BTC))


class GPT(nn.Module):
    """The network: ids in, hidden states out."""

    recompute_blocks = False

    def __init__(self, shape: Shape, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.padded_vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.seq_len, shape.d_model) if shape.positions == "learned" else None
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape, layer, dropout) for layer in range(shape.n_layer))
        self.norm = Norm(shape)
        self.head = None if shape.tied else nn.Linear(shape.d_model, shape.padded_vocab_size, bias=False)

    def forward(self, ids_BT: Tensor, cache: Cache | None = None, branches: Branches | None = None) -> Tensor:
        """Hidden states (B, T, C) of `ids_BT` (int64), which follow whatever `cache` holds and are added to it.

        branches: for rows that are not one sequence each; without a cache, and nothing is dropped in attention.
        """
        past = cache.length if cache is not None else 0
        places = torch.arange(past, past + ids_BT.shape[1], device=ids_BT.device)
        if branches is not None:
            places = branches.places_BT
        turns = make_turns(self.shape, places)
        x_BTC = self.tokens(ids_BT)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(places)
        x_BTC = self.drop(x_BTC)
        update_BTC: Tensor | None = None
        for block in self.blocks:
            if self.recompute_blocks and cache is None and torch.is_grad_enabled():
                x_BTC, update_BTC = checkpoint(block, x_BTC, update_BTC, None, turns, use_reentrant=False)
            else:
                x_BTC, update_BTC = block(x_BTC, update_BTC, cache, turns, branches)
        if cache is not None:
            cache.length += ids_BT.shape[1]
        return self.norm(x_BTC, update_BTC)[1]  # type: ignore[no-any-return]

    @property
    def unembedding(self) -> Tensor:
        """The output layer's weight (V, C): the token embedding itself, or a matrix of its own."""
        return self.tokens.weight if self.head is None else self.head.weight

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
            part.add_norm = NORM[part.kind][kernels.norm]
        elif isinstance(part, MLP):
            part.activate = GELU[kernels.gelu]


def use_recompute(model: GPT, what: str) -> None:
    """Keep less for the backward and compute it again there: `none`, `gelu` (the MLP's wide output) or `block`."""
    model.recompute_blocks = what == "block"
    for part in model.modules():
        if isinstance(part, MLP):
            part.recompute_gelu = what == "gelu"


def initialize(model: GPT, seed: int) -> None:
    """Fill a model with GPT-2's initial weights; the same seed gives the same weights on any device."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in draw_weights(model, seed):
            parameters[name].copy_(values)


def draw_weights(model: GPT, seed: int) -> Iterator[tuple[str, Tensor]]:
    """GPT-2's initial weights one after another, whole and on the CPU; of the model only names and sizes are asked.

    Normal(0, 0.02) for matrices and embeddings, divided by sqrt(2 n_layer) for the two projections that write
    into the residual stream; biases 0, norms 1, padding rows of the vocabulary 0. LLaMA's papers do not tell theirs:
    the rule is kept for both families, so that a comparison of them compares nothing else.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * model.shape.n_layer)
    for name, parameter in model.named_parameters():
        values = torch.zeros(parameter.shape)
        if parameter.dim() < 2:
            values.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        else:
            std = residual_std if name.endswith(("attention.out.weight", "mlp.down.weight")) else INIT_STD
            values.normal_(0.0, std, generator=generator)
        if name in ("tokens.weight", "head.weight"):
            values[model.shape.vocab_size :] = 0.0
        yield name, values
