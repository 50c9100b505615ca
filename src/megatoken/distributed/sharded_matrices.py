"""Let an optimizer compute with full hidden matrices when several processes hold the model.

Each matrix is assigned to one rank, its owner, so that the work is balanced. For a sharded matrix,
the owner receives all slices, computes the result, and sends each rank its slice of it. For a
replicated matrix, the owner computes the result and sends all of it to the others. Values are sent
in the dtype of the computation, so results equal those of a single process.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.system.device import Device
from megatoken.distributed.comm import peer_errors
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.distributed.parallelize import ShardedParams, local_slice
from megatoken.distributed.tensor_slice import Range, TensorSlice
from megatoken.model.gpt import GPT
from megatoken.optim.muon import WholeMatrices, list_hidden_matrices
from megatoken.optim.optimizer import Matrices, MatrixFn


class Matrix(NamedTuple):
    """A matrix, stored as consecutive rows of the parameter `name`, and its owner's rank."""

    name: str
    rows: Range
    columns: int
    owner: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows[1] - self.rows[0], self.columns)


class Overlap(NamedTuple):
    """The overlap of a matrix with the slice of a parameter that a rank holds.

    row, columns: first row of the overlap and its columns, in the matrix.
    local_row: first row of the overlap in the slice.
    sender: the rank that sends it to the owner, chosen among the ranks with the same slice.
    """

    matrix: Matrix
    row: int
    local_row: int
    n_rows: int
    columns: Range
    sender: int

    def slice_full(self, full: Tensor) -> Tensor:
        return full[self.row : self.row + self.n_rows, slice(*self.columns)]

    def slice_local(self, local: Tensor) -> Tensor:
        return local[self.local_row : self.local_row + self.n_rows]


def open_matrices(model: GPT, sharded: ShardedParams, device: Device) -> Matrices:
    """Return `Matrices` for the model's hidden layers.

    Their dtype is bf16 if that is the device's precision, else fp32.
    """
    rows = list_hidden_matrices(model)
    shapes = sharded.full_shapes
    dims = sharded.dims
    dtype = torch.bfloat16 if device.precision == "bf16" else torch.float32
    if dims.world_size == 1:
        return WholeMatrices(rows, dtype)
    matrices = assign_owners(rows, shapes, dims.world_size)
    if dims.is_unsharded:
        return ReplicatedMatrices(rows, matrices, dims, dtype)
    return ShardedMatrices(matrices, shapes, model.config, dims, device.torch_device, dtype)


def assign_owners(
    rows: Mapping[str, Sequence[int]], shapes: Mapping[str, tuple[int, ...]], world_size: int
) -> list[Matrix]:
    """List all matrices in the order of `rows`, each with a rank as its owner.

    Owners are assigned from the largest matrix down, each to the rank with the least work so far.

    rows: by parameter name, the number of rows of each matrix in it, as from
    `list_hidden_matrices`.
    """
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
    """`Matrices` of a model that every process holds in full. Processes only divide the work."""

    def __init__(
        self,
        rows: Mapping[str, Sequence[int]],
        matrices: Sequence[Matrix],
        dims: ParallelDims,
        dtype: torch.dtype,
    ) -> None:
        self.names = list(rows)
        self.dtype = dtype
        self._matrices = WholeMatrices(rows, dtype)
        self._dims = dims
        self._by_rank: list[list[int]] = [[] for _ in range(dims.dp_size)]
        for index, matrix in enumerate(matrices):
            self._by_rank[matrix.owner].append(index)

    def map(self, function: MatrixFn, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Apply `function` to full matrices, as in `Matrices`."""
        return self._matrices.map(lambda matrices: self._share(function, matrices), tensors)

    def _share(self, function: MatrixFn, matrices: list[Tensor]) -> list[Tensor]:
        results = list(matrices)
        sizes = [sum(matrices[index].numel() for index in indices) for indices in self._by_rank]
        sent = matrices[0].new_zeros(max(sizes))  # all_gather needs equal sizes
        owned = self._by_rank[self._dims.rank]
        for target, result in zip(
            self._split(sent, owned, matrices),
            function([matrices[index] for index in owned]),
            strict=True,
        ):
            target.copy_(result)
        received = sent.new_empty(len(sizes), len(sent))
        with peer_errors(self._dims):
            dist.all_gather(list(received.view(torch.uint8)), sent.view(torch.uint8))
        for flat, indices in zip(received, self._by_rank, strict=True):
            for index, result in zip(indices, self._split(flat, indices, matrices), strict=True):
                results[index] = result
        return results

    def _split(
        self, flat: Tensor, indices: Sequence[int], matrices: Sequence[Tensor]
    ) -> list[Tensor]:
        """Split a flat tensor into views with the shapes of the matrices at `indices`."""
        sizes = [matrices[index].numel() for index in indices]
        pieces = torch.split(flat[: sum(sizes)], sizes) if sizes else ()
        return [
            piece.view(matrices[index].shape) for piece, index in zip(pieces, indices, strict=True)
        ]


class ShardedMatrices:
    """`Matrices` of a model that is sharded over processes."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        shapes: Mapping[str, tuple[int, ...]],
        model_config: ModelConfig,
        dims: ParallelDims,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        self._dims = dims
        self._device = device
        ranks = range(dims.world_size)
        slices = {
            name: [
                local_slice(name, shapes[name], model_config, replace(dims, rank=rank))
                for rank in ranks
            ]
            for name in dict.fromkeys(matrix.name for matrix in matrices)
        }
        self._shapes = {
            name: by_rank[dims.rank].shape
            for name, by_rank in slices.items()
            if by_rank[dims.rank].n_rows
        }
        self.names = list(self._shapes)
        self._owned = [matrix for matrix in matrices if matrix.owner == dims.rank]
        # _local: for each owner, the overlaps of its matrices with this rank's slices. _remote: for
        # each rank, the overlaps of the matrices that this rank owns with that rank's slices.
        self._local: list[list[Overlap]] = [[] for _ in ranks]
        self._remote: list[list[Overlap]] = [[] for _ in ranks]
        for matrix in matrices:
            self._local[matrix.owner] += _find_overlaps(matrix, slices[matrix.name], dims.rank)
        for matrix in self._owned:
            for rank, overlaps in enumerate(self._remote):
                overlaps += _find_overlaps(matrix, slices[matrix.name], rank)
        self._sent = [
            [each for each in overlaps if each.sender == dims.rank] for overlaps in self._local
        ]
        self._received = [
            [each for each in overlaps if each.sender == rank]
            for rank, overlaps in enumerate(self._remote)
        ]

    def map(self, function: MatrixFn, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Apply `function` to full matrices, as in `Matrices`."""
        slices = dict(zip(self.names, tensors, strict=True))
        full = {matrix: self._empty(matrix.shape) for matrix in self._owned}
        self._exchange(
            [
                [each.slice_local(slices[each.matrix.name]) for each in overlaps]
                for overlaps in self._sent
            ],
            [
                [each.slice_full(full[each.matrix]) for each in overlaps]
                for overlaps in self._received
            ],
        )
        full = dict(zip(full, function(list(full.values())), strict=True))
        results = {name: self._empty(shape) for name, shape in self._shapes.items()}
        self._exchange(
            [
                [each.slice_full(full[each.matrix]) for each in overlaps]
                for overlaps in self._remote
            ],
            [
                [each.slice_local(results[each.matrix.name]) for each in overlaps]
                for overlaps in self._local
            ],
        )
        return list(results.values())

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self._device)

    def _exchange(
        self, sources: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]]
    ) -> None:
        """Send each rank the tensors in sources[rank], and receive its tensors in targets[rank]."""
        sent_bytes = [sum(tensor.nbytes for tensor in tensors) for tensors in sources]
        received_bytes = [sum(tensor.nbytes for tensor in tensors) for tensors in targets]
        empty = self._empty((0,))
        flat_sources = [tensor.reshape(-1) for tensors in sources for tensor in tensors]
        sent = torch.cat([empty, *flat_sources])
        received = self._empty((sum(received_bytes) // empty.element_size(),))
        with peer_errors(self._dims):
            dist.all_to_all_single(
                received.view(torch.uint8), sent.view(torch.uint8), received_bytes, sent_bytes
            )
        flat_targets = [target for tensors in targets for target in tensors]
        pieces = torch.split(received, [target.numel() for target in flat_targets])
        for target, piece in zip(flat_targets, pieces, strict=True):
            target.copy_(piece.view(target.shape))


def _find_overlaps(matrix: Matrix, slices: Sequence[TensorSlice], rank: int) -> list[Overlap]:
    """Return the overlaps of a matrix with the slice of `rank`.

    slices: for every rank, its slice of the matrix's parameter.
    """
    local = slices[rank]
    sender = matrix.owner if slices[matrix.owner] == local else slices.index(local)
    full = TensorSlice((matrix.rows,), (0, matrix.columns))
    return [Overlap(matrix, *overlap, sender) for overlap in full.overlaps(local)]
