"""The commit protocol: a checkpoint folder exists complete and verified, or not at all. No torch.

`root/step-00000010/` holds files and a `manifest.json` (manifest.py). Everything is written and
fsynced in a draft, `root/.tmp-...`, which one rename publishes. A checkpoint is removed by a rename
to `.tmp-...` first. A process killed at any moment leaves only complete checkpoints and `.tmp-...`
leftovers. Several processes may write different files of one draft; one opens and publishes it.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
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
from megatoken.errors import CheckpointError
from megatoken.system.atomic_write import (
    error_number,
    hash_file,
    storage_errors,
    sync_file,
    sync_folder,
)

IDENTITY = "mirror.json"  # identifies the run of a mirror: in the run folder and in the copy
FileWriter = Callable[[Path], object]  # writes one file at the given path
SLACK_BYTES = 1 << 20  # for the manifest and other small files
RETRY_SECONDS = (1.0, 5.0)  # before a file is written again after a temporary error
TEMPORARY_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ETIMEDOUT, errno.ESTALE}


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of the committed checkpoint of `step`."""
    return root / f"step-{step:08d}"


def commit(
    root: Path,
    step: int,
    files: Mapping[str, FileWriter],
    *,
    meta: Mapping[str, Any],
    needed_bytes: int = 0,
) -> Path:
    """Write and publish the checkpoint of `step`, and return its folder.

    If a valid checkpoint of that step exists, it is left unchanged; an invalid one is replaced.
    Raises StorageError if the disk is full, read-only or failing; then nothing of this save remains
    and earlier checkpoints are untouched. Raises CheckpointError if that step exists in another
    format.

    files: writers by name; a name may contain folders: `tokenizer/vocab.json`.
    meta: JSON with finite numbers. needed_bytes: free space required.
    """
    draft = open_draft(root, step, needed_bytes)
    if draft is not None:
        try:
            publish(draft, step, write_files(draft, step, files, needed_bytes), meta=meta)
        finally:
            discard(draft)
    return step_folder(root, step)


def count_needed_bytes(content_bytes: int) -> int:
    """Return the free space that a checkpoint with this content needs."""
    return content_bytes + SLACK_BYTES


def open_draft(root: Path, step: int, needed_bytes: int = 0) -> Path | None:
    """Create a draft for the checkpoint of `step`. Return None if a valid one already exists.

    Raises StorageError if there is no space or the folder cannot be created.
    """
    draft = root / f".tmp-{step_folder(root, step).name}-{uuid.uuid4().hex}"
    with _save_errors(root, step, needed_bytes):
        root.mkdir(parents=True, exist_ok=True)
        sync_folder(root.parent)
        with suppress(DamagedError):
            verify(step_folder(root, step))
            sync_folder(root)  # its writer may have died before this
            return None
        if needed_bytes > shutil.disk_usage(root).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        draft.mkdir()
    return draft


def write_files(
    draft: Path,
    step: int,
    files: Mapping[str, FileWriter],
    needed_bytes: int = 0,
    on_progress: Callable[[int], object] | None = None,
) -> dict[str, FileEntry]:
    """Write files durably into a draft and return their manifest entries. Raises StorageError.

    After a temporary error a file is written again from its beginning.

    needed_bytes: size of the checkpoint, for the error message.
    on_progress: called with the number of bytes just hashed or made durable.
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
                    if pause is None or error_number(error) not in TEMPORARY_ERRORS:
                        raise
                # A failed fsync marks the lost pages clean, so a second one would succeed.
                (draft / name).unlink(missing_ok=True)
                time.sleep(pause)
    return entries


def _write_file(
    path: Path, writer: FileWriter, mode: int, on_progress: Callable[[int], object] | None
) -> FileEntry:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer(path)
    with suppress(OSError):  # the disk may lack permissions
        path.chmod(mode)
    status = path.stat()  # before hashing: a later change also changes the time
    with ThreadPoolExecutor(1) as threads:
        digest = threads.submit(hash_file, path, on_progress)
        sync_file(path, on_progress)
        return FileEntry(status.st_size, digest.result(), status.st_mtime_ns)


def publish(
    draft: Path, step: int, entries: Mapping[str, FileEntry], *, meta: Mapping[str, Any]
) -> None:
    """Make a draft with these durable files the checkpoint of `step`. Raises StorageError."""
    root = draft.parent
    final = step_folder(root, step)
    replaced = None
    with _save_errors(root, step, sum(entry.bytes for entry in entries.values())):
        if list_files(draft).keys() != entries.keys():
            raise ValueError(f"files of step {step} other than those expected: {sorted(entries)}")
        (draft / MANIFEST).write_bytes(encode_manifest(CheckpointManifest(step, meta, entries)))
        sync_file(draft / MANIFEST)
        for folder in (*(path for path in draft.rglob("*") if path.is_dir()), draft):
            sync_folder(folder)
        if os.path.lexists(final):  # invalid: see open_draft
            replaced = _move_aside(final)
        draft.rename(final)
        try:
            sync_folder(root)
        except OSError:
            final.rename(draft)  # the rename may not be durable, so undo it
            raise
    if replaced is not None:
        discard(replaced)


def discard(path: Path) -> None:
    """Delete a draft or another leftover. Leave what cannot be deleted to `remove_leftovers`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def remove_leftovers(root: Path) -> None:
    """Delete the drafts of killed runs. The caller must hold the run's lock."""
    for leftover in root.glob(".tmp-*"):
        discard(leftover)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder looks like a checkpoint, even a damaged one."""
    return (folder / "config.yaml").is_file() and any(folder.glob("*.safetensors"))


def is_copy(folder: Path) -> bool:
    """Return whether a folder is a copy made by `save.mirror`, not a run folder."""
    return (folder / IDENTITY).is_file() and not (folder / "status.json").exists()


def list_steps(root: Path) -> list[int]:
    """Return the steps of committed checkpoints, ascending, unverified. Raises StorageError."""
    what = "checkpoints cannot be listed"
    with storage_errors(root, what=what, fix="choose a folder that can be read"):
        entries = list(os.scandir(root)) if root.exists() else []
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return parse_steps(folders)


def parse_steps(names: Collection[str]) -> list[int]:
    """Return the steps in folder names such as step-00000010, ascending; ignore other names."""
    matches = [STEP.fullmatch(name) for name in names]
    return sorted(int(match[1]) for match in matches if match)


def find_checkpoint(
    source: Path, warn: Callable[[str], None], *, hashes: Callable[[str], bool] | None = None
) -> tuple[Path, CheckpointManifest]:
    """Return `source` if it is a checkpoint, else the newest valid one of a run, with its manifest.

    Raises CheckpointError if there is none.

    warn: called with a line per damaged checkpoint. hashes: as in `verify`.
    """
    if is_checkpoint(source):
        return source, verify(source, hashes=hashes)
    root = source / "checkpoints" if (source / "checkpoints").is_dir() else source
    newest = find_newest(
        root, lambda folder, error: warn(f"{error} (skipping {folder.name})"), hashes
    )
    if newest is not None:
        return newest
    if list_steps(root):
        fix = "restore one from a copy, or train again"
        raise CheckpointError("all checkpoints are damaged", str(source), fix)
    raise CheckpointError("no checkpoint here", str(source), "name a run folder or a checkpoint")


def find_newest(
    root: Path,
    on_damaged: Callable[[Path, CheckpointError], None],
    hashes: Callable[[str], bool] | None = None,
) -> tuple[Path, CheckpointManifest] | None:
    """Return the newest valid checkpoint and its manifest, or None.

    Another process may commit and prune at the same time: if a folder disappears while it is read,
    the search restarts. The caller must handle that, too, when it loads the checkpoint. Raises
    CheckpointError for a checkpoint of another format.

    on_damaged: called for each newer checkpoint that is invalid.
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
    """Return which of these ascending steps `prune` removes if all are valid."""
    return [step for step in steps[:-keep_last] if not keep_every or step % keep_every]


def prune(
    root: Path,
    *,
    keep_last: int,
    keep_every: int,
    keep: Collection[int | None] = (),
    verified: dict[Path, Mapping[str, FileEntry]] | None = None,
) -> list[Path]:
    """Remove old checkpoints after a commit and return their folders, oldest first.

    Keep the newest `keep_last` (at least 1) valid ones and any newer than these, the steps in
    `keep`, and multiples of keep_every (0: none). Raises StorageError.

    verified: files that this process has hashed, by checkpoint. Those that changed since are hashed
    again; prune adds what it hashes.
    """
    if verified is None:
        verified = {}
    steps = list_steps(root)
    keep_last = max(1, keep_last)
    if not list_surplus(steps, keep_last=keep_last, keep_every=keep_every):
        return []
    n_valid = 0
    to_remove: list[Path] = []
    for step in reversed(steps):
        folder = step_folder(root, step)
        if n_valid < keep_last:
            with suppress(CheckpointError):
                verified[folder] = verify(folder, known=verified.get(folder)).files
                n_valid += 1
        elif step not in keep and (not keep_every or step % keep_every):
            to_remove.insert(0, folder)
    what = "old checkpoints cannot be removed"
    with storage_errors(root, what=what, fix="make the folder writable"):
        moved = [_move_aside(folder) for folder in to_remove]
        if moved:
            sync_folder(root)  # the old names must be gone durably before the first file is deleted
    for folder in moved:
        discard(folder)
    return to_remove


def _move_aside(folder: Path) -> Path:
    return folder.rename(folder.with_name(f".tmp-old-{folder.name}-{uuid.uuid4().hex}"))


def _save_errors(root: Path, step: int, needed_bytes: int) -> AbstractContextManager[None]:
    what = f"checkpoint of step {step} was not saved"
    fix = "earlier checkpoints are intact; free or repair the disk, then rerun the command"
    return storage_errors(root, needed_bytes, what=what, fix=fix)
