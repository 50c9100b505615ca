"""Merge the slices of a checkpoint into full tensors, for other programs."""

import os
import shutil
from functools import partial
from pathlib import Path

from safetensors.torch import save_file

from megatoken.base.errors import StorageError, Warn
from megatoken.store.commit import FileWriter, commit, find_checkpoint, step_folder
from megatoken.store.tensor_files import MODEL, OPTIMIZER, TensorReader, tensor_file_name


def consolidate(source: Path, out: Path, warn: Warn) -> Path:
    """Merge the slices of a checkpoint, or of a run's newest valid checkpoint, into full tensors.

    The result is a checkpoint `out/step-N`, whose folder is returned. Raises CheckpointError if
    there is no valid checkpoint, and StorageError if the target exists or is not writable.
    """
    folder, manifest = find_checkpoint(source, warn)
    target = step_folder(out, manifest.step)
    if os.path.lexists(target) or out.resolve() == source.resolve():
        raise StorageError("the target exists", str(target), "choose another --out")

    def write_full(name: str, path: Path) -> None:
        reader = TensorReader(folder, manifest, name)
        save_file({tensor: reader.read(tensor) for tensor in reader.shapes}, path)

    files: dict[str, FileWriter] = {
        tensor_file_name(name): partial(write_full, name) for name in (MODEL, OPTIMIZER)
    }
    for name in manifest.files:
        if not name.startswith((MODEL, OPTIMIZER)):
            files[name] = partial(shutil.copyfile, folder / name)
    needed_bytes = sum(entry.bytes for entry in manifest.files.values())
    return commit(out, manifest.step, files, meta=manifest.meta, needed_bytes=needed_bytes)
