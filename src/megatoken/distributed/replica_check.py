"""Detect replicas whose weights or optimizer state differ, after a memory error or on a bad device.

Every process sums the bits of its tensors as integers; all sums are gathered and compared.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatoken.console import format_count
from megatoken.distributed.comm import Comm


@dataclass(frozen=True, slots=True)
class Divergence:
    """Replicas that differ.

    ranks: those that differ from the majority, or all ranks if there is no majority.
    """

    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    message: str


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as int64, on its device. Any single bit flip changes it."""
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # a view as int64 needs an aligned address
    raw = flat.view(torch.uint8)
    n_aligned = raw.numel() // 8 * 8
    # On a CPU, summing 8 bytes at a time is 20 times as fast as 4.
    return raw[:n_aligned].view(torch.int64).sum() + raw[n_aligned:].sum()


def compare_replicas(
    tensors: Mapping[str, Tensor], part: Hashable, comm: Comm
) -> Divergence | None:
    """Compare the named tensors of all processes that hold the same `part`.

    A collective with the same result on all ranks; waits for the device once.
    """
    sums: list[int] = torch.stack([checksum(tensor) for tensor in tensors.values()]).tolist()
    return find_divergence(list(tensors), comm.gather((part, sums)))


def find_divergence(
    names: Sequence[str], reports: Sequence[tuple[Hashable, Sequence[int]]]
) -> Divergence | None:
    """Return the first replicas that differ, or None. reports: part and checksums of every rank."""
    for part in dict.fromkeys(part for part, _ in reports):
        replicas = {
            rank: tuple(sums) for rank, (rank_part, sums) in enumerate(reports) if rank_part == part
        }
        common, count = Counter(replicas.values()).most_common(1)[0]
        if count == len(replicas):
            continue
        columns = zip(*replicas.values(), strict=True)
        tensors = tuple(
            name for name, sums in zip(names, columns, strict=False) if len(set(sums)) > 1
        )
        where = tensors[0]
        if len(tensors) > 1:
            where = f"{format_count(len(tensors), 'tensor')}, the first {where}"
        has_majority = 2 * count > len(replicas)
        ranks = tuple(rank for rank, sums in replicas.items() if sums != common or not has_majority)
        listed = " and ".join(map(str, ranks))
        if has_majority:
            verb = f"rank {listed} differs" if len(ranks) == 1 else f"ranks {listed} differ"
            message = f"{verb} from the other {format_count(count, 'replica')} in {where}"
        else:
            message = (
                f"ranks {listed} are replicas and differ in {where}; which is wrong is unknown"
            )
        return Divergence(ranks, tensors, message)
    return None
