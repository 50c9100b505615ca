"""Memory in large pages (2 MiB instead of 4 KiB): the processor finds them without reading tables from memory."""

import mmap
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

LINE = 64  # bytes from a multiple of which each tensor begins


def gather_in_large_pages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies of CPU tensors, one after another in large pages; the tensors themselves where there are none.

    What is read once a token comes about twice as fast.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or not tensors:
        return list(tensors)
    sizes = [-(-tensor.nbytes // LINE) * LINE for tensor in tensors]
    *starts, total = accumulate(sizes, initial=0)
    memory = mmap.mmap(-1, max(total, LINE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    return [
        whole[start : start + tensor.nbytes]
        .view(tensor.dtype)
        .view(tensor.shape)
        .copy_(tensor.detach())
        for start, tensor in zip(starts, tensors, strict=True)
    ]
