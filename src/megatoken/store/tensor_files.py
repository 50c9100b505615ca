"""Read and write a checkpoint's tensors: full ones in a single file, or slices in a file per rank.

With slices, `NAME.index.json` says which file holds which rows and columns of each tensor. A reader
combines any slice it needs from the stored ones and opens no other files, so a checkpoint can be
read by any number of processes. Nothing is unpickled.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import CheckpointError
from megatoken.base.system.atomic_write import MALFORMED
from megatoken.distributed.parallelize import ShardedParams, local_slice
from megatoken.distributed.tensor_slice import TensorSlice
from megatoken.store.manifest import CheckpointManifest, FileEntry, VerifiedFile, read_errors

MODEL = "model"
OPTIMIZER = "optimizer"
FIX = "use another checkpoint"
Shape = tuple[int, ...]


def tensor_file_name(name: str, rank: int = 0, world_size: int = 1) -> str:
    """Return `NAME.safetensors`, or with several ranks `NAME-00003-of-00008.safetensors`.

    The number in the name is the rank, which starts at 0.
    """
    suffix = f"-{rank:05d}-of-{world_size:05d}" if world_size > 1 else ""
    return f"{name}{suffix}.safetensors"


def index_file_name(name: str) -> str:
    """Return the name of the index of a kind, which only sharded checkpoints have."""
    return f"{name}.index.json"


def write_index(
    path: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    sharded: ShardedParams,
    model_config: ModelConfig,
) -> None:
    """Write the index of a kind: a list of groups of tensors that all ranks slice alike.

    A group has `dtype`, `shape` of the full tensors, `slices`, which are rows and columns by file
    name, and `tensors`, their names.

    name: MODEL or OPTIMIZER. tensors: those of rank 0, which has a slice of each.
    """
    dims = sharded.dims
    groups: dict[Any, dict[str, Any]] = {}
    for tensor_name, tensor in tensors.items():
        owner = tensor_name.partition("/")[0]
        full_shape = sharded.full_shapes[owner]
        shape = full_shape if tensor.dim() else ()
        tp_dims = [replace(dims, dp_shard=1, rank=rank) for rank in range(dims.tp_size)]
        tp_slices = [local_slice(owner, full_shape, model_config, each) for each in tp_dims]
        key = (shape, tensor.dtype, *tp_slices)
        if key not in groups:
            slices = {}
            for rank in range(dims.world_size):
                there = replace(sharded, dims=replace(dims, rank=rank))
                part = local_slice(owner, full_shape, model_config, there.dims)
                if part.n_rows and there.is_first_copy(owner):
                    part = part if shape else TensorSlice.full(())
                    file = tensor_file_name(name, rank, dims.world_size)
                    slices[file] = [part.rows, part.columns]
            dtype = str(tensor.dtype).removeprefix("torch.")
            groups[key] = {"dtype": dtype, "shape": shape, "slices": slices, "tensors": []}
        groups[key]["tensors"].append(tensor_name)
    path.write_text(json.dumps([*groups.values()]))


class TensorReader:
    """Reads slices of the tensors in all files of one kind, such as the weights.

    shapes, dtypes: of the full tensors, by name.
    """

    def __init__(self, folder: Path, manifest: CheckpointManifest, name: str) -> None:
        """Read which tensors the files of a kind hold. Raises CheckpointError if there are none.

        name: MODEL or OPTIMIZER.
        """
        self._folder = folder
        self._manifest = manifest
        self._opened: dict[str, Any] = {}
        # Tensor -> file -> its slice there. Tensors of a group share the inner dict.
        self._slices: dict[str, dict[str, TensorSlice]] = {}
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        pattern = re.compile(rf"{name}(-\d+-of-\d+)?\.safetensors")
        self._files = [*filter(pattern.fullmatch, manifest.files)]
        index, file = index_file_name(name), tensor_file_name(name)
        if index in manifest.files:
            with malformed(folder / index):
                self._read_index(index)
        elif file in self._files:
            self._list_full(file)
        else:
            raise CheckpointError(f"checkpoint has no {file}", str(folder), FIX)

    def _read_index(self, index: str) -> None:
        """Add the tensors in an index. Raises any of MALFORMED."""
        entry = self._manifest.files[index]
        content = bytearray(entry.bytes)
        with VerifiedFile(self._folder / index, entry) as stream:
            stream.read_into(memoryview(content))
            stream.finish()
        for group in json.loads(content):
            shape = tuple(map(int, group["shape"]))
            dtype = torch.empty(0, dtype=getattr(torch, group["dtype"])).dtype
            slices = {
                file: TensorSlice(
                    tuple((int(start), int(end)) for start, end in rows),
                    (int(columns[0]), int(columns[1])) if columns else None,
                )
                for file, (rows, columns) in group["slices"].items()
            }
            n_stored = sum(prod(stored.shape) for stored in slices.values())
            for tensor in group["tensors"]:
                self._check_complete(tensor, prod(shape) - n_stored)
                self.shapes[tensor], self.dtypes[tensor] = shape, dtype
                self._slices[tensor] = slices

    def _list_full(self, file: str) -> None:
        """Add the tensors of a file of full tensors."""
        path = self._folder / file
        with read_errors(path), malformed(path):
            opened: Any = safe_open(path, framework="pt")
            self._opened[file] = opened
            for tensor in opened.keys():  # noqa: SIM118  # not a mapping
                self.shapes[tensor] = tuple(opened.get_slice(tensor).get_shape())
                self.dtypes[tensor] = opened.get_tensor(tensor).dtype  # mapped, not read
                self._slices[tensor] = {file: TensorSlice.full(self.shapes[tensor])}

    def _open(self, file: str) -> Any:
        """Return a file that is opened when it is first needed.

        Raises DamagedError if it cannot be read, and CheckpointError if it does not hold the slices
        in the index.
        """
        if file not in self._opened:
            path = self._folder / file
            expected = {
                tensor: slices[file].shape if self.shapes[tensor] else ()
                for tensor, slices in self._slices.items()
                if file in slices
            }
            with read_errors(path), malformed(path):
                opened: Any = safe_open(path, framework="pt")
                names = opened.keys()
                if {name: tuple(opened.get_slice(name).get_shape()) for name in names} != expected:
                    raise ValueError("its tensors are not those in the index")
            self._opened[file] = opened
        return self._opened[file]

    def read(self, name: str) -> Tensor:
        """Return a full tensor on the CPU in its saved dtype.

        Raises CheckpointError if the stored slices do not cover it.
        """
        for file in self._slices[name]:  # check before allocating memory
            self._open(file)
        result = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        self.fill({name: result}, {}, is_mine=lambda _: False)
        return result

    def fill(
        self,
        targets: Mapping[str, Tensor],
        slices: Mapping[str, TensorSlice],
        is_mine: Callable[[str], bool] = lambda _: True,
    ) -> dict[str, FileEntry]:
        """Read tensors into `targets` on any device, and return the entries of verified files.

        Raises CheckpointError if the stored slices do not cover a target, and DamagedError if a
        file is damaged; the targets may then hold damaged values.

        slices: by name, which slice a target is; targets without an entry are full tensors.
        is_mine: returns for a file name whether to read the file in full and verify it. From other
            files, only what the targets need is read.
        """
        wanted = {name: slices.get(name) or TensorSlice.full(self.shapes[name]) for name in targets}
        n_missing = {name: target.numel() for name, target in targets.items()}
        verified: dict[str, FileEntry] = {}
        for file in filter(is_mine, self._files):
            opened = self._open(file)
            with VerifiedFile(self._folder / file, self._manifest.files[file]) as stream:
                stream.skip_header()
                for name in opened.offset_keys():  # in stored order, without gaps
                    stored = self._slices[name][file]
                    mapped = opened.get_tensor(name)  # mapped, not read
                    target = targets.get(name)
                    values = torch.empty_like(mapped)
                    if target is not None and wanted[name] == stored and target.is_cpu:
                        # Read without a copy if the values are stored as the target holds them.
                        is_alike = target.is_contiguous() and target.dtype == mapped.dtype
                        values = target if is_alike else values
                    stream.read_into(values.detach().reshape(-1).view(torch.uint8).numpy().data)
                    if target is not None:
                        n_missing[name] -= _copy_overlap(values, stored, target, wanted[name])
                verified[file] = stream.finish()
        found: dict[tuple[int, TensorSlice], list[str]] = {}  # of a group, which has many tensors
        for name, target in targets.items():
            stored_slices = self._slices[name]
            key = (id(stored_slices), wanted[name])
            if key not in found:
                overlaps = wanted[name].overlaps
                found[key] = [file for file in stored_slices if any(overlaps(stored_slices[file]))]
            for file in found[key]:
                if n_missing[name] <= 0:  # every file of slices has its own copy of a scalar
                    break
                if file not in verified:
                    values, stored = self._open(file).get_slice(name), stored_slices[file]
                    n_missing[name] -= _copy_overlap(values, stored, target, wanted[name])
            self._check_complete(name, n_missing[name])
        return verified

    def _check_complete(self, name: str, n_missing: int) -> None:
        if n_missing > 0:
            what = f"{n_missing:,} values of {name} are in no file"
            raise CheckpointError(what, str(self._folder), FIX)


def _copy_overlap(source: Any, stored: TensorSlice, target: Tensor, wanted: TensorSlice) -> int:
    """Copy the overlap of a stored and a wanted slice, and return its number of elements.

    source: the stored slice, as a tensor or a lazy slice of safetensors.
    target: the wanted slice.
    """
    if wanted == stored:
        target.copy_(source[...])
        return target.numel()
    first_column = wanted.columns[0] if wanted.columns else 0
    n_copied = 0
    for row, stored_row, n_rows, (start, end) in wanted.overlaps(stored):
        values = source[stored_row : stored_row + n_rows]
        rows = target[row : row + n_rows]
        if stored.columns is not None:
            rows = rows[:, start - first_column : end - first_column]
            values = values[:, start - stored.columns[0] : end - stored.columns[0]]
        rows.copy_(values)
        n_copied += n_rows * (end - start)
    return n_copied


@contextmanager
def malformed(where: Path) -> Iterator[None]:
    """Convert errors caused by malformed content to CheckpointError.

    Content can be malformed even if its hash is valid.
    """
    try:
        yield
    except (*MALFORMED, RuntimeError, SafetensorError) as error:
        what = f"checkpoint is malformed: {type(error).__name__}: {error!s:.200}"
        raise CheckpointError(what, str(where), FIX) from error
