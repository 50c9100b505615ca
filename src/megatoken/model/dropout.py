"""Dropout without random state: counter-based masks, as in Salmon et al. 2011.

Whether a value is dropped is a function of the seed, the step, the sequence's index in the global
batch, the layer and site, and the value's position and channel (in attention: head, query and key).
Therefore, the dropped values do not depend on the micro-batch, the number of processes, tensor
parallelism, recomputation or compilation.

A key is a 32-bit number stored as int64, so that multiplying keys cannot overflow. Overflow of
int32 is undefined in C++, and torch.compile on a CPU would give different masks.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

GOLDEN = 0x61C88647  # 2**32 - 2**32 / golden ratio, odd: neighbors differ in all bits
BITS = 0xFFFFFFFF


def sequence_keys(seed: int, step: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return dropout keys (count,) of sequences [first, first + count) in a step's global batch."""
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest()
    step_key = torch.full((), int.from_bytes(digest), device=device)
    return fold_in(step_key, spread(first, count, device))


def spread(first: int, count: int, device: torch.device) -> Tensor:
    """Return the integers [first, first + count) times an odd constant, modulo 2**32."""
    return torch.arange(first, first + count, device=device) * GOLDEN & BITS


def fold_in(key: Tensor, index: Tensor | int) -> Tensor:
    """Return a hash of each key and an index, as new keys.

    index: one number for all keys, or a tensor that broadcasts with `key`. The hash is the
    two-round 32-bit bijection of Wellons' hash prospector.
    """
    x = key ^ index
    x ^= x >> 16  # in place: attention's keys are the largest tensors of a step
    x *= 0x21F0AAAD
    x &= BITS
    x ^= x >> 15
    x *= 0x735A2D97
    x &= BITS
    x ^= x >> 15
    return x


class Module(nn.Module):
    """A module whose call returns a tensor."""

    __call__: Callable[..., Tensor]


class Dropout(Module):
    """Set values to 0 with probability p and divide the others by 1 - p.

    site: index of this module among the dropouts of its layer.
    """

    tp_rank = 0  # index of this rank's slice of dimension 1 (positions or heads)

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p = p
        self.site = site
        self.threshold = round(p * 2**32)  # keys are uniform over 32 bits

    def forward(self, keys_B: Tensor | None, x: Tensor) -> Tensor:
        """Apply dropout to x (B, ...) with one key per sequence; without keys, return x."""
        if keys_B is None:
            return x
        key = fold_in(keys_B, self.site)
        for dim in range(1, x.dim()):
            first = self.tp_rank * x.shape[1] if dim == 1 else 0
            key = fold_in(key[..., None], spread(first, x.shape[dim], x.device))
        return torch.where(key >= self.threshold, x / (1 - self.p), 0)
