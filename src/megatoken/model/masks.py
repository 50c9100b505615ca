"""Positions of the tokens of a row, and which tokens each one attends to.

A row is one sequence, which may continue a cached one, or holds several sequences or trees.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.base.system.torch_compat import mark_dynamic


class Cache(Protocol):
    """Keys and values of earlier tokens in rows, one sequence each (inference/kv_cache.py).

    length: number of tokens in the longest row. bounds: what FlashAttention needs in place of a mask
    if each row has one new token, or None: int32 (3, B * K + 1), of each row and key head its number,
    its first key in the cache, and the number of keys.
    """

    bounds: Tensor | None

    @property
    def length(self) -> int: ...

    def next_positions(self, T: int) -> Tensor:
        """Return the positions of the next T tokens: (T,), or (B, 1) if rows differ in length."""

    def append(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, and return all of them, (B, K, S, D) each."""

    def advance(self, T: int) -> None:
        """Add T to every row's length, when all layers have appended."""


@dataclass(frozen=True)
class TreeMask:
    """Positions and attention mask of rows that are not just one sequence.

    A row may pack several sequences, or hold a tree of alternative continuations.
    """

    positions_BT: Tensor
    attn_mask: Tensor  # bool (B, 1, T, T): [b, 0, t, s]: t attends to s; or bounds of documents


def separate_conversations(starts_BT: Tensor, device: torch.device) -> TreeMask:
    """Return the mask for rows that pack several sequences, which must not attend to each other.

    On CUDA, the mask is given by the bounds of the sequences, which are copied asynchronously.

    starts_BT: for each token, the index in the row at which its sequence begins; on the CPU.
    """
    index_T = torch.arange(starts_BT.shape[1])
    if device.type == "cuda":
        tensors = index_T - starts_BT, find_bounds(starts_BT)
        positions_BT, bounds = (x.pin_memory().to(device, non_blocking=True) for x in tensors)
        mark_dynamic(bounds)
        return TreeMask(positions_BT, bounds)
    starts_BT, index_T = starts_BT.to(device), index_T.to(device)
    is_same_BTT = starts_BT[:, :, None] == starts_BT[:, None, :]
    mask_BTT = is_same_BTT & (index_T[:, None] >= index_T)
    return TreeMask(index_T - starts_BT, mask_BTT[:, None])


def find_bounds(starts_BT: Tensor) -> Tensor:
    """Return the start of each sequence in the B * T tokens, padded with B * T; int32.

    The size is a power of two, so that few sizes occur.
    """
    is_start_BT = starts_BT == torch.arange(starts_BT.shape[1])
    begins = is_start_BT.flatten().nonzero()[:, 0].int()
    size = 1 << len(begins).bit_length()
    return F.pad(begins, (0, size - len(begins)), value=starts_BT.numel())


def build_masks(
    ids_BT: Tensor, cache: Cache | None, tree_mask: TreeMask | None, window: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return positions (T,) or (B, T), and the masks of layers without and with a window.

    A mask is bool (B or 1, 1, T, S), True where a query attends to a key, or the bounds of documents
    or of a cache's rows.
    None stands for plain causal attention, which layers with a window limit to the window
    themselves.

    window: the width of a window in tokens; 0 if no layer has one.
    """
    T = ids_BT.shape[1]
    device = ids_BT.device
    past = 0 if cache is None else cache.length
    positions = torch.arange(T, device=device) if cache is None else cache.next_positions(T)
    mask = None
    if tree_mask is not None:
        positions = tree_mask.positions_BT
        mask = tree_mask.attn_mask
        if mask.dim() == 1:
            return positions, mask, mask
    elif cache is not None and cache.bounds is not None and not window:
        mask = cache.bounds
    elif positions.dim() == 2:  # rows of different lengths, with one token each
        mask = (torch.arange(past + 1, device=device) <= positions)[:, None, None]
    elif past and T > 1:  # the lower right corner of the causal square
        mask = torch.ones(1, 1, T, past + T, dtype=torch.bool, device=device).tril(past)
    if not window or (cache is None and mask is None):
        return positions, mask, None
    keys = positions if cache is None else torch.arange(past + T, device=device)
    distance = positions[..., None] - keys[..., None, :]
    distance = distance.view(-1, 1, *distance.shape[-2:])
    in_window = distance < window
    return positions, mask, in_window & (distance >= 0 if mask is None else mask)
