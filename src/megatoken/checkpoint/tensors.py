"""Tensors of a checkpoint on disk: whole in one file, or in parts, a file a process.

In: tensors by name and which part of the whole each is. Out: safetensors; a file of parts says in its own header which
(`parts`: rows and columns, `sizes`: of the whole). Read back, any part of a tensor is put together from whatever parts
hold it: a checkpoint does not care how many processes wrote it, nor how many read it. Nothing is unpickled.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatoken.checkpoint.manifest import Manifest, verify_file
from megatoken.errors import Exit, Fault
from megatoken.parallel.parts import Part

WEIGHTS, MOMENTS = "model", "optimizer"
Sizes = tuple[int, ...]


def name_file(kind: str, writer: int = 0, writers: int = 1) -> str:
    """model.safetensors, or model-00003-of-00008.safetensors, counted from 0."""
    return f"{kind}.safetensors" if writers == 1 else f"{kind}-{writer:05d}-of-{writers:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Held:
    """Tensors on the CPU and which part of the whole each is; without parts they are whole."""

    tensors: Mapping[str, Tensor]
    parts: Mapping[str, Part] | None = None
    sizes: Mapping[str, Sizes] | None = None

    def write(self, path: Path) -> None:
        """Raises OSError, or what the Rust writer makes of it."""
        header = None
        if self.parts is not None and self.sizes is not None:
            header = {
                "parts": json.dumps({name: [self.parts[name].rows, self.parts[name].columns] for name in self.tensors}),
                "sizes": json.dumps({name: self.sizes[name] for name in self.tensors}),
            }
        save_file(dict(self.tensors), path, metadata=header)


class Reader:
    """Tensors of one kind in a checkpoint, by name, in any part."""

    def __init__(self, folder: Path, manifest: Manifest, kind: str, *, verified: bool = True) -> None:
        """verified: every byte was; else a file is when it is first read from.

        Raises Fault(CHECKPOINT) when there are none.
        """
        self._folder, self._manifest = folder, manifest
        self._trusted = set(manifest.files) if verified else set[str]()
        self._pieces: dict[str, list[tuple[str, Part]]] = {}
        self.sizes: dict[str, Sizes] = {}
        names = [name for name in manifest.files if re.fullmatch(rf"{kind}(-\d+-of-\d+)?\.safetensors", name)]
        if not names:
            what = f"checkpoint holds no {name_file(kind)}"
            raise Fault(Exit.CHECKPOINT, what, str(folder), "use another checkpoint")
        for name in names:
            self._list_pieces(name)

    def _list_pieces(self, file: str) -> None:
        with safe_open(self._folder / file, framework="pt") as opened:
            header = opened.metadata() or {}
            parts, sizes = json.loads(header.get("parts", "{}")), json.loads(header.get("sizes", "{}"))
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                size = tuple(sizes.get(name) or opened.get_slice(name).get_shape())
                rows, columns = parts.get(name, (None, None))
                part = Part(tuple(map(tuple, rows)), tuple(columns) if columns else None) if rows else Part.whole(size)
                self.sizes[name] = size
                self._pieces.setdefault(name, []).append((file, part))

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """A tensor, or part of it, on the CPU, in the dtype it was saved in. Raises Fault(CHECKPOINT) for a gap."""
        size = self.sizes[name]
        if not size or part is None or part == Part.whole(size):
            file, only = self._pieces[name][0]
            if not size or only == Part.whole(size):
                return self._open(file, name, None)
        part = part or Part.whole(size)
        columns = part.columns or (0, 0)
        found: Tensor | None = None
        missing = part.n_rows * max(1, columns[1] - columns[0])
        for file, piece in self._pieces[name]:
            for here, there, count, (first, last) in part.overlaps(piece):
                rows = self._open(file, name, (there, there + count))
                if found is None:
                    found = torch.empty((part.n_rows, columns[1] - columns[0])[: len(size)], dtype=rows.dtype)
                if piece.columns is None or part.columns is None:
                    found[here : here + count] = rows
                else:
                    target = found[here : here + count, first - part.columns[0] : last - part.columns[0]]
                    target.copy_(rows[:, first - piece.columns[0] : last - piece.columns[0]])
                missing -= count * (last - first)
        if found is None or missing:
            what = f"{missing:,} numbers of {name} are in no file"
            raise Fault(Exit.CHECKPOINT, what, str(self._folder), "use another checkpoint")
        return found

    def _open(self, file: str, name: str, rows: tuple[int, int] | None) -> Tensor:
        if file not in self._trusted:
            verify_file(self._folder, self._manifest, file)
            self._trusted.add(file)
        with safe_open(self._folder / file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows[0] : rows[1]]
            return tensor
