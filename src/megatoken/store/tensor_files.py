"""Read and write a checkpoint's tensors: full ones in a single file, or slices in a file per rank.

The header of a file of slices holds the rows and columns of each slice (`parts`) and the shapes of
the full tensors (`sizes`). A reader combines any slice it needs from the stored ones, so a
checkpoint can be read by any number of processes. Nothing is unpickled.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatoken.base.errors import CheckpointError
from megatoken.base.system.atomic_write import MALFORMED
from megatoken.distributed.tensor_slice import TensorSlice
from megatoken.store.manifest import CheckpointManifest, FileEntry, VerifiedFile

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


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    slices: Mapping[str, TensorSlice] | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> None:
    """Write CPU tensors to a file: full ones, or slices. Raises SafetensorError.

    slices: which slice of the full tensor each tensor is, by name; None for full tensors.
    shapes: shapes of the full tensors, by name.
    """
    header = None
    if slices is not None and shapes is not None:
        ranges = {name: [slices[name].rows, slices[name].columns] for name in tensors}
        sizes = {name: shapes[name] for name in tensors}
        header = {"parts": json.dumps(ranges), "sizes": json.dumps(sizes)}
    save_file(dict(tensors), path, metadata=header)


class TensorReader:
    """Reads slices of the tensors in all files of one kind, such as the weights.

    shapes: shapes of the full tensors, by name.
    """

    def __init__(self, folder: Path, manifest: CheckpointManifest, name: str) -> None:
        """Open the files of a kind. Raises CheckpointError if there are none.

        name: MODEL or OPTIMIZER.
        """
        self._folder = folder
        self._manifest = manifest
        self._files: dict[str, Any] = {}
        self._slices: dict[str, dict[str, TensorSlice]] = {}  # tensor -> file -> its slice there
        self.shapes: dict[str, Shape] = {}
        pattern = re.compile(rf"{name}(-\d+-of-\d+)?\.safetensors")
        for file in filter(pattern.fullmatch, manifest.files):
            with malformed(folder / file):
                self._open(file)
        if not self._files:
            what = f"checkpoint has no {tensor_file_name(name)}"
            raise CheckpointError(what, str(folder), FIX)
        for tensor, slices in self._slices.items():  # check before allocating memory
            n_stored = sum(prod(stored.shape) for stored in slices.values())
            self._check_complete(tensor, prod(self.shapes[tensor]) - n_stored)

    def _open(self, file: str) -> None:
        """Add a file's tensors. Raises any of MALFORMED if the header is inconsistent."""
        opened: Any = safe_open(self._folder / file, framework="pt")
        self._files[file] = opened
        header = opened.metadata() or {}
        ranges = json.loads(header.get("parts", "{}"))
        shapes = json.loads(header.get("sizes", "{}"))
        for tensor in opened.keys():  # noqa: SIM118  # not a mapping
            shape_in_file = tuple(opened.get_slice(tensor).get_shape())
            shape = tuple(map(int, shapes.get(tensor) or shape_in_file))
            self.shapes[tensor] = shape
            stored = TensorSlice.full(shape)
            if shape and tensor in ranges:
                rows, columns = ranges[tensor]
                stored = TensorSlice(
                    tuple((int(start), int(end)) for start, end in rows),
                    (int(columns[0]), int(columns[1])) if columns else None,
                )
            if shape_in_file != (stored.shape if shape else ()):
                raise ValueError(f"{tensor} has shape {shape_in_file}, its slice {stored.shape}")
            self._slices.setdefault(tensor, {})[file] = stored

    def read(self, name: str) -> Tensor:
        """Return a full tensor on the CPU in its saved dtype.

        Raises CheckpointError if the stored slices do not cover it.
        """
        shape = self.shapes[name]
        result = torch.empty(shape, dtype=self.dtype(name))
        self.fill({name: result}, {}, share=slice(0))
        return result

    def dtype(self, name: str) -> torch.dtype:
        """Return the saved dtype of a tensor."""
        file = next(iter(self._slices[name]))
        dtype: torch.dtype = self._files[file].get_tensor(name).dtype
        return dtype

    def fill(
        self,
        targets: Mapping[str, Tensor],
        slices: Mapping[str, TensorSlice],
        share: slice = slice(None),
    ) -> dict[str, FileEntry]:
        """Read tensors into `targets` on any device, and return the entries of verified files.

        Raises CheckpointError if the stored slices do not cover a target, and DamagedError if a
        file is damaged; the targets may then hold damaged values.

        slices: by name, which slice a target is; targets without an entry are full tensors.
        share: which files to read in full and verify, as a slice of their list. From other files,
            only what the targets need is read.
        """
        wanted = {name: slices.get(name) or TensorSlice.full(self.shapes[name]) for name in targets}
        n_missing = {name: target.numel() for name, target in targets.items()}
        verified: dict[str, FileEntry] = {}
        for file in [*self._files][share]:
            opened = self._files[file]
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
        for name, target in targets.items():
            for file, stored in self._slices[name].items():
                if file not in verified:
                    values = self._files[file].get_slice(name)
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
