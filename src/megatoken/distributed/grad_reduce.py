"""Sum gradients over replicas: in buckets during the backward, or pairwise and reproducibly."""

from collections.abc import Sequence
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor

from megatoken.base.system.torch_compat import foreach_add, foreach_copy
from megatoken.distributed.comm import Comm, peer_errors
from megatoken.distributed.tensor_slice import is_dtensor

BUCKET_BYTES = 25 << 20
COLLECT_BYTES = 256 << 20  # fp32 gradients held at once before they are added
# The parameter that gets a gradient in the backward, and the local one that the optimizer updates.
# They are the same tensor, a low-precision copy and its fp32 master weight, or a DTensor and its
# local tensor.
GradPair = tuple[Tensor, Tensor]


class GradBucketReducer:
    """All-reduce gradients in buckets while the backward still runs (Li et al. 2020, DDP).

    Only the backward that follows `begin` communicates. It reduces the sums of the gradients of all
    micro-batches of the step.
    """

    def __init__(
        self, pairs: Sequence[GradPair], comm: Comm, group: dist.ProcessGroup | None = None
    ) -> None:
        self._comm = comm
        self._group = group
        self._buckets = fill_buckets(pairs, BUCKET_BYTES)
        # Gradients that each bucket still waits for; empty except during the last backward.
        self._n_missing: list[int] = []
        self._pending: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        for index, bucket in enumerate(self._buckets):
            for trained, _ in bucket:
                hook = partial(self._on_gradient, index)
                trained.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Reduce gradients during the next backward, which must be the step's last."""
        self._n_missing = [len(bucket) for bucket in self._buckets]

    def _on_gradient(self, index: int, _: Tensor) -> None:
        if not self._n_missing:
            return
        self._n_missing[index] -= 1
        if self._n_missing[index] == 0:
            self._reduce(index)

    def _reduce(self, index: int) -> None:
        collect_gradients(self._buckets[index])
        gradients = [local.grad for _, local in self._buckets[index] if local.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        with peer_errors(self._comm.dist_env):
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._pending.append((work, flat, gradients))

    def finish(self) -> None:
        """Wait for the all-reduces and copy their results to the gradients. Raises PeerError."""
        for index, n_missing in enumerate(self._n_missing):
            if n_missing:  # the objective does not use some parameters, on any rank
                self._reduce(index)
        for work, flat, gradients in self._pending:
            with peer_errors(self._comm.dist_env):
                work.wait()
            copy_from_flat(flat, gradients)
        self._n_missing = []
        self._pending = []


def fill_buckets(pairs: Sequence[GradPair], bucket_bytes: int) -> list[list[GradPair]]:
    """Group parameters into buckets of at least `bucket_bytes`, starting with the last parameter.

    A backward produces the gradients in approximately this order.
    """
    buckets: list[list[GradPair]] = [[]]
    size = 0
    for pair in reversed(pairs):
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(pair)
        size += pair[1].numel() * pair[1].element_size()
    return buckets


def copy_from_flat(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    """Split a flat tensor into consecutive pieces and copy them to the gradients."""
    pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def collect_gradients(pairs: Sequence[GradPair]) -> None:
    """Move the gradients of trained parameters to their local ones, adding to those there.

    A pair that is one tensor is skipped. On CUDA, many gradients are converted and added per launch,
    because a launch takes longer than most of them.
    """
    for bucket in fill_buckets(pairs, COLLECT_BYTES):
        casts: list[tuple[Tensor, Tensor]] = []
        sums: list[tuple[Tensor, Tensor]] = []
        for trained, local in bucket:
            gradient = trained.grad
            if trained is local or gradient is None:
                continue
            if is_dtensor(trained) and is_dtensor(gradient):
                # Some operations leave partial sums on every tensor-parallel rank.
                gradient = gradient.redistribute(placements=trained.placements).to_local()
            trained.grad = None
            if gradient.dtype != local.dtype and (local.grad is None or local.is_cuda):
                casts.append((torch.empty_like(local), gradient))
                gradient = casts[-1][0]
            if local.grad is None:
                local.grad = gradient
            else:
                sums.append((local.grad, gradient))
        if casts:
            foreach_copy(*zip(*casts, strict=True))
        if sums:
            foreach_add(*zip(*sums, strict=True))


class PairwiseGradSum:
    """Sum gradients over micro-batches and ranks with the same bits on 1, 2, 4, ... ranks.

    The gradients of all micro-batches are added in a binary tree. If their number is even, the
    first and second half are summed separately, in the same way, and the two sums are added. If it
    is odd, the gradients are added one by one. Each rank holds consecutive micro-batches, so a
    number of ranks that is a power of 2 does not change the tree. It needs memory for a copy of the
    gradients per level of the tree, and gathers the sums of all ranks on every rank.
    """

    def __init__(self, local_params: Sequence[Tensor], micro_batches: int) -> None:
        self._local_params = local_params
        # How many micro-batches in a row the backward itself sums: the odd factor of their number.
        self._n_sequential = micro_batches // (micro_batches & -micro_batches)
        self._n_backwards = 0
        self._params_with_grad: list[Tensor] = []
        self._sums: list[list[Tensor]] = []  # each sums at least twice as many as the next

    def add(self) -> None:
        """Add the gradients of a micro-batch to the sums. Call it after each backward."""
        self._n_backwards += 1
        n_sums, remainder = divmod(self._n_backwards, self._n_sequential)
        if remainder:
            return
        self._params_with_grad = [param for param in self._local_params if param.grad is not None]
        self._sums.append([param.grad for param in self._local_params if param.grad is not None])
        for param in self._local_params:
            param.grad = None
        while n_sums % 2 == 0:
            second_half = self._sums.pop()
            for total, gradient in zip(self._sums[-1], second_half, strict=True):
                total += gradient
            n_sums //= 2

    def finish(self, comm: Comm) -> None:
        """Set each parameter's gradient to the sum over all micro-batches and ranks.

        Raises PeerError.
        """
        (sums,) = self._sums
        for param, gradient in zip(self._params_with_grad, sums, strict=True):
            terms = [gradient]
            if not comm.is_single_process:
                terms = [torch.empty_like(gradient) for _ in range(comm.dist_env.world_size)]
                with peer_errors(comm.dist_env):
                    dist.all_gather(terms, gradient)
            param.grad = sum_pairwise(terms)


def sum_pairwise(terms: Sequence[Tensor]) -> Tensor:
    """Sum tensors: an even number as the sum of its two halves, an odd number one by one."""
    half, odd = divmod(len(terms), 2)
    if odd:
        return reduce(torch.add, terms)
    return sum_pairwise(terms[:half]) + sum_pairwise(terms[half:])
