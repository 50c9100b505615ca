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
from megatoken.checkpoint.manifest import CheckpointManifest, FileEntry, VerifiedFile
from megatoken.distributed.tensor_slice import TensorSlice
from megatoken.errors import CheckpointError, StorageError
from megatoken.system.atomic_write import MALFORMED

MODEL, OPTIMIZER = "model", "optimizer"  # the two files, or sets of files
Shape = tuple[int, ...]


def tensor_file_name(name: str, rank: int = 0, world_size: int = 1) -> str:
    """model.safetensors, or model-00003-of-00008.safetensors, counted from 0."""
    return (
        f"{name}.safetensors"
        if world_size == 1
        else f"{name}-{rank:05d}-of-{world_size:05d}.safetensors"
    )


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
        header = {
            "parts": json.dumps(ranges),
            "sizes": json.dumps({name: shapes[name] for name in tensors}),
        }
    save_file(dict(tensors), path, metadata=header)


class TensorReader:
    """Reads the tensors of one set of files of a checkpoint, by name, in any slice. shapes: whole shapes by name."""

    def __init__(self, folder: Path, manifest: CheckpointManifest, name: str) -> None:
        """Raises CheckpointError when there are no such files."""
        self._folder, self._manifest = folder, manifest
        self._files: dict[str, Any] = {}  # open, by name
        self._parts: dict[
            str, dict[str, TensorSlice]
        ] = {}  # by tensor: the slice in each file that has one
        self.shapes: dict[str, Shape] = {}
        files = [
            file
            for file in manifest.files
            if re.fullmatch(rf"{name}(-\d+-of-\d+)?\.safetensors", file)
        ]
        if not files:
            what = f"checkpoint holds no {tensor_file_name(name)}"
            raise CheckpointError(what, str(folder), "use another checkpoint")
        for file in files:
            with malformed(folder / file):
                self._open(file)
        for tensor, parts in self._parts.items():  # memory is taken only for what the files hold
            stored = sum(prod(part.shape) for part in parts.values())
            self._refuse_missing(tensor, prod(self.shapes[tensor]) - stored)

    def _open(self, file: str) -> None:
        """Add a file's tensors. Raises what its values raise when they are of other types or contradict each other."""
        opened: Any = safe_open(self._folder / file, framework="pt")
        header = opened.metadata() or {}
        self._files[file] = opened
        ranges, shapes = (
            json.loads(header.get("parts", "{}")),
            json.loads(header.get("sizes", "{}")),
        )
        for tensor in opened.keys():  # noqa: SIM118  # it is no mapping
            shape_in_file = tuple(opened.get_slice(tensor).get_shape())
            self.shapes[tensor] = shape = tuple(map(int, shapes.get(tensor) or shape_in_file))
            stored = TensorSlice.full(shape)
            if shape and tensor in ranges:
                rows, columns = ranges[tensor]
                rows = tuple((int(start), int(end)) for start, end in rows)
                stored = TensorSlice(rows, (int(columns[0]), int(columns[1])) if columns else None)
            if shape_in_file != (stored.shape if shape else ()) and len(shape) < 3:
                raise ValueError(f"{tensor} has shape {shape_in_file}, its slice {stored.shape}")
            self._parts.setdefault(tensor, {})[file] = stored

    def read(self, name: str, wanted: TensorSlice | None = None) -> Tensor:
        """A tensor, or a slice of it, on the CPU in its saved dtype. Raises CheckpointError if a part is in no file."""
        shape, parts = self.shapes[name], self._parts[name]
        wanted = wanted or TensorSlice.full(shape)
        file, stored = next(iter(parts.items()))
        if not shape or wanted == stored:
            tensor: Tensor = self._files[file].get_tensor(name)
            return tensor
        result = torch.empty(wanted.shape, dtype=self.dtype(name))
        self.fill({name: result}, {name: wanted}, share=slice(0))
        return result

    def dtype(self, name: str) -> torch.dtype:
        """The saved dtype of a tensor."""
        dtype: torch.dtype = self._files[next(iter(self._parts[name]))].get_tensor(name).dtype
        return dtype

    def fill(
        self,
        targets: Mapping[str, Tensor],
        slices: Mapping[str, TensorSlice],
        share: slice = slice(None),
    ) -> dict[str, FileEntry]:
        """Read tensors into `targets`, each in its slice (where none is given, whole), on any device.

        share: which of the files, by default all, are read once, to their ends, and verified; their entries are
        returned. Of the others only what is needed is read. Raises CheckpointError if a part is in no file, and
        DamagedError for a file that does not verify: targets then hold bytes of it.
        """
        wanted = {name: slices.get(name) or TensorSlice.full(self.shapes[name]) for name in targets}
        missing = {name: target.numel() for name, target in targets.items()}
        verified: dict[str, FileEntry] = {}
        for file in [*self._files][share]:
            opened = self._files[file]
            with VerifiedFile(self._folder / file, self._manifest.files[file]) as stream:
                stream.skip_header()
                for name in opened.offset_keys():  # as they are stored, without gaps
                    stored, mapped = self._parts[name][file], opened.get_tensor(name)  # not read
                    target = targets.get(name)
                    if (
                        target is not None
                        and wanted[name] == stored
                        and _has_bytes_of(target, mapped)
                    ):
                        values = target
                    else:
                        values = torch.empty_like(mapped)
                    stream.read_into(values.detach().reshape(-1).view(torch.uint8).numpy().data)
                    if target is not None:
                        missing[name] -= _copy_part(values, stored, target, wanted[name])
                verified[file] = stream.finish()
        for name, target in targets.items():
            for file, stored in self._parts[name].items():
                if file not in verified:
                    missing[name] -= _copy_part(
                        self._files[file].get_slice(name), stored, target, wanted[name]
                    )
            self._refuse_missing(name, missing[name])
        return verified

    def _refuse_missing(self, name: str, missing: int) -> None:
        if missing > 0:
            what = f"{missing:,} numbers of {name} are in no file"
            raise CheckpointError(what, str(self._folder), "use another checkpoint")


def _has_bytes_of(target: Tensor, stored: Tensor) -> bool:
    """Whether a tensor is in memory as the stored one is in its file."""
    return target.is_cpu and target.is_contiguous() and target.dtype == stored.dtype


def _copy_part(source: Any, stored: TensorSlice, target: Tensor, wanted: TensorSlice) -> int:
    """Copy what a stored part, a tensor or one still in its file, has of the wanted slice; return how many numbers."""
    if wanted == stored:
        target.copy_(source[...])
        return target.numel()
    start, copied = (wanted.columns or (0, 1))[0], 0
    for row, stored_row, n_rows, (first, end) in wanted.overlaps(stored):
        values, rows = source[stored_row : stored_row + n_rows], target[row : row + n_rows]
        if stored.columns is not None:
            rows = rows[:, first - start : end - start]
            values = values[:, first - stored.columns[0] : end - stored.columns[0]]
        rows.copy_(values)
        copied += n_rows * (end - first)
    return copied


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
        raise StorageError(
            "the target exists", str(target), "choose another --out, or remove it first"
        )
    if out.resolve() == source.resolve():
        raise StorageError("the target is the run itself", str(out), "choose another --out")

    def write_whole(name: str, path: Path) -> None:
        reader = TensorReader(folder, manifest, name)
        write_tensors(path, {tensor: reader.read(tensor) for tensor in reader.shapes})

    files: dict[str, FileWriter] = {
        tensor_file_name(name): partial(write_whole, name) for name in (MODEL, OPTIMIZER)
    }
    others = [name for name in manifest.files if not name.endswith(".safetensors")]
    files |= {name: partial(shutil.copyfile, folder / name) for name in others}
    needed_bytes = sum(entry.bytes for entry in manifest.files.values())
    return commit(out, manifest.step, files, meta=manifest.meta, needed_bytes=needed_bytes)
