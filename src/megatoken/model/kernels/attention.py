"""Attention by its formula, by torch's kernels, and by name: model/room.py lists other ones.

All compute softmax(q k^T / sqrt(D)) v (Vaswani et al. 2017). There can be fewer key and value heads
than query heads; neighboring query heads then share one (Ainslie et al. 2023).

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head width.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatoken.base.errors import ConfigError
from megatoken.base.rooms import find_entry
from megatoken.base.system.torch_compat import flash_varlen

Mask = Tensor | None
Dropout = Callable[[Tensor], Tensor] | None  # drops some of the weights (B, H, T, S)


class AttentionFn(Protocol):
    """Queries (B, H, T, D), keys and values (B, K, S, D) -> (B, H, T, D).

    Training sets `causal`. Sampling sets it for the prompt, but not for later tokens. Scoring
    passes a mask. With neither `causal` nor a mask, a query sees every key.

    mask: bool (B or 1, 1, T, S), True where a query sees a key. causal: whether a query sees only
    its own and earlier keys; T then equals S and there is no mask. dropout: function to apply to
    the weights after the softmax, or None. window: number of latest keys that a query sees under
    `causal`, including its own; 0 for all. It is passed only in layers that have a window
    (model.window).
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
    """Repeat shared key or value heads, so that there is one per query head: (B, H, S, D)."""
    group = n_head // x_BKSD.shape[1]
    return x_BKSD if group == 1 else x_BKSD.repeat_interleave(group, dim=1)


def causal_mask(T: int, window: int, device: torch.device) -> Tensor:
    """Return a bool mask (T, T), True where a query sees a key.

    A query sees its own key and earlier ones, at most `window` in total (0 for no limit).
    """
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    return causal_TT.triu(1 - window) if window else causal_TT


def document_mask(bounds: Tensor, B: int, T: int, window: int) -> Tensor:
    """Return a bool mask (B, 1, T, T): causal, and within documents.

    bounds: as in `attend_documents`. window: as in `causal_mask`.
    """
    index = torch.arange(B * T, dtype=torch.int32, device=bounds.device)
    document_BT = torch.bucketize(index, bounds, right=True).view(B, T)
    is_same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return (is_same_BTT & causal_mask(T, window, bounds.device))[:, None]


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
    """Compute attention by its formula, with all T x S scores in memory at once."""
    H, T, D = q_BHTD.shape[-3:]
    k_BHSD = repeat_kv(k_BKSD, H)
    v_BHSD = repeat_kv(v_BKSD, H)
    scores_BHTS = q_BHTD @ k_BHSD.transpose(-2, -1) / math.sqrt(D)
    if causal:
        mask = causal_mask(T, window, q_BHTD.device)
    if mask is not None:
        scores_BHTS = scores_BHTS.masked_fill(~mask, -torch.inf)
    weights_BHTS = scores_BHTS.softmax(-1)
    return (weights_BHTS if dropout is None else dropout(weights_BHTS)) @ v_BHSD


def explicit_with_dropout(attend: Callable[..., Tensor]) -> AttentionFn:
    """Make an attention without dropout use `explicit_attention` if there is dropout.

    The dropout masks of torch's kernels depend on the micro-batch size.
    """

    @wraps(attend)
    def attention(*qkv: Tensor, dropout: Dropout, **options: Any) -> Tensor:
        if dropout is not None:
            return explicit_attention(*qkv, dropout=dropout, **options)
        return attend(*qkv, **options)

    return attention


@explicit_with_dropout
def flash_attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, mask: Mask, causal: bool, window: int = 0
) -> Tensor:
    """Call torch's scaled_dot_product_attention, with the backend that torch prefers.

    Without `supports_varlen`, a window is passed as a mask, which saves no work. The mask can be a
    cache's bounds.
    """
    B, H, T, D = q_BHTD.shape
    K = k_BKSD.shape[1]
    if mask is not None and mask.dim() == 2:
        k, v = (x_BKSD.flatten(0, 2)[:, None] for x_BKSD in (k_BKSD, v_BKSD))
        q = q_BHTD.reshape(B * K, H // K, D)
        bounds, key_bounds, counts = mask
        keys = key_bounds, k_BKSD.shape[2], counts[:-1]
        return flash_varlen(q, k, v, bounds, 1, keys=keys).view(q_BHTD.shape)
    if window:
        if supports_varlen(q_BHTD):
            rows = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q_BHTD.device)
            return varlen_attention(q_BHTD, k_BKSD, v_BKSD, rows, window)
        mask = causal_mask(T, window, q_BHTD.device)
        causal = False
    if T == 1 and K != H:  # query heads that share keys become rows, so that no keys are copied
        rows_BKGD = q_BHTD.reshape(B, K, H // K, D)
        y_BKGD = F.scaled_dot_product_attention(rows_BKGD, k_BKSD, v_BKSD, attn_mask=mask)
        return y_BKGD.reshape(B, H, 1, D)
    if q_BHTD.is_cuda and (mask is not None or q_BHTD.dtype == torch.float32):
        # Torch's fused kernels for masks and fp32 do not support shared key heads; its fallback
        # would hold all scores in fp32.
        k_BKSD = repeat_kv(k_BKSD, H)
        v_BKSD = repeat_kv(v_BKSD, H)
        K = H
    return F.scaled_dot_product_attention(
        q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, is_causal=causal and T > 1, enable_gqa=K != H
    )


def supports_varlen(q_BHTD: Tensor) -> bool:
    """Return whether `varlen_attention` supports the queries' device, dtype and head width."""
    return (
        q_BHTD.is_cuda
        and q_BHTD.dtype in (torch.bfloat16, torch.float16)
        and q_BHTD.shape[-1] in range(8, 257, 8)
        and torch.version.hip is None
        and torch.cuda.get_device_properties(q_BHTD.device).major >= 8
    )


def varlen_attention(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, bounds: Tensor, window: int
) -> Tensor:
    """Compute causal attention within documents by FlashAttention-2 (Dao 2023), without a mask.

    Keys of other documents or outside the window take no work. bounds: as in `attend_documents`.
    """
    B, H, T, D = q_BHTD.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTD, k_BKTD, v_BKTD))
    return flash_varlen(q, k, v, bounds, T, window).view(B, T, H, D).transpose(1, 2)


def attend_documents(
    attention_fn: AttentionFn,
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    bounds: Tensor,
    dropout: Dropout,
    window: int = 0,
) -> Tensor:
    """Compute causal attention within documents, by `attention_fn` if it has to be masked.

    bounds: int32. Where each document begins in the (B * T) tokens, then B * T, at least once.
    """
    if attention_fn is flash_attention and dropout is None and supports_varlen(q_BHTD):
        return varlen_attention(q_BHTD, k_BKTD, v_BKTD, bounds, window)
    B, _, T, _ = q_BHTD.shape
    mask = document_mask(bounds, B, T, window)
    return attention_fn(q_BHTD, k_BKTD, v_BKTD, mask=mask, causal=False, dropout=dropout)


def backend_attention(
    backend: SDPBackend, q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, **options: Any
) -> Tensor:
    """Call torch's scaled_dot_product_attention with the given backend.

    Raises RuntimeError if the backend does not support the inputs.
    """
    with sdpa_kernel(backend):
        return flash_attention(q_BHTD, k_BKSD, v_BKSD, **options)


cudnn_attention = partial(backend_attention, SDPBackend.CUDNN_ATTENTION)
fa2_attention = partial(backend_attention, SDPBackend.FLASH_ATTENTION)
CUDA_ONLY = ("cudnn", "fa2")
CAUSAL_ONLY = {"blocked", *CUDA_ONLY}  # calls with a mask or a cache use "flash" instead
WITHOUT_WINDOW = {"native", *CUDA_ONLY}


def supports_window(name: str) -> bool:
    """Return whether an attention can limit how far a query sees."""
    parameters = inspect.signature(find_attention(name)).parameters.values()
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    has_window = takes_any or any(parameter.name == "window" for parameter in parameters)
    return name not in WITHOUT_WINDOW and has_window


def supports_mask(name: str) -> bool:
    """Return False for an attention of a user with an attribute `supports_mask = False`.

    It supports only `causal` calls without a cache. Sampling and scoring then raise ConfigError,
    because another attention would compute other values.
    """
    return bool(getattr(find_attention(name), "supports_mask", True))


def find_attention(name: str) -> AttentionFn:
    """Return the attention of this name. Raises ConfigError if there is none."""
    fn: AttentionFn = find_entry("attention", name, "machine.attention")
    return fn


def masked_attention(name: str) -> AttentionFn:
    """Return the attention to call with a mask or a cache when `name` is selected.

    `flash_attention` replaces a built-in one that supports only causal calls. For a registered one
    that does not support masks, the returned function raises ConfigError.
    """
    if not supports_mask(name):
        return partial(_refuse_mask, name)
    return flash_attention if name in CAUSAL_ONLY else find_attention(name)


def _refuse_mask(name: str, *_: Tensor, **__: object) -> Tensor:
    what = f"attention {name!r} supports neither a mask nor a cache"
    raise ConfigError(
        what, "sampling or scoring", "support both, and remove `supports_mask = False`"
    )
