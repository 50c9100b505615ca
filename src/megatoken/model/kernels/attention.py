"""Attention: the formula, torch's kernels, and blocks that skip the upper triangle. ATTENTION lists all by name.

softmax(q k^T / sqrt(D)) v (Vaswani et al. 2017). Keys and values may have fewer heads than queries, each shared by a
group of neighbouring query heads (Ainslie et al. 2023).

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head width, N = B*H, Q queries of a block.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatoken.config.fields import register_choice
from megatoken.errors import ConfigError
from megatoken.native.attention import attention as compiled_attention

Mask = Tensor | None
Dropout = (
    Callable[[Tensor], Tensor] | None
)  # of the weights (B, H, T, S): some of them 0, the others larger


class AttentionFn(Protocol):
    """Queries (B, H, T, D), keys and values (B, K, S, D) -> (B, H, T, D).

    mask: bool, (B or 1, 1, T, S), True where a query sees a key. causal: T equals S and every query sees its own key
    and earlier ones; never with a mask. Neither: every query sees every key, as a single new token does in decoding.
    dropout: to be applied to the weights (B, H, T, S) after the softmax; None where nothing is dropped. window: how
    many keys a query sees under `causal`, its own among them; passed in layers that have one (model.window), 0: all.
    Training calls it with `causal`, sampling with `causal` for the prompt and then without, scoring with a mask.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        /,
        *,
        mask: Mask,
        causal: bool,
        dropout: Dropout,
        window: int = 0,
    ) -> Tensor: ...


def repeat_kv(x_BKSD: Tensor, n_head: int) -> Tensor:
    """A key head for every query head (B, H, S, D): copies for the heads that share one; itself where none do."""
    group = n_head // x_BKSD.shape[1]
    return x_BKSD if group == 1 else x_BKSD.repeat_interleave(group, dim=1)


def causal_mask(T: int, window: int, device: torch.device) -> Tensor:
    """(T, T) bool: every query sees its own key and earlier ones, with a window that many in all."""
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    return causal_TT.triu(1 - window) if window else causal_TT


def explicit_attention(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    mask: Mask,
    causal: bool,
    dropout: Dropout,
    window: int = 0,
) -> Tensor:
    """The formula, all T x S scores at once."""
    H, T, D = q_BHTD.shape[-3:]
    k_BHSD, v_BHSD = repeat_kv(k_BKSD, H), repeat_kv(v_BKSD, H)
    scores_BHTS = q_BHTD @ k_BHSD.transpose(-2, -1) / math.sqrt(D)
    if causal:
        mask = causal_mask(T, window, q_BHTD.device)
    if mask is not None:
        scores_BHTS = scores_BHTS.masked_fill(~mask, -torch.inf)
    weights_BHTS = scores_BHTS.softmax(-1)
    return (weights_BHTS if dropout is None else dropout(weights_BHTS)) @ v_BHSD


def flash_attention(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    mask: Mask,
    causal: bool,
    dropout: Dropout,
    window: int = 0,
) -> Tensor:
    """torch's scaled_dot_product_attention: on CUDA whichever backend it prefers.

    With dropout the formula: torch's kernels draw masks that depend on the micro-batch. A window is a mask to it, which
    saves no work.
    """
    if dropout is not None:
        return explicit_attention(
            q_BHTD, k_BKSD, v_BKSD, mask=mask, causal=causal, dropout=dropout, window=window
        )
    B, H, T, D = q_BHTD.shape
    if window:
        mask, causal = causal_mask(T, window, q_BHTD.device), False
    K = k_BKSD.shape[1]
    if T == 1 and K != H:  # the queries that share a key are rows of one query: no copies of keys
        rows_BKGD = q_BHTD.reshape(B, K, H // K, D)
        return F.scaled_dot_product_attention(rows_BKGD, k_BKSD, v_BKSD, attn_mask=mask).reshape(
            B, H, 1, D
        )
    return F.scaled_dot_product_attention(
        q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, is_causal=causal and T > 1, enable_gqa=K != H
    )


def backend_attention(
    backend: SDPBackend, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, **options: Any
) -> Tensor:
    """torch's kernel by one backend and no other: RuntimeError where that one cannot."""
    with sdpa_kernel(backend):
        return flash_attention(q_BHTD, k_BKSD, v_BKSD, **options)


def blocked_attention(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    mask: Mask,
    causal: bool,
    dropout: Dropout,
    window: int = 0,
) -> Tensor:
    """A block of queries at a time against the keys they see: half the products of the square, fewer with a window.

    With dropout the formula.
    """
    assert causal
    assert mask is None
    if dropout is not None:
        return explicit_attention(
            q_BHTD, k_BKSD, v_BKSD, mask=None, causal=True, dropout=dropout, window=window
        )
    H, T = q_BHTD.shape[1:3]
    k_BHTD, v_BHTD = repeat_kv(k_BKSD, H), repeat_kv(v_BKSD, H)
    y: Tensor = _Blocked.apply(q_BHTD, k_BHTD, v_BHTD, window or T)  # type: ignore[no-untyped-call]
    return y


def native_attention(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    mask: Mask,
    causal: bool,
    dropout: Dropout,
    window: int = 0,
) -> Tensor:
    """By our kernels for CPUs; with a mask by torch's, with dropout by the formula. It has no windows."""
    assert not window
    if dropout is not None:
        return explicit_attention(q_BHTD, k_BKSD, v_BKSD, mask=mask, causal=causal, dropout=dropout)
    decodes = (
        not causal and q_BHTD.dtype == torch.bfloat16 and not torch.is_grad_enabled()
    )  # in fp32 torch is faster
    if mask is not None or not (causal or decodes):
        return flash_attention(q_BHTD, k_BKSD, v_BKSD, mask=mask, causal=causal, dropout=None)
    return compiled_attention(q_BHTD, k_BKSD, v_BKSD, causal=causal)


class _Blocked(torch.autograd.Function):
    """Keeps each block's attention weights for the backward: T*T/2 numbers a head, nothing is computed twice."""

    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, window: int) -> Tensor:
        B, H, T, D = q_BHTD.shape
        # Contiguous heads: batched products read them many times.
        q, k, v = (x.reshape(B * H, T, D) for x in (q_BHTD * (1 / math.sqrt(D)), k_BHTD, v_BHTD))
        # Few enough queries that a block's scores stay in the CPU's caches and little of the triangle is wasted.
        ctx.block = block = 64 if T <= 256 else 128
        ctx.window = window
        causal_QQ = torch.full((block, block), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
        # In the memory layout that the output projection reads, so that it saves this tensor instead of a copy.
        y_BHTD = q_BHTD.new_empty(B, T, H, D).transpose(1, 2)
        weights = []
        for begin in range(0, T, block):
            end = min(begin + block, T)
            size = end - begin
            first = max(0, begin + 1 - window)
            scores_NQS = torch.bmm(q[:, begin:end], k[:, first:end].transpose(1, 2))
            scores_NQS[:, :, begin - first :].add_(causal_QQ[:size, :size])
            if (
                far := end - first - window
            ) > 0:  # keys that are too far from some queries of the block
                far_QS = torch.full((size, far), -torch.inf, dtype=q.dtype, device=q.device).tril(
                    far - size
                )
                scores_NQS[:, :, :far].add_(far_QS)
            torch.softmax(scores_NQS, -1, out=scores_NQS)
            y_BHTD[:, :, begin:end] = torch.bmm(scores_NQS, v[:, first:end]).view(B, H, size, D)
            weights.append(scores_NQS)
        ctx.save_for_backward(q, k, v, y_BHTD, *weights)
        return y_BHTD

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y_BHTD, *weights = ctx.saved_tensors
        N, T, D = q.shape
        grad_NTD = grad_BHTD.reshape(N, T, D)
        # d scores = weights * (d weights - sum of d weights * weights); that sum is d y . y (Dao et al. 2022)
        sum_NT1 = (grad_BHTD * y_BHTD).sum(-1).view(N, T, 1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for weights_NQS, begin in zip(weights, range(0, T, ctx.block), strict=True):
            end = begin + weights_NQS.shape[1]
            seen = slice(max(0, begin + 1 - ctx.window), end)
            grad_NQD = grad_NTD[:, begin:end]
            dv[:, seen] += torch.bmm(weights_NQS.transpose(1, 2), grad_NQD)
            d_NQS = torch.bmm(grad_NQD, v[:, seen].transpose(1, 2))
            d_NQS.sub_(sum_NT1[:, begin:end]).mul_(weights_NQS)
            dq[:, begin:end] = torch.bmm(d_NQS, k[:, seen])
            dk[:, seen] += torch.bmm(d_NQS.transpose(1, 2), q[:, begin:end])
        dq.mul_(1 / math.sqrt(D))
        dq, dk, dv = (x.view(grad_BHTD.shape) for x in (dq, dk, dv))
        return dq, dk, dv, None


ATTENTION: dict[str, AttentionFn] = {
    "explicit": explicit_attention,
    "flash": flash_attention,
    "blocked": blocked_attention,
    "native": native_attention,
    "cudnn": partial(backend_attention, SDPBackend.CUDNN_ATTENTION),
    "fa2": partial(backend_attention, SDPBackend.FLASH_ATTENTION),
}
BUILT_IN = frozenset(ATTENTION)
CUDA_ONLY = ("cudnn", "fa2")
CAUSAL_ONLY = {
    "blocked",
    *CUDA_ONLY,
}  # flash, the same formula, computes their calls with a mask or a cache
WITHOUT_MASK: set[str] = set()  # registered names that sampling and scoring cannot compute with
WITHOUT_WINDOW: set[str] = {"native", *CUDA_ONLY}  # names that cannot compute layers with a window


def register_attention(name: str, fn: AttentionFn, *, supports_mask: bool = True) -> None:
    """Add an attention of your own as `machine.attention=NAME`: training, sampling and scoring compute with it.

    Checkpoints record the name; loading one where it is not registered is an error. supports_mask=False: `fn` computes
    `causal` calls without a cache alone. Such a model can be trained; sampling and scoring raise ConfigError, because
    another attention would give other values.
    """
    if name in BUILT_IN:
        raise ConfigError(
            f"{name!r} is a built-in attention", "register_attention", "choose another name"
        )
    parameters = inspect.signature(fn).parameters
    if "dropout_p" in parameters:
        fix = "take dropout=None or a function that drops weights (docs/hacking.md)"
        raise ConfigError(
            f"attention {name!r} takes dropout_p, a probability", "register_attention", fix
        )
    register_choice("machine.attention", name)
    ATTENTION[name] = fn
    (WITHOUT_MASK.discard if supports_mask else WITHOUT_MASK.add)(name)
    takes_window = any(
        each.name == "window" or each.kind == each.VAR_KEYWORD for each in parameters.values()
    )
    (WITHOUT_WINDOW.discard if takes_window else WITHOUT_WINDOW.add)(name)


def masked_attention(name: str) -> AttentionFn:
    """The implementation for calls with a mask or a cache when `name` is selected."""
    if name in WITHOUT_MASK:
        return partial(_refuse_mask, name)
    return flash_attention if name in CAUSAL_ONLY else ATTENTION[name]


def _refuse_mask(name: str, *_: Tensor, **__: object) -> Tensor:
    what = f"attention {name!r} supports neither a mask nor a cache"
    raise ConfigError(
        what, "sampling or scoring", "support both and register it with supports_mask=True"
    )
