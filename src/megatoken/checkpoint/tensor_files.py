"""Tensors of a checkpoint on disk, in safetensors: whole in one file, or as slices in a file per rank.

A file of slices states in its header which slice of the whole each tensor is (`parts`: row and column ranges, `sizes`:
whole shapes). Any slice of a tensor is read from whatever slices hold it, so that a checkpoint depends neither on the
number of processes that wrote it nor on the number that read it. Nothing is unpickled.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatoken.checkpoint.commit import FileWriter, commit, find_checkpoint, step_folder
from megatoken.checkpoint.manifest import CheckpointManifest
from megatoken.distributed.tensor_slice import TensorSlice
from megatoken.errors import CheckpointError, StorageError
from megatoken.system.atomic_write import MALFORMED

MODEL, OPTIMIZER = "model", "optimizer"  # the two files, or sets of files
Shape = tuple[int, ...]


def tensor_file_name(name: str, rank: int = 0, world_size: int = 1) -> str:
    """model.safetensors, or model-00003-of-00008.safetensors, counted from 0."""
    return f"{name}.safetensors" if world_size == 1 else f"{name}-{rank:05d}-of-{world_size:05d}.safetensors"


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    slices: Mapping[str, TensorSlice] | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> None:
    """Write CPU tensors, whole or, if `slices` and the whole `shapes` are given, in slices. Raises what Rust raises."""
    header = None
    if slices is not None and shapes is not None:
        ranges = {name: [slices[name].rows, slices[name].columns] for name in tensors}
        header = {"parts": json.dumps(ranges), "sizes": json.dumps({name: shapes[name] for name in tensors})}
    save_file(dict(tensors), path, metadata=header)


class TensorReader:
    """Reads the tensors of one set of files of a checkpoint, by name, in any slice. shapes: whole shapes by name."""

    def __init__(self, folder: Path, manifest: CheckpointManifest, name: str) -> None:
        """Raises CheckpointError when there are no such files."""
        self._folder = folder
        self._parts: dict[str, list[tuple[Any, TensorSlice]]] = {}  # by tensor: (open file, the slice in it)
        self.shapes: dict[str, Shape] = {}
        files = [file for file in manifest.files if re.fullmatch(rf"{name}(-\d+-of-\d+)?\.safetensors", file)]
        if not files:
            what = f"checkpoint holds no {tensor_file_name(name)}"
            raise CheckpointError(what, str(folder), "use another checkpoint")
        for file in files:
            with malformed(folder / file):
                self._open(folder / file)
        for tensor, parts in self._parts.items():  # memory is taken only for what the files hold
            self._refuse_missing(tensor, prod(self.shapes[tensor]) - sum(prod(stored.shape) for _, stored in parts))

    def _open(self, path: Path) -> None:
        """Add a file's tensors. Raises what its values raise when they are of other types or contradict each other."""
        opened: Any = safe_open(path, framework="pt")
        header = opened.metadata() or {}
        ranges, shapes = json.loads(header.get("parts", "{}")), json.loads(header.get("sizes", "{}"))
        for tensor in opened.keys():  # noqa: SIM118  # it is no mapping
            shape_in_file = tuple(opened.get_slice(tensor).get_shape())
            self.shapes[tensor] = shape = tuple(map(int, shapes.get(tensor) or shape_in_file))
            stored = TensorSlice.full(shape)
            if tensor in ranges:
                rows, columns = ranges[tensor]
                rows = tuple((int(start), int(end)) for start, end in rows)
                stored = TensorSlice(rows, (int(columns[0]), int(columns[1])) if columns else None)
            if shape_in_file != (stored.shape if shape else ()) and len(shape) < 3:
                raise ValueError(f"{tensor} has shape {shape_in_file}, its slice {stored.shape}")
            self._parts.setdefault(tensor, []).append((opened, stored))

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, which has a dimension at least."""
        return str(self._parts[name][0][0].get_slice(name)[:0].dtype).removeprefix("torch.")

    def read(self, name: str, wanted: TensorSlice | None = None) -> Tensor:
        """A tensor, or a slice of it, on the CPU in its saved dtype. Raises CheckpointError if a part is in no file."""
        shape, parts = self.shapes[name], self._parts[name]
        wanted = wanted or TensorSlice.full(shape)
        file, stored = parts[0]
        if not shape or wanted == stored:
            tensor: Tensor = file.get_tensor(name)
            return tensor
        start, _ = wanted.columns or (0, 1)
        missing = prod(wanted.shape)
        result = torch.empty(wanted.shape, dtype=file.get_slice(name)[:0].dtype)
        for file, stored in parts:
            for row, stored_row, n_rows, (first, end) in wanted.overlaps(stored):
                values, target = file.get_slice(name)[stored_row : stored_row + n_rows], result[row : row + n_rows]
                if stored.columns is not None:
                    target = target[:, first - start : end - start]
                    values = values[:, first - stored.columns[0] : end - stored.columns[0]]
                target.copy_(values)
                missing -= n_rows * (end - first)
        self._refuse_missing(name, missing)
        return result

    def _refuse_missing(self, name: str, missing: int) -> None:
        if missing > 0:
            what = f"{missing:,} numbers of {name} are in no file"
            raise CheckpointError(what, str(self._folder), "use another checkpoint")


@contextmanager
def malformed(where: Path) -> Iterator[None]:
    """Turn what a value of another type or size raises inside into a CheckpointError: hashes prove no authorship."""
    try:
        yield
    except (*MALFORMED, RuntimeError, SafetensorError) as error:
        what = f"checkpoint is malformed: {type(error).__name__}: {error!s:.200}"
        raise CheckpointError(what, str(where), "use another checkpoint") from error


def consolidate(source: Path, out: Path, warn: Callable[[str], None]) -> Path:
    """Write a run's newest valid checkpoint, or a single one, to `out/step-N` with whole tensors; return that folder.

    Only other programs need it. Raises CheckpointError when there is no valid checkpoint, StorageError when `out` is
    the source, when that folder exists, because it may be another run's, or cannot be written.
    """
    folder, manifest = find_checkpoint(source, warn)
    if os.path.lexists(target := step_folder(out, manifest.step)):
        raise StorageError("the target exists", str(target), "choose another --out, or remove it first")
    if out.resolve() == source.resolve():
        raise StorageError("the target is the run itself", str(out), "choose another --out")

    def write_whole(name: str, path: Path) -> None:
        reader = TensorReader(folder, manifest, name)
        write_tensors(path, {tensor: reader.read(tensor) for tensor in reader.shapes})

    files: dict[str, FileWriter] = {tensor_file_name(name): partial(write_whole, name) for name in (MODEL, OPTIMIZER)}
    others = [name for name in manifest.files if not name.endswith(".safetensors")]
    files |= {name: partial(shutil.copyfile, folder / name) for name in others}
    needed_bytes = sum(entry.bytes for entry in manifest.files.values())
    return commit(out, manifest.step, files, meta=manifest.meta, needed_bytes=needed_bytes)
