"""Commit checkpoints, so that a checkpoint folder is either complete or absent. No torch.

A checkpoint is a folder `root/step-00000010/` with files and a `manifest.json` (manifest.py). All
files are written and fsynced in a draft, a folder `root/.tmp-...`, which one rename turns into the
checkpoint. To remove a checkpoint, it is first renamed to `.tmp-...` and then deleted. A process
that is killed at any moment therefore leaves only complete checkpoints and `.tmp-...` folders.
Several processes may write different files of a draft; one of them opens and publishes it.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatoken.base.errors import CheckpointError, Warn
from megatoken.base.system.atomic_write import (
    error_number,
    hash_file,
    storage_errors,
    sync_file,
    sync_folder,
)
from megatoken.store.manifest import (
    MANIFEST,
    STEP,
    CheckpointManifest,
    DamagedError,
    FileEntry,
    encode_manifest,
    list_files,
    verify,
)

FileWriter = Callable[[Path], object]  # writes one file at the given path
SLACK_BYTES = 1 << 20  # allowance for the manifest and other small files
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

    A valid checkpoint of that step is left unchanged, and a damaged one is replaced. Raises
    StorageError if the disk is full, read-only or failing; nothing of this save then remains, and
    earlier checkpoints are untouched. Raises CheckpointError if the step has a checkpoint of
    another format.

    files: for each file name, a function that writes the file to a path; names may contain folders,
        as in `tokenizer/vocab.json`.
    meta: a JSON object for the manifest, without NaN or infinities.
    needed_bytes: free space required.
    """
    draft = open_draft(root, step, needed_bytes)
    if draft is not None:
        try:
            publish(draft, step, write_files(draft, step, files, needed_bytes), meta=meta)
        finally:
            discard(draft)
    return step_folder(root, step)


def count_needed_bytes(content_bytes: int) -> int:
    """Return the free disk space that a checkpoint with `content_bytes` of tensors needs."""
    return content_bytes + SLACK_BYTES


def open_draft(root: Path, step: int, needed_bytes: int) -> Path | None:
    """Create a draft folder for the checkpoint of `step`, and return it.

    Returns None if a valid checkpoint of that step exists. Raises StorageError if there are not
    `needed_bytes` of free space or the folder cannot be created.
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
    """Write and fsync files in a draft, and return their manifest entries. Raises StorageError.

    After a temporary error, a file is written again from its beginning.

    files: as in `commit`.
    needed_bytes: size of the checkpoint, for the error message.
    on_progress: called with the number of bytes just hashed or fsynced.
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
                # A failed fsync marks the lost pages clean, so a second fsync would report success.
                (draft / name).unlink(missing_ok=True)
                time.sleep(pause)
    return entries


def _write_file(
    path: Path, writer: FileWriter, mode: int, on_progress: Callable[[int], object] | None
) -> FileEntry:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer(path)
    with suppress(OSError):  # no permissions on this file system
        path.chmod(mode)
    status = path.stat()  # before hashing: a later change also changes the time
    with ThreadPoolExecutor(1) as threads:
        digest = threads.submit(hash_file, path, on_progress)
        sync_file(path, on_progress)
        return FileEntry(status.st_size, digest.result(), status.st_mtime_ns)


def publish(
    draft: Path, step: int, entries: Mapping[str, FileEntry], *, meta: Mapping[str, Any]
) -> None:
    """Add a manifest to a draft and rename it to the checkpoint of `step`. Raises StorageError.

    entries: all files in the draft, which must already be fsynced.
    """
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
    """Delete a file or folder; ignore errors, because `remove_leftovers` tries again later."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def remove_leftovers(root: Path) -> None:
    """Delete the `.tmp-...` folders of killed runs. The caller must hold the run's lock."""
    for leftover in root.glob(".tmp-*"):
        discard(leftover)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder looks like a checkpoint, which may be damaged."""
    return (folder / "config.yaml").is_file() and any(folder.glob("*.safetensors"))


def list_steps(root: Path) -> list[int]:
    """Return the steps of committed checkpoints, ascending, without verifying them.

    Raises StorageError.
    """
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
    source: Path, warn: Warn, *, hashes: Callable[[str], bool] | None = None
) -> tuple[Path, CheckpointManifest]:
    """Verify a checkpoint or, in a run folder, find the newest valid one.

    Returns its folder and manifest. Raises CheckpointError if no checkpoint is valid.

    warn: called with a message for each damaged checkpoint. hashes: as in `verify`.
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
    """Return the newest valid checkpoint under `root` and its manifest, or None.

    Another process may prune checkpoints at the same time. If one disappears while it is being
    verified, the search starts again. Even the returned one may disappear before the caller loads
    it. Raises CheckpointError for a checkpoint of another format.

    on_damaged: called for each damaged checkpoint that is newer than the returned one.
    hashes: as in `verify`.
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


def choose_surplus(
    steps: Sequence[int],
    is_valid: Callable[[int], bool] = lambda _step: True,
    *,
    keep_last: int,
    keep_every: int,
    keep: Collection[int | None] = (),
) -> list[int]:
    """Return which of these ascending steps to remove.

    keep_last: how many of the newest valid checkpoints to keep, at least 1. Damaged checkpoints
        newer than the oldest of these are kept as well.
    keep_every: keep steps that are multiples of it; 0 disables this.
    keep: other steps to keep.
    """
    n_valid = 0
    surplus = []
    for step in reversed(steps):
        if n_valid < max(1, keep_last):
            n_valid += is_valid(step)
        elif step not in keep and (not keep_every or step % keep_every):
            surplus.append(step)
    return surplus[::-1]


def prune(
    root: Path,
    *,
    keep_last: int,
    keep_every: int,
    keep: Collection[int | None] = (),
    verified: Mapping[Path, Mapping[str, FileEntry]] | None = None,
) -> list[Path]:
    """Remove old checkpoints, and return their former folders, oldest first. Raises StorageError.

    keep_last, keep_every, keep: as in `choose_surplus`.
    verified: entries of files that this run has already hashed, by checkpoint folder. Of these,
        only files that have changed since are hashed again; of other folders, which may be large,
        only the manifest, names and sizes are checked. None to hash all.
    """

    def is_valid(step: int) -> bool:
        folder = step_folder(root, step)
        hashed = None if verified is None else verified.get(folder, {})
        with suppress(CheckpointError):
            verify(folder, hashes=None if hashed is None else hashed.__contains__, known=hashed)
            return True
        return False

    choose = partial(
        choose_surplus, list_steps(root), keep_last=keep_last, keep_every=keep_every, keep=keep
    )
    surplus = choose() and choose(is_valid)  # hash only if something may be removed
    folders = [step_folder(root, step) for step in surplus]
    what = "old checkpoints cannot be removed"
    with storage_errors(root, what=what, fix="make the folder writable"):
        moved = [_move_aside(folder) for folder in folders]
        if moved:
            sync_folder(root)  # the old names must be gone durably before the first file is deleted
    for folder in moved:
        discard(folder)
    return folders


def _move_aside(folder: Path) -> Path:
    return folder.rename(folder.with_name(f".tmp-old-{folder.name}-{uuid.uuid4().hex}"))


def _save_errors(root: Path, step: int, needed_bytes: int) -> AbstractContextManager[None]:
    what = f"checkpoint of step {step} was not saved"
    fix = "earlier checkpoints are intact; free or repair the disk, then rerun the command"
    return storage_errors(root, needed_bytes, what=what, fix=fix)
