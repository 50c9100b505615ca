"""Whole matrices of hidden layers for an optimizer, where processes hold copies or slices of them.

Every matrix has an owner, chosen so that all processes compute about as much. Of sharded matrices it receives the
slices, computes, and sends everyone's slices of the result back; of replicated ones it has all and sends the result.
Numbers travel in the dtype of the computation, so nothing differs from one process but the order of the work.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatoken.config.model_config import ModelConfig
from megatoken.distributed.comm import peer_errors
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.distributed.parallelize import ShardedParams, local_slice
from megatoken.distributed.tensor_slice import Range, TensorSlice
from megatoken.model.gpt import GPT
from megatoken.optim.muon import Matrices, MatrixFn, WholeMatrices, list_hidden_matrices
from megatoken.system.device import Device


class Matrix(NamedTuple):
    """Consecutive rows of a parameter, and the rank that computes them."""

    name: str
    rows: Range
    columns: int
    owner: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows[1] - self.rows[0], self.columns)


class Part(NamedTuple):
    """What a rank's slice has of a matrix: its rows from `row` are the slice's from `local_row`."""

    matrix: Matrix
    row: int
    local_row: int
    n_rows: int
    columns: Range
    sender: int  # to the owner: of the ranks with this slice

    def of_whole(self, whole: Tensor) -> Tensor:
        return whole[self.row : self.row + self.n_rows, slice(*self.columns)]

    def of_slice(self, local: Tensor) -> Tensor:
        return local[self.local_row : self.local_row + self.n_rows]


def open_matrices(model: GPT, sharded: ShardedParams, device: Device) -> Matrices:
    """Access to the whole matrices of a model of which this process holds copies or slices.

    They are computed in bf16 where the device trains in it, else in fp32.
    """
    rows, shapes, dims = list_hidden_matrices(model), sharded.full_shapes, sharded.dims
    dtype = torch.bfloat16 if device.precision == "bf16" else torch.float32
    if dims.dp_size * dims.tp_size == 1:
        return WholeMatrices(rows, dtype)
    matrices = assign_owners(rows, shapes, dims.dp_size * dims.tp_size)
    if dims.is_unsharded:
        return ReplicatedMatrices(rows, matrices, dims, dtype)
    return ShardedMatrices(matrices, shapes, model.config, dims, device.torch_device, dtype)


def assign_owners(
    rows: Mapping[str, Sequence[int]], shapes: Mapping[str, tuple[int, ...]], world_size: int
) -> list[Matrix]:
    """All matrices in order, the largest ones given first, each to the rank with the least work so far."""
    matrices = []
    for name, sizes in rows.items():
        start = 0
        for size in sizes:
            matrices.append(Matrix(name, (start, start + size), shapes[name][1], 0))
            start += size
    work = [min(matrix.shape) * matrix.shape[0] * matrix.shape[1] for matrix in matrices]
    loads = [(0, rank) for rank in range(world_size)]
    for index in sorted(range(len(matrices)), key=lambda index: -work[index]):
        load, rank = heapq.heappop(loads)
        matrices[index] = matrices[index]._replace(owner=rank)
        heapq.heappush(loads, (load + work[index], rank))
    return matrices


class ReplicatedMatrices:
    """`Matrices` that every process has whole."""

    def __init__(
        self,
        rows: Mapping[str, Sequence[int]],
        matrices: Sequence[Matrix],
        dims: ParallelDims,
        dtype: torch.dtype,
    ) -> None:
        self._whole, self.names, self.dtype, self._dims = (
            WholeMatrices(rows, dtype),
            list(rows),
            dtype,
            dims,
        )
        self._by_rank: list[list[int]] = [[] for _ in range(dims.dp_size)]
        for index, matrix in enumerate(matrices):
            self._by_rank[matrix.owner].append(index)

    def map(self, function: MatrixFn, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As in `Matrices`."""
        return self._whole.map(lambda matrices: self._share(function, matrices), tensors)

    def _share(self, function: MatrixFn, matrices: list[Tensor]) -> list[Tensor]:
        own = function([matrices[index] for index in self._by_rank[self._dims.rank]])
        sizes = [[matrices[index].numel() for index in indices] for indices in self._by_rank]
        sent = matrices[0].new_zeros(
            max(map(sum, sizes))
        )  # as many from each rank, as all_gather wants
        for piece, result in zip(
            torch.split(sent, _pad(sizes[self._dims.rank], len(sent))), own, strict=False
        ):
            piece.view(result.shape).copy_(result)
        received = sent.new_empty(len(sizes), len(sent))
        with peer_errors(_dist_env(self._dims)):
            dist.all_gather(list(received.view(torch.uint8)), sent.view(torch.uint8))
        results = list(matrices)
        for flat, indices, counts in zip(received, self._by_rank, sizes, strict=True):
            for index, piece in zip(
                indices, torch.split(flat, _pad(counts, len(flat))), strict=False
            ):
                results[index] = piece.view(matrices[index].shape)
        return results


class ShardedMatrices:
    """`Matrices` of which processes hold slices."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        shapes: Mapping[str, tuple[int, ...]],
        model_config: ModelConfig,
        dims: ParallelDims,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._dims, self._device, self.dtype = dims, device, dtype
        world = [replace(dims, rank=rank) for rank in range(dims.dp_size * dims.tp_size)]
        slices = {
            name: [local_slice(name, shapes[name], model_config, each) for each in world]
            for name in dict.fromkeys(matrix.name for matrix in matrices)
        }
        self._shapes = {
            name: ranks[dims.rank].shape
            for name, ranks in slices.items()
            if ranks[dims.rank].n_rows
        }
        self.names = list(self._shapes)
        self._owned = [matrix for matrix in matrices if matrix.owner == dims.rank]
        # What this rank has of each owner's matrices, and what each rank has of those that this one owns.
        self._local: list[list[Part]] = [[] for _ in world]
        self._remote: list[list[Part]] = [[] for _ in world]
        for matrix in matrices:
            self._local[matrix.owner] += _find_parts(matrix, slices[matrix.name], dims.rank)
        for matrix in self._owned:
            for rank, parts in enumerate(self._remote):
                parts += _find_parts(matrix, slices[matrix.name], rank)
        self._sent = [[part for part in parts if part.sender == dims.rank] for parts in self._local]
        self._received = [
            [part for part in parts if part.sender == rank]
            for rank, parts in enumerate(self._remote)
        ]

    def map(self, function: MatrixFn, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As in `Matrices`."""
        slices = dict(zip(self.names, tensors, strict=True))
        wholes = {matrix: self._empty(matrix.shape) for matrix in self._owned}
        self._exchange(
            [[part.of_slice(slices[part.matrix.name]) for part in parts] for parts in self._sent],
            [[part.of_whole(wholes[part.matrix]) for part in parts] for parts in self._received],
        )
        wholes = dict(zip(wholes, function(list(wholes.values())), strict=True))
        results = {name: self._empty(shape) for name, shape in self._shapes.items()}
        self._exchange(
            [[part.of_whole(wholes[part.matrix]) for part in parts] for parts in self._remote],
            [[part.of_slice(results[part.matrix.name]) for part in parts] for parts in self._local],
        )
        return list(results.values())

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self._device)

    def _exchange(
        self, sources: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]]
    ) -> None:
        """Copy the sources for each rank to that rank's targets for this one."""
        sizes = [
            [sum(tensor.nbytes for tensor in tensors) for tensors in ranks]
            for ranks in (sources, targets)
        ]
        empty = self._empty((0,))
        sent = torch.cat(
            [empty, *(tensor.reshape(-1) for tensors in sources for tensor in tensors)]
        )
        received = self._empty((sum(sizes[1]) // empty.element_size(),))
        with peer_errors(_dist_env(self._dims)):
            dist.all_to_all_single(
                received.view(torch.uint8), sent.view(torch.uint8), sizes[1], sizes[0]
            )
        flat = [target for tensors in targets for target in tensors]
        for target, piece in zip(
            flat, torch.split(received, [target.numel() for target in flat]), strict=True
        ):
            target.copy_(piece.view(target.shape))


def _pad(counts: list[int], total: int) -> list[int]:
    """The counts and what is missing to `total`."""
    return [*counts, total - sum(counts)]


def _find_parts(matrix: Matrix, slices: Sequence[TensorSlice], rank: int) -> list[Part]:
    """What a rank's slice has of a matrix; slices: of all ranks."""
    own = slices[rank]
    sender = matrix.owner if slices[matrix.owner] == own else slices.index(own)
    whole = TensorSlice((matrix.rows,), (0, matrix.columns))
    return [Part(matrix, *found, sender) for found in whole.overlaps(own)]


def _dist_env(dims: ParallelDims) -> DistEnv:
    """For messages."""
    return DistEnv(rank=dims.rank, world_size=dims.dp_size * dims.tp_size)
