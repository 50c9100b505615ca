"""Sums of gradients whose bits do not depend on how many ranks the terms lie on.

In: gradients of the micro-batches of a step, in order. Out: their sum, added in halves: the first half's sum and the
second's, each again in halves as long as their number is even, and one after another where it is odd. Ranks hold
consecutive terms, so for 1, 2, 4, ... ranks these are the same additions, within a rank or across. It costs a copy of
the gradients for every halving and sends them whole; for runs that ask to be deterministic.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatoken.parallel.ranks import Ranks, naming_the_lost


class HalvesSum:
    """The gradients of `terms` backwards, of which each leaves its own at `kept`."""

    def __init__(self, kept: Sequence[Tensor], terms: int) -> None:
        self._kept = kept
        self._odd = terms // (terms & -terms)  # so many are added one after another, by the backward itself
        self._backwards = 0
        self._sums: list[list[Tensor]] = []  # each of twice as many terms as the next, or more

    def take(self) -> None:
        """A backward has ended."""
        self._backwards += 1
        groups, rest = divmod(self._backwards, self._odd)
        if rest:
            return
        self._sums.append([tensor.grad for tensor in self._kept if tensor.grad is not None])
        for tensor in self._kept:
            tensor.grad = None
        while groups % 2 == 0:
            second = self._sums.pop()
            torch._foreach_add_(self._sums[-1], second)
            groups //= 2

    def finish(self, ranks: Ranks) -> None:
        """Put the sum over all terms of all ranks where the gradients were. Raises Fault(PEER) when a rank is gone."""
        (mine,) = self._sums
        for tensor, gradient in zip(self._kept, mine, strict=True):
            tensor.grad = gradient if ranks.alone else add_across(gradient, ranks)


def add_across(mine: Tensor, ranks: Ranks) -> Tensor:
    """The sum of every rank's tensor, in halves."""
    parts = [torch.empty_like(mine) for _ in range(ranks.topology.world_size)]
    with naming_the_lost(ranks.topology):
        dist.all_gather(parts, mine)
    return add_halves(parts)


def add_halves(parts: Sequence[Tensor]) -> Tensor:
    """Their sum: of two halves while their number is even, else one after another."""
    half, odd = divmod(len(parts), 2)
    if not odd:
        return add_halves(parts[:half]) + add_halves(parts[half:])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
