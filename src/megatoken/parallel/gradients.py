"""The sum of all ranks' gradients, bucket by bucket, while the backward is still making others.

In: pairs of parameters, the one that a backward differentiates and the one that keeps the gradient: the same, a
low-precision copy and its fp32 master, or a split tensor and the part of it that is here. Out: after `finish` every
kept gradient is the sum over the ranks, the same bits on each. Only the last backward of a step is watched, so
gradients travel once a step whatever the accumulation.

Buckets are filled from the last parameter to the first, as a backward makes them (Li et al. 2020, PyTorch DDP).
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatoken.parallel.ranks import Ranks, naming_the_lost

BUCKET_BYTES = 25 << 20
Pair = tuple[Tensor, Tensor]  # what a backward differentiates, what keeps the gradient


class GradientSum:
    """Watches parameters while armed; `sent` counts the buckets of the last step."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        ranks: Ranks,
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._ranks, self._group = ranks, group
        self._buckets = fill_buckets(pairs, bucket_bytes)
        self._missing = [0] * len(self._buckets)
        self._under_way: list[tuple[int, Tensor, dist.Work]] = []
        self._armed = False
        self.sent = 0
        for number, bucket in enumerate(self._buckets):
            for pair in bucket:
                pair[0].register_post_accumulate_grad_hook(partial(self._take, number, pair))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The next backward is the last of the step."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._armed, self.sent = True, 0

    def _take(self, number: int, pair: Pair, _: Tensor) -> None:
        if not self._armed:
            return
        collect_gradient(*pair)
        self._missing[number] -= 1
        if self._missing[number] == 0:
            flat = torch.cat([kept.grad.view(-1) for _, kept in self._buckets[number]])  # type: ignore[union-attr]
            with naming_the_lost(self._ranks.topology):
                work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._under_way.append((number, flat, work))
            self.sent += 1

    def finish(self) -> None:
        """Wait for the sums and put them where the gradients were. Raises Fault(PEER) when a rank is gone."""
        self._armed = False
        assert self.sent == len(self._buckets), "a parameter had no gradient"
        for number, flat, work in self._under_way:
            with naming_the_lost(self._ranks.topology):
                work.wait()
            gradients = [kept.grad for _, kept in self._buckets[number] if kept.grad is not None]
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._under_way.clear()


def fill_buckets(pairs: Sequence[Pair], bucket_bytes: int) -> list[list[Pair]]:
    """Pairs from the last to the first in buckets that end with the one that fills them."""
    buckets: list[list[Pair]] = [[]]
    held = 0
    for pair in reversed(pairs):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(pair)
        held += pair[1].numel() * pair[1].element_size()
    return buckets


def collect_gradient(worker: Tensor, kept: Tensor) -> None:
    """Add the gradient of a low-precision copy or a split tensor to what keeps it, and clear it there; nothing where
    they are the same."""
    if worker is kept or worker.grad is None:
        return
    gradient = worker.grad
    if isinstance(worker, DTensor) and isinstance(gradient, DTensor):
        # Split as its weight is: some operations leave every neighbour with a share of the whole.
        gradient = gradient.redistribute(placements=worker.placements).to_local()
    if kept.grad is None:
        kept.grad = gradient.to(kept.dtype)
    else:
        kept.grad += gradient
    worker.grad = None
