"""Allocate memory in large pages (2 MiB instead of 4 KiB), which need fewer page-table lookups."""

import mmap
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes


def gather_in_large_pages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy CPU tensors to contiguous memory in large pages.

    Weights that are read once per token are then read about twice as fast. Returns the tensors
    unchanged if the system has no large pages.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or not tensors:
        return list(tensors)
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    *starts, total = accumulate(sizes, initial=0)
    memory = mmap.mmap(-1, max(total, ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)  # owns the memory
    copies = []
    for start, tensor in zip(starts, tensors, strict=True):
        copy = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor.detach()))
    return copies
