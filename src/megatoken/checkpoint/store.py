"""The commit protocol: a checkpoint is a folder that exists whole and verified, or not at all.

In: writers of single files and facts for the manifest. Out: `root/step-00000010/` with the files and a
`manifest.json` that names the size and xxh3-128 of each, and at its end the hash of itself. Everything is
written and fsynced in a draft, `root/.tmp-...`, which one rename publishes; removal is a rename to `.tmp-...` first.
So a process killed at any moment leaves only whole checkpoints and `.tmp-...` leftovers for `sweep`. Several processes
may write into one draft, each its own files; one opens and publishes it.

xxh3 finds accidents, not forgers; paths out of a manifest are treated as hostile all the same.
Absent on purpose: torch, the tensor format (restore), locking (the journal holds the run folder), retries.
"""

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatoken.checkpoint.manifest import (
    MANIFEST,
    STEP,
    Manifest,
    OtherFormat,
    Signature,
    Stored,
    hash_file,
    is_contained,
    seal,
    sign,
    verify,
)
from megatoken.errors import Exit, Fault

__all__ = [
    "Manifest",
    "OtherFormat",
    "commit",
    "discard",
    "is_checkpoint",
    "newest_valid",
    "open_draft",
    "prune",
    "publish",
    "step_folder",
    "steps",
    "sweep",
    "verify",
    "write_files",
]

_TEMPORARY = ".tmp-"
_PRUNED = ".tmp-prune-"
_RESTARTS = 100  # of newest_valid, each caused by a writer that moved on meanwhile

_checked: dict[Signature, bool] = {}  # folders this process has written or hashed: were they valid?


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands once it is committed."""
    return root / f"step-{step:08d}"


def commit(
    root: Path,
    step: int,
    files: Mapping[str, Callable[[Path], None]],
    *,
    meta: Mapping[str, Any],
    needed_bytes: int = 0,
) -> Path:
    """Write the checkpoint of `step` so that it appears whole and durable, or not at all; return its folder.

    files: name (sub-folders allowed, `tokenizer/vocab.json`) -> writer of that one file. meta: plain JSON, finite
    numbers. needed_bytes: space to insist on beforehand, 0 to skip. A valid checkpoint of that step is returned
    as it is; an invalid one is replaced. Fault(STORAGE) when the disk is full, read-only or failing: then nothing
    of this save remains and earlier checkpoints are untouched. OtherFormat when that step exists in another format.
    """
    _check_names(files)
    draft = open_draft(root, step, needed_bytes)
    if draft is None:
        return step_folder(root, step)
    try:
        return publish(draft, step, write_files(draft, files, needed_bytes), meta=meta, needed_bytes=needed_bytes)
    finally:
        discard(draft)


def open_draft(root: Path, step: int, needed_bytes: int = 0) -> Path | None:
    """A folder in which to write the checkpoint of `step`; None when a valid one is there already.

    Raises Fault(STORAGE) when there is no room for it, or none to be made.
    """
    final = step_folder(root, step)
    draft = root / f"{_TEMPORARY}{final.name}-{uuid.uuid4().hex}"
    with _storage_faults(root, step, needed_bytes):
        _make(root)
        if os.path.lexists(final) and _verifies(final):
            _sync(root)  # it may be the work of a process that died before this
            return None
        _require_space(root, step, needed_bytes)
        draft.mkdir()
    return draft


def write_files(draft: Path, files: Mapping[str, Callable[[Path], None]], needed_bytes: int = 0) -> dict[str, Stored]:
    """Write files into a draft and make them durable; return what the manifest says of each.

    Raises Fault(STORAGE); from several processes with different files, each makes its own durable.
    """
    _check_names(files)
    entries = {}
    with _storage_faults(draft.parent, _step_of(draft), needed_bytes):
        mode = draft.stat().st_mode & 0o666  # what open() would give; some writers leave files private
        for name, writer in files.items():
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True)
            writer(path)
            with contextlib.suppress(OSError):  # a disk without permissions
                path.chmod(mode)
            _sync(path)
            entries[name] = Stored(path.stat().st_size, hash_file(path))
    return entries


def publish(
    draft: Path, step: int, entries: Mapping[str, Stored], *, meta: Mapping[str, Any], needed_bytes: int = 0
) -> Path:
    """Make a draft that holds these files, all durable, the checkpoint of `step`. Raises Fault(STORAGE)."""
    root, final = draft.parent, step_folder(draft.parent, step)
    with _storage_faults(root, step, needed_bytes):
        if {name for name, *_ in sign(draft)} != set(entries):
            raise ValueError(f"the writers of step {step} made other files than those named: {sorted(entries)}")
        folders = {folder for name in entries for folder in Path(name).parents} - {Path()}
        for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
            _sync(draft / folder)
        (draft / MANIFEST).write_bytes(seal(Manifest(step, meta, entries)))
        _sync(draft / MANIFEST)
        _sync(draft)
        replaced = _set_aside(final)
        draft.rename(final)
        try:
            _sync(root)
        except OSError:
            final.rename(draft)  # not known to be durable, so it must not count as committed
            raise
    if replaced is not None:
        _remove(replaced)
    _remember(final)
    return final


def discard(draft: Path) -> None:
    """Remove a draft that was not published; one that was is not there any more."""
    _remove(draft)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not is_contained(name):
            raise ValueError(f"not a name for a file in a checkpoint: {name!r}")


def _step_of(draft: Path) -> int:
    return int(draft.name.removeprefix(f"{_TEMPORARY}step-").partition("-")[0])


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a checkpoint, be it damaged: a dataset has no recipe, a run folder no tensors."""
    return (folder / "config.yaml").is_file() and any(folder.glob("*.safetensors"))


def sweep(root: Path) -> list[Path]:
    """Remove what killed runs left behind; return what is gone. Only while holding the run's lock."""
    gone = []
    with contextlib.suppress(OSError):
        for leftover in sorted(root.glob(f"{_TEMPORARY}*")):
            _remove(leftover)
            if not os.path.lexists(leftover):
                gone.append(leftover)
    return gone


def steps(root: Path) -> list[int]:
    """Steps with a committed name, ascending; cheap, nothing is verified. A missing root has none.

    Fault(STORAGE) when the folder cannot be read.
    """
    found = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                name = STEP.fullmatch(entry.name)
                if name and entry.is_dir(follow_symlinks=False):
                    found.append(int(name[1]))
    except FileNotFoundError:
        return []
    except OSError as failure:
        what = f"checkpoints cannot be listed: {failure.strerror}"
        raise Fault(Exit.STORAGE, what, str(root), "name a folder that can be read") from failure
    return sorted(found)


def find_checkpoint(source: Path, warn: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """A checkpoint itself, or the newest whole one of a run folder or of a folder of checkpoints.

    `warn` hears of damaged ones that are passed over. Raises Fault(CHECKPOINT) for a single one that is damaged.
    """
    if is_checkpoint(source):
        return source, verify(source)
    root = source / "checkpoints"
    return newest_valid(root if root.is_dir() else source, lambda path, bad: warn(f"{bad} (skipping {path.name})"))


def newest_valid(root: Path, on_bad: Callable[[Path, Fault], None]) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that verifies, with its manifest; None if there is none.

    `on_bad` hears of each newer one that does not verify. Safe beside a writer that commits and prunes: a folder
    that is moved away while it is read is forgotten and the search starts again. OtherFormat is raised, not skipped:
    going on from an older step would end in training over it. A reader that then loads must be ready to ask again.
    """
    told: set[Path] = set()
    for _ in range(_RESTARTS):
        moved = False
        for step in reversed(steps(root)):
            folder = step_folder(root, step)
            before = _identity(folder)
            try:
                manifest = verify(folder)
                _remember(folder)
                return folder, manifest
            except OtherFormat:
                raise
            except Fault as fault:
                moved = before is None or _identity(folder) != before
                if moved:
                    break
                if folder not in told:
                    on_bad(folder, fault)
                    told.add(folder)
        if not moved:
            return None
    raise Fault(Exit.CHECKPOINT, "checkpoints vanish faster than they can be read", str(root), "try again")


def prune(root: Path, *, keep_last: int, keep_every: int) -> list[Path]:
    """Remove old checkpoints after a commit; return the folders that are gone, oldest first.

    Kept: the newest `keep_last` (at least 1) that verify, whatever is newer than those, and each step that is a
    multiple of keep_every (0: none). What this process committed or verified before is only looked at again (name,
    inode, size, time of each file). Fault(STORAGE) when a folder cannot be moved; training need not stop for it.
    """
    valid = 0
    doomed = []
    for step in reversed(steps(root)):
        if valid < max(1, keep_last):
            valid += _is_valid(step_folder(root, step))
        elif not keep_every or step % keep_every:
            doomed.append(step_folder(root, step))
    gone = []
    try:
        for folder in reversed(doomed):
            with contextlib.suppress(FileNotFoundError):
                folder.rename(root / f"{_PRUNED}{folder.name}-{uuid.uuid4().hex}")
                gone.append(folder)
        if gone:
            _sync(root)  # the names must be gone for good before the first file goes
    except OSError as failure:
        raise Fault(
            Exit.STORAGE,
            f"old checkpoints cannot be removed: {failure.strerror}",
            str(failure.filename or root),
            "make the folder writable",
        ) from failure
    with contextlib.suppress(OSError):
        for leftover in root.glob(f"{_PRUNED}*"):
            _remove(leftover)
    return gone


def _remember(folder: Path) -> None:
    with contextlib.suppress(OSError, Fault):
        _checked[sign(folder)] = True


def _is_valid(folder: Path) -> bool:
    """As verify, but what this process has written or hashed and nothing has touched since is not hashed again."""
    try:
        signature = sign(folder)
        if signature not in _checked:
            _checked[signature] = _verifies(folder)
    except (OSError, Fault):
        return False
    return _checked[signature]


def _verifies(folder: Path) -> bool:
    try:
        verify(folder)
    except OtherFormat:
        raise
    except Fault:
        return False
    return True


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        facts = folder.lstat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _make(folder: Path) -> None:
    """Create a folder and its missing parents, each made durable in the folder above."""
    if folder.is_dir():
        return
    _make(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Force a file or folder to the disk. Windows cannot sync folders and wants files open for writing."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as failure:
        if failure.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise  # some network file systems sync files but know no sync of folders
    finally:
        os.close(descriptor)


def _set_aside(final: Path) -> Path | None:
    """Move what has the final name, known to be invalid, out of the way; None if nothing has it."""
    if not os.path.lexists(final):
        return None
    aside = final.with_name(f"{_TEMPORARY}bad-{final.name}-{uuid.uuid4().hex}")
    final.rename(aside)
    return aside


def _remove(path: Path) -> None:
    """Delete a leftover as far as possible; what stays is for the next sweep."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _require_space(root: Path, step: int, needed_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if needed_bytes > free:
        what = f"no room for the checkpoint of step {step}: {needed_bytes:,} bytes needed, {free:,} free"
        raise Fault(Exit.STORAGE, what, str(root), "free space, keep fewer checkpoints or use another disk")


@contextlib.contextmanager
def _storage_faults(root: Path, step: int, needed_bytes: int = 0) -> Iterator[None]:
    """Turn the system's errors into Fault(STORAGE)."""
    try:
        yield
    except BaseException as failure:
        error = _system_error(failure)
        if error is None:
            raise
        raise _storage_fault(root, step, needed_bytes, error) from failure


def _system_error(failure: BaseException) -> OSError | None:
    """The system error behind a failure, if any; the Rust writers name theirs only in their text."""
    if isinstance(failure, OSError):
        return failure
    number = re.search(r"\(os error ([0-9]+)\)", str(failure)) if isinstance(failure, Exception) else None
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def _storage_fault(root: Path, step: int, needed_bytes: int, error: OSError) -> Fault:
    free = 0
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(root).free
    what = f"checkpoint of step {step} was not saved: {error.strerror or error}"
    what += f", {needed_bytes:,} bytes needed, {free:,} free"
    where = str(error.filename or root)
    return Fault(Exit.STORAGE, what, where, "earlier checkpoints are intact; free or repair the disk, then resume")
