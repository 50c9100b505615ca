"""A copy of a run in another folder or at an address such as s3://bucket/run, by the same commit protocol. No torch.

`ADDRESS/checkpoints/step-00000010/` gets the files of a checkpoint, each read back after its upload, then its
`manifest.json`: without it there is no checkpoint there, so an upload that ends at any moment leaves the older ones.
Small files of the run lie beside. `mirror.json`, in the run folder and at the address, says whose copy it is.

An upload runs in a process of its own, at low priority: it shares no interpreter lock with training and cannot end it.
"""

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from megatoken.checkpoint.commit import (
    IDENTITY,
    count_needed_bytes,
    discard,
    list_steps,
    open_draft,
    publish,
    step_folder,
    write_files,
)
from megatoken.checkpoint.manifest import (
    MANIFEST,
    STEP,
    CheckpointManifest,
    DamagedError,
    FileEntry,
    damaged,
    parse_manifest,
    verify,
)
from megatoken.data.remote import cache_folder
from megatoken.errors import CheckpointError, ConfigError, MegatokenError
from megatoken.launch.local import FORWARDED
from megatoken.redact import redact
from megatoken.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.system.environment import python_command
from megatoken.system.file_lock import lock_folder
from megatoken.system.object_store import MissingObjectError, ObjectInfo, ObjectStore, run_parallel
from megatoken.system.process import NULL, Child, at_parent_death

CHECKPOINTS = "checkpoints"
PROVENANCE = "provenance.json"
RUN_FILES = ("config.yaml", "machine.json", "metrics.jsonl", PROVENANCE)
NICENESS = 10


def list_mirrored(store: ObjectStore) -> list[int]:
    """Steps of the checkpoints with a commit mark, ascending."""
    marks = [
        PurePosixPath(name).parent
        for name in store.list(CHECKPOINTS)
        if name.endswith(f"/{MANIFEST}")
    ]
    return _parse_steps(
        folder.name for folder in marks if folder.parent == PurePosixPath(CHECKPOINTS)
    )


def check_owner(run: Path, store: ObjectStore) -> None:
    """Make sure that the copy at an address is of this run and not ahead of it, or begin one.

    Raises ConfigError otherwise, StorageError when it cannot be read or written.
    """
    facts, there, mirrored = read_object(run / IDENTITY), read_identity(store), list_mirrored(store)
    own, steps = facts.get("run"), list_steps(run / CHECKPOINTS)
    if there is None or (
        own is None and not mirrored
    ):  # a run that was lost before its first checkpoint
        own = there = own or there or uuid.uuid4().hex
        _write_identity(run, {**facts, "run": own})
        store.write(IDENTITY, f"{json.dumps({'run': own})}\n".encode())
    if there != own:
        fix = "choose another save.mirror, or a new --out to go on with the run that is there"
        raise ConfigError("save.mirror holds the copy of another run", store.address, fix)
    if steps and mirrored and mirrored[-1] > steps[-1] and not facts.get("rewound"):
        what = f"save.mirror is ahead: step {mirrored[-1]:,} there, {steps[-1]:,} here"
        raise ConfigError(
            what, store.address, "choose a new --out to go on from there, or another save.mirror"
        )


def allow_rewind(run: Path) -> None:
    """Let the next upload remove the checkpoints there that are later than the newest in the run folder."""
    if facts := read_object(run / IDENTITY):
        _write_identity(run, {**facts, "rewound": True})


def _write_identity(run: Path, facts: Mapping[str, Any]) -> None:
    with storage_errors(run):
        replace_file(run / IDENTITY, json.dumps(facts) + "\n", durable=True)


def read_identity(store: ObjectStore) -> str | None:
    """The number of the run whose copy this is; None where there is none."""
    try:
        return str(json.loads(store.read(IDENTITY))["run"])
    except MissingObjectError:
        return None
    except (ValueError, LookupError, TypeError):
        return ""


def update_mirror(
    run: Path, address: str, *, keep_last: int, keep_every: int, best: int | None = None
) -> dict[str, Any]:
    """Upload the newest checkpoint of a run, the `best`, those of `keep_every` that are missing there, and small files.

    Then remove older ones there as `checkpoint.commit.prune` does here. Return the uploaded names, bytes and seconds.
    Raises MegatokenError; what was uploaded so far is used by the next call.
    """
    start, store = time.monotonic(), ObjectStore(address)
    check_owner(run, store)
    for name in RUN_FILES:
        if (run / name).is_file():
            store.write(name, (run / name).read_bytes())
    missing = _list_missing(run, store, keep_every, best)
    n_bytes = sum(
        upload_checkpoint(store, step_folder(run / CHECKPOINTS, step)) for step in missing
    )
    _remove_rewound(run, store)
    prune_mirror(store, keep_last=keep_last, keep_every=keep_every, best=best)
    return {
        "uploaded": [*map(_step_name, missing)],
        "bytes": n_bytes,
        "seconds": time.monotonic() - start,
    }


def _list_missing(run: Path, store: ObjectStore, keep_every: int, best: int | None) -> list[int]:
    """The checkpoints that belong in a copy and are not whole there, the newest first."""
    steps, files = list_steps(run / CHECKPOINTS), store.list(CHECKPOINTS)
    wanted = {
        *steps[-1:],
        *(step for step in steps if step == best or (keep_every and step % keep_every == 0)),
    }
    return [step for step in sorted(wanted, reverse=True) if not _is_complete(store, step, files)]


def _remove_rewound(run: Path, store: ObjectStore) -> None:
    """Remove the checkpoints there that are later than the newest here, where `allow_rewind` has allowed it."""
    facts, steps = read_object(run / IDENTITY), list_steps(run / CHECKPOINTS)
    if facts.pop("rewound", False):
        remove_steps(
            store, [step for step in list_mirrored(store) if step > max(steps, default=step)]
        )
        _write_identity(run, facts)


def upload_checkpoint(store: ObjectStore, folder: Path) -> int:
    """Upload a checkpoint, its manifest last; return its bytes. Raises DamagedError when it is not whole here."""
    files, name = verify(folder).files, f"{CHECKPOINTS}/{folder.name}"
    run_parallel(
        [
            partial(store.upload, folder / file, f"{name}/{file}", entry.xxh3_128)
            for file, entry in files.items()
        ]
    )
    store.write(f"{name}/{MANIFEST}", (folder / MANIFEST).read_bytes())
    read_mark(store, folder.name)
    return sum(entry.bytes for entry in files.values())


def read_mark(store: ObjectStore, name: str) -> CheckpointManifest:
    """The manifest of the checkpoint `step-...` at an address. Raises DamagedError."""
    file = f"{CHECKPOINTS}/{name}/{MANIFEST}"
    try:
        manifest = parse_manifest(store.read(file), store.at(file), name)
    except MissingObjectError as error:
        raise damaged(store.at(file), "it is missing, so this was never committed") from error
    for each in manifest.files:
        if ".." in each.split("/") or each.startswith("/") or "\\" in each:
            raise damaged(store.at(file), f"it names a file outside the folder: {each!r}")
    return manifest


def prune_mirror(
    store: ObjectStore, *, keep_last: int, keep_every: int, best: int | None = None
) -> None:
    """Remove old checkpoints, their marks first, and what uploads that were ended have left of older ones.

    Kept: the newest `keep_last` (at least 1) that have all files in their sizes, whatever is newer, the `best` and each
    multiple of keep_every (0: none). Raises StorageError.
    """
    files, whole, doomed = store.list(CHECKPOINTS), 0, list[int]()
    steps = list_mirrored(store)
    for step in reversed(steps):
        if whole < max(1, keep_last):
            whole += _is_complete(store, step, files)
        elif step != best and (not keep_every or step % keep_every):
            doomed.append(step)
    unmarked = {*_parse_steps(name.split("/")[1] for name in files)} - {*steps}
    remove_steps(store, [*doomed, *(step for step in unmarked if step < max(steps, default=0))])


def remove_steps(store: ObjectStore, steps: Iterable[int]) -> None:
    """Remove checkpoints, the mark of each first. Raises StorageError."""
    for step in steps:
        store.remove(f"{CHECKPOINTS}/{_step_name(step)}/{MANIFEST}")
        store.remove(f"{CHECKPOINTS}/{_step_name(step)}")


def _is_complete(store: ObjectStore, step: int, files: Mapping[str, ObjectInfo]) -> bool:
    """Whether a checkpoint has its mark and every file in its size."""
    try:
        entries = read_mark(store, _step_name(step)).files
    except DamagedError:
        return False
    sizes = {_object_name(step, file): entry.bytes for file, entry in entries.items()}
    return all(file in files and files[file].bytes == size for file, size in sizes.items())


def verify_mirror(store: ObjectStore) -> tuple[int, list[MegatokenError]]:
    """Read every byte of the checkpoints at an address: their number, and the first defect of each."""
    errors, steps = list[MegatokenError](), list_mirrored(store)
    for step in steps:
        try:
            for file, entry in read_mark(store, _step_name(step)).files.items():
                name = _object_name(step, file)
                _check_entry(
                    store, step, file, FileEntry(store.size(name) or 0, store.hash(name)), entry
                )
        except MegatokenError as error:
            errors.append(error)
    return len(steps), errors


def fetch_run(run: Path, address: str, warn: Callable[[str], None]) -> Path | None:
    """Fetch the newest whole checkpoint and the small files of a run whose folder has no checkpoint.

    warn: called with a line for each damaged one that is passed over. Return its folder here; None where the folder has
    one, or none is there. Raises ConfigError as `check_owner`, CheckpointError when none there is whole, StorageError.
    """
    store = ObjectStore(address)
    if list_steps(run / CHECKPOINTS):
        check_owner(run, store)
        return None
    if not (steps := list_mirrored(store)) or read_identity(store) is None:
        return None
    _fetch_file(store, PROVENANCE, run)  # marks the folder as a run, should this be killed
    folder = fetch_newest(store, steps, run / CHECKPOINTS, warn)
    if folder is None:
        raise CheckpointError(
            "no checkpoint there is whole",
            address,
            "start without save.mirror, or with another one",
        )
    for name in (*RUN_FILES, IDENTITY):
        _fetch_file(store, name, run)
    return folder


def fetch_newest(
    store: ObjectStore, steps: Sequence[int], root: Path, warn: Callable[[str], None]
) -> Path | None:
    """Fetch the last of these checkpoints that is whole into the folder of checkpoints `root`; None if none is."""
    for step in reversed(steps):
        try:
            return fetch_checkpoint(store, step, root)
        except DamagedError as error:
            warn(f"{error} (passing over {_step_name(step)})")
    return None


def fetch_checkpoint(store: ObjectStore, step: int, root: Path) -> Path:
    """Fetch one checkpoint, so that it appears whole and verified or not at all. Raises DamagedError, StorageError."""
    manifest, entries = read_mark(store, _step_name(step)), dict[str, FileEntry]()
    needed_bytes = count_needed_bytes(sum(entry.bytes for entry in manifest.files.values()))
    draft = open_draft(root, step, needed_bytes)
    if draft is None:
        return step_folder(root, step)

    def fetch(file: str) -> None:
        try:
            written = write_files(
                draft, step, {file: partial(store.download, _object_name(step, file))}, needed_bytes
            )
        except MissingObjectError as error:
            raise damaged(store.at(_object_name(step, file)), "it is missing") from error
        _check_entry(store, step, file, written[file], manifest.files[file])
        entries.update(written)

    try:
        run_parallel([partial(fetch, file) for file in manifest.files])
        publish(draft, step, {file: entries[file] for file in manifest.files}, meta=manifest.meta)
    finally:
        discard(draft)
    return step_folder(root, step)


def fetch_model(address: str, warn: Callable[[str], None]) -> Path:
    """The folder of the cache with the newest whole checkpoint of the copy of a run, or with the one that is named.

    Raises CheckpointError where there is none.
    """
    run, _, last = address.rstrip("/").rpartition(f"/{CHECKPOINTS}/")
    named = STEP.fullmatch(last)
    store = ObjectStore(run if named else address)
    steps = [step for step in list_mirrored(store) if not named or step == int(named[1])]
    root = cache_folder("models", store.address, b"") / CHECKPOINTS
    with storage_errors(root), lock_folder(root.parent, "download", on_wait=lambda: None):
        folder = fetch_newest(store, steps, root, warn)
        if folder is None:
            what = "no checkpoint there is whole" if steps else "holds no checkpoint"
            raise CheckpointError(what, address, "name the address of a run's save.mirror")
        for other in root.iterdir():
            if other != folder:
                discard(other)
    return folder


class MirrorUploads:
    """Uploads of one run, one at a time, each by `update_mirror` in a process of its own."""

    def __init__(self, run: Path, address: str, *, keep_last: int, keep_every: int) -> None:
        words = [str(run), address, str(keep_last), str(keep_every)]
        self._command = [
            *python_command("from megatoken.checkpoint.mirror import main; main(sys.argv[1:])"),
            *words,
        ]
        self._root = run / CHECKPOINTS
        self._child: Child | None = None
        self._lines: list[str] = []
        self._waiting = False
        self._best: int | None = None
        self.step: int | None = None  # being uploaded, so it has to stay

    def start(self, best: int | None) -> None:
        """Begin an upload of the newest checkpoint, now or when the one that goes on has ended; none without one.

        best: another checkpoint to copy and keep.
        """
        self._waiting = self._child is not None
        self._best = best
        steps = list_steps(self._root)
        if self._child is None and steps:
            self.step = steps[-1]
            self._lines = []
            self._child = Child(
                [*self._command, "" if best is None else str(best)],
                stdout=self._lines.append,
                stderr=NULL,
                death_signal=None,  # set by `main`: here it would fork a large process
            )

    def poll(self, *, wait: bool = False) -> dict[str, Any] | None:
        """What the upload that has ended returned, or {"error": a line}; None while there is nothing to tell.

        wait: for the end of the one that goes on.
        """
        if self._child is None:
            return None
        exit_code = self._child.wait(None if wait else 0)
        if exit_code is None:
            return None
        lines = self._lines
        self._child = None
        self.step = None
        if self._waiting:
            self.start(self._best)
        if not lines:
            return {"error": f"the upload ended with code {exit_code}"}
        return dict(json.loads(lines[-1]))


def main(words: Sequence[str]) -> None:
    """The process of one upload: prints a line of JSON, and dies with the one that started it (Linux)."""
    for (
        name
    ) in FORWARDED:  # a terminal or a scheduler sends these to the whole group; training decides
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if ask := at_parent_death(signal.SIGKILL):
        ask()
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    run, address, keep_last, keep_every, best = words
    try:
        rules = {"keep_last": int(keep_last), "keep_every": int(keep_every)}
        answer = update_mirror(Path(run), address, **rules, best=int(best) if best else None)
    except MegatokenError as error:
        answer = {"error": str(error)}
    except Exception as error:
        answer = {"error": redact(f"{type(error).__name__}: {error}")}
    print(json.dumps(answer), flush=True)


def _check_entry(
    store: ObjectStore, step: int, file: str, found: FileEntry, expected: FileEntry
) -> None:
    if found.bytes != expected.bytes:
        raise damaged(
            store.at(_object_name(step, file)),
            f"it has {found.bytes:,} bytes, expected {expected.bytes:,}",
        )
    if found != expected:
        reason = f"its xxh3-128 is {found.xxh3_128}, expected {expected.xxh3_128}"
        raise damaged(store.at(_object_name(step, file)), reason)


def _fetch_file(store: ObjectStore, name: str, run: Path) -> None:
    with suppress(MissingObjectError), storage_errors(run):
        content = store.read(name)
        run.mkdir(parents=True, exist_ok=True)
        replace_file(run / name, content, durable=True)


def _step_name(step: int) -> str:
    return step_folder(Path(), step).name


def _object_name(step: int, file: str) -> str:
    return f"{CHECKPOINTS}/{_step_name(step)}/{file}"


def _parse_steps(names: Iterable[str]) -> list[int]:
    return sorted(int(step[1]) for name in names if (step := STEP.fullmatch(name)))
