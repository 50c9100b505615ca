"""The commit protocol: a checkpoint is a folder that exists whole and verified, or not at all. No torch.

`root/step-00000010/` holds the files and a `manifest.json` (see manifest.py). Everything is written and fsynced in a
draft, `root/.tmp-...`, which one rename publishes; a checkpoint is removed by a rename to `.tmp-...` first. A process
killed at any moment leaves only whole checkpoints and `.tmp-...` leftovers. Several processes may write into one draft,
each its own files; one of them opens and publishes it.
"""

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatoken.checkpoint.manifest import (
    MANIFEST,
    STEP,
    CheckpointManifest,
    DamagedError,
    FileEntry,
    encode_manifest,
    list_files,
    verify,
)
from megatoken.errors import CheckpointError, StorageError
from megatoken.system.atomic_write import (
    error_number,
    hash_file,
    storage_errors,
    sync_file,
    sync_folder,
)

IDENTITY = "mirror.json"  # of save.mirror: in the run folder and in the copy
FileWriter = Callable[[Path], object]  # writes one file at the path it is given
SLACK_BYTES = 1 << 20  # for the manifest and the other small files
RETRY_SECONDS = (1.0, 5.0)  # before a file whose error may pass is written again
MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ETIMEDOUT, errno.ESTALE}


def step_folder(root: Path, step: int) -> Path:
    """The folder of the checkpoint of `step` once it is committed."""
    return root / f"step-{step:08d}"


def commit(
    root: Path,
    step: int,
    files: Mapping[str, FileWriter],
    *,
    meta: Mapping[str, Any],
    needed_bytes: int = 0,
) -> Path:
    """Write the checkpoint of `step` so that it appears whole and durable, or not at all; return its folder.

    files: name (subfolders allowed, `tokenizer/vocab.json`) -> writer of that file. meta: plain JSON, finite numbers.
    needed_bytes: free space required beforehand. A valid checkpoint of that step is returned as it is; an invalid one
    is replaced. Raises StorageError when the disk is full, read-only or failing: then nothing of this save remains and
    earlier checkpoints are untouched. Raises CheckpointError when that step exists in another format.
    """
    draft = open_draft(root, step, needed_bytes)
    if draft is not None:
        try:
            publish(draft, step, write_files(draft, step, files, needed_bytes), meta=meta)
        finally:
            discard(draft)
    return step_folder(root, step)


def count_needed_bytes(content_bytes: int) -> int:
    """Return the free space that a checkpoint of so many bytes needs."""
    return content_bytes + SLACK_BYTES


def open_draft(root: Path, step: int, needed_bytes: int = 0) -> Path | None:
    """A new folder to write the checkpoint of `step` into; None when a valid checkpoint of that step exists.

    Raises StorageError when there is no room for it or no folder can be created.
    """
    draft = root / f".tmp-{step_folder(root, step).name}-{uuid.uuid4().hex}"
    with _save_errors(root, step, needed_bytes):
        root.mkdir(parents=True, exist_ok=True)
        sync_folder(root.parent)
        with contextlib.suppress(DamagedError):
            verify(step_folder(root, step))
            sync_folder(root)  # its writer may have died before this
            return None
        free = shutil.disk_usage(root).free
        if needed_bytes > free:
            what = f"no room for the checkpoint of step {step}: {needed_bytes:,} bytes needed, {free:,} free"
            raise StorageError(
                what, str(root), "free space, keep fewer checkpoints or use another disk"
            )
        draft.mkdir()
    return draft


def write_files(
    draft: Path,
    step: int,
    files: Mapping[str, FileWriter],
    needed_bytes: int = 0,
    on_progress: Callable[[int], object] | None = None,
) -> dict[str, FileEntry]:
    """Write files into a draft and make them durable; return their entries in the manifest. Raises StorageError.

    A file whose error may pass is written again, from its beginning, after each of RETRY_SECONDS. needed_bytes: of the
    checkpoint, for the error. on_progress: called with numbers of bytes that were hashed or made durable.
    """
    entries = {}
    with _save_errors(draft.parent, step, needed_bytes):
        mode = draft.stat().st_mode & 0o666  # the mode of open(); some writers make files private
        for name, writer in files.items():
            for pause in (*RETRY_SECONDS, None):
                try:
                    entries[name] = _write_file(draft / name, writer, mode, on_progress)
                    break
                except Exception as error:
                    if pause is None or error_number(error) not in MAY_PASS:
                        raise
                # After a failed fsync the system calls the lost pages clean: another fsync of that file would succeed.
                (draft / name).unlink(missing_ok=True)
                time.sleep(pause)
    return entries


def _write_file(
    path: Path, writer: FileWriter, mode: int, on_progress: Callable[[int], object] | None = None
) -> FileEntry:
    """Write a file and make it durable, hashing it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer(path)
    with contextlib.suppress(OSError):  # a disk without permissions
        path.chmod(mode)
    status = path.stat()  # before it is read: what changes it later, changes its time
    with ThreadPoolExecutor(1) as threads:
        digest = threads.submit(hash_file, path, on_progress)
        sync_file(path, on_progress)
        return FileEntry(status.st_size, digest.result(), status.st_mtime_ns)


def publish(
    draft: Path, step: int, entries: Mapping[str, FileEntry], *, meta: Mapping[str, Any]
) -> None:
    """Make a draft with these durable files the checkpoint of `step`. Raises StorageError."""
    root, final, replaced = draft.parent, step_folder(draft.parent, step), None
    with _save_errors(root, step, sum(entry.bytes for entry in entries.values())):
        if list_files(draft).keys() != entries.keys():
            raise ValueError(
                f"the writers of step {step} made other files than those named: {sorted(entries)}"
            )
        (draft / MANIFEST).write_bytes(encode_manifest(CheckpointManifest(step, meta, entries)))
        sync_file(draft / MANIFEST)
        for folder in (*(path for path in draft.rglob("*") if path.is_dir()), draft):
            sync_folder(folder)
        if os.path.lexists(final):  # known to be invalid
            replaced = _move_aside(final)
        draft.rename(final)
        try:
            sync_folder(root)
        except OSError:
            final.rename(draft)  # not known to be durable, so it must not count as committed
            raise
    if replaced is not None:
        discard(replaced)


def discard(path: Path) -> None:
    """Delete a draft or another leftover as far as possible; `remove_leftovers` deletes the rest."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_leftovers(root: Path) -> None:
    """Remove the drafts of killed runs, and whatever else has such a name. Only while holding the run's lock."""
    for leftover in root.glob(".tmp-*"):
        discard(leftover)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a checkpoint, damaged or not: datasets have no config, run folders no tensors."""
    return (folder / "config.yaml").is_file() and any(folder.glob("*.safetensors"))


def is_copy(folder: Path) -> bool:
    """Whether a folder is what `save.mirror` makes, not a run folder."""
    return (folder / IDENTITY).is_file() and not (folder / "status.json").exists()


def list_steps(root: Path) -> list[int]:
    """Steps of committed checkpoints, ascending, unverified; none if `root` is missing. Raises StorageError."""
    with storage_errors(
        root, what="checkpoints cannot be listed", fix="name a folder that can be read"
    ):
        entries = [*os.scandir(root)] if root.exists() else []
        names = [
            STEP.fullmatch(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)
        ]
    return sorted(int(name[1]) for name in names if name)


def find_checkpoint(
    source: Path, warn: Callable[[str], None], *, hashes: Callable[[str], bool] | None = None
) -> tuple[Path, CheckpointManifest]:
    """`source` if it is a checkpoint, else the newest valid one of a run folder or of a folder of checkpoints.

    warn: called with a line for each damaged one that is skipped. hashes: of `verify`. Raises CheckpointError if there
    is no other.
    """
    if is_checkpoint(source):
        return source, verify(source, hashes=hashes)
    root = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    found = find_newest(
        root, lambda folder, error: warn(f"{error} (skipping {folder.name})"), hashes
    )
    if found is None:
        what, fix = (
            "holds no checkpoint",
            "name a run folder or one of its checkpoints; a new run has to train first",
        )
        if steps := list_steps(root):
            what, fix = (
                f"all {len(steps)} checkpoints are damaged",
                "restore one from a copy, or train again",
            )
        raise CheckpointError(what, str(source), fix)
    return found


def find_newest(
    root: Path,
    on_damaged: Callable[[Path, CheckpointError], None],
    hashes: Callable[[str], bool] | None = None,
) -> tuple[Path, CheckpointManifest] | None:
    """The newest checkpoint that verifies, with its manifest; None if there is none.

    on_damaged: called for each newer one that does not verify. Safe beside a writer that commits and prunes: when a
    folder is moved away while it is read, the search starts again; a reader that loads it afterwards must be ready to
    do the same. A checkpoint of another format is not skipped but raises CheckpointError.
    """
    while True:
        for step in reversed(list_steps(root)):
            folder = step_folder(root, step)
            try:
                return folder, verify(folder, hashes=hashes)
            except DamagedError as error:
                if not folder.exists():
                    break
                on_damaged(folder, error)
        else:
            return None


def list_surplus(steps: list[int], *, keep_last: int, keep_every: int) -> list[int]:
    """Which of these steps, ascending, `prune` removes if all checkpoints are valid."""
    return [step for step in steps[:-keep_last] if not keep_every or step % keep_every]


def prune(
    root: Path,
    *,
    keep_last: int,
    keep_every: int,
    keep: Collection[int | None] = (),
    verified: dict[Path, Mapping[str, FileEntry]] | None = None,
) -> list[Path]:
    """Remove old checkpoints after a commit; return the removed folders, oldest first.

    Kept: the newest `keep_last` (at least 1) that verify, whatever is newer than those, the steps in `keep`, and every
    step that is a multiple of keep_every (0: none). verified: checkpoints that this process has hashed, with their
    files; those that have changed since are hashed again, and prune adds what it hashes. Raises StorageError when a
    folder cannot be moved.
    """
    verified = {} if verified is None else verified
    steps, keep_last, valid = list_steps(root), max(1, keep_last), 0
    doomed: list[Path] = []
    surplus = list_surplus(steps, keep_last=keep_last, keep_every=keep_every)
    for step in reversed(steps if surplus else []):  # nothing to remove: nothing to hash
        folder = step_folder(root, step)
        if valid < keep_last:
            with contextlib.suppress(CheckpointError):
                verified[folder] = verify(folder, known=verified.get(folder)).files
                valid += 1
        elif step not in keep and (not keep_every or step % keep_every):
            doomed.insert(0, folder)
    moved = []
    with storage_errors(
        root, what="old checkpoints cannot be removed", fix="make the folder writable"
    ):
        for folder in doomed:
            moved.append(_move_aside(folder))
        if moved:
            sync_folder(root)  # the names must be gone for good before the first file goes
    for folder in moved:
        discard(folder)
    return doomed


def _move_aside(folder: Path) -> Path:
    return folder.rename(folder.with_name(f".tmp-old-{folder.name}-{uuid.uuid4().hex}"))


def _save_errors(
    root: Path, step: int, needed_bytes: int = 0
) -> contextlib.AbstractContextManager[None]:
    fix = "earlier checkpoints are intact; free or repair the disk, then start again"
    return storage_errors(
        root, needed_bytes, what=f"checkpoint of step {step} was not saved", fix=fix
    )
