"""A checkpoint that many processes wrote, as one process would have written it: each kind of tensor in one file.

Nothing needs it to go on, sample or export: every reader puts parts together. It is for other programs, which open
`model.safetensors`, and for folders that are kept.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatoken.checkpoint.manifest import MANIFEST
from megatoken.checkpoint.store import commit, find_checkpoint
from megatoken.checkpoint.tensors import MOMENTS, WEIGHTS, Held, Reader, name_file
from megatoken.errors import Exit, Fault


def consolidate(source: Path, out: Path, warn: Callable[[str], None]) -> Path:
    """Write a run's newest whole checkpoint, or a single one, to `out/step-N` whole; return that folder.

    Raises Fault(CHECKPOINT) when there is nothing whole to read, Fault(STORAGE) when it cannot be written.
    """
    found = find_checkpoint(source, warn)
    if found is None:
        fix = "give a run folder, or one of its checkpoints"
        raise Fault(Exit.CHECKPOINT, "no whole checkpoint here", str(source), fix)
    folder, manifest = found

    def write(kind: str, path: Path) -> None:
        reader = Reader(folder, manifest, kind)
        Held({name: reader.read(name) for name in reader.sizes}).write(path)

    def copy(name: str, path: Path) -> None:
        path.write_bytes((folder / name).read_bytes())

    files: dict[str, Callable[[Path], None]] = {name_file(kind): partial(write, kind) for kind in (WEIGHTS, MOMENTS)}
    others = [name for name in manifest.files if not name.endswith(".safetensors") and name != MANIFEST]
    files |= {name: partial(copy, name) for name in others}
    needed = sum(stored.bytes for stored in manifest.files.values())
    return commit(out, manifest.step, files, meta=manifest.meta, needed_bytes=needed)
