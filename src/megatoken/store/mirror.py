"""Copy a run to another folder or an address such as s3://bucket/run. No torch.

`ADDRESS/checkpoints/step-00000010/` gets the files of a checkpoint, each read back after its
upload, and then its `manifest.json`. Only a checkpoint with a manifest counts as complete, so an
upload may be interrupted at any moment. Small files of the run are next to `checkpoints/`.
`mirror.json`, in the run folder and at the address, holds an id of the run.
"""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatoken.base.errors import CheckpointError, ConfigError, MegatokenError, Warn
from megatoken.base.system.atomic_write import read_object, replace_file, storage_errors
from megatoken.base.system.file_lock import lock_folder
from megatoken.base.system.metrics_log import METRICS
from megatoken.store.commit import (
    choose_surplus,
    count_needed_bytes,
    discard,
    list_steps,
    open_draft,
    parse_steps,
    publish,
    step_folder,
)
from megatoken.store.datasets import cache_folder
from megatoken.store.manifest import (
    MANIFEST,
    STEP,
    CheckpointManifest,
    DamagedError,
    damaged,
    describe_hash,
    parse_manifest,
    verify,
)
from megatoken.store.objects import MissingObjectError, ObjectStore, Read, StoredFiles, hash_ranges
from megatoken.store.run_folder import CHECKPOINTS, CONFIG, IDENTITY, MACHINE, PROVENANCE

RUN_FILES = (CONFIG, MACHINE, METRICS, PROVENANCE)


def list_mirrored(store: ObjectStore) -> list[int]:
    """Return the steps of checkpoints that have a manifest at the address, ascending."""
    paths = [name.split("/") for name in store.list(CHECKPOINTS)]
    return parse_steps([path[1] for path in paths if path[2:] == [MANIFEST]])


def check_owner(run: Path, store: ObjectStore) -> None:
    """Check that a mirror belongs to this run and has no later checkpoints than the run folder.

    An address without a mirror is claimed for this run. Raises ConfigError if a check fails, and
    StorageError if the mirror cannot be read or written.
    """
    identity = read_object(run / IDENTITY)
    local_id = identity.get("run")
    remote_id = read_identity(store)
    mirrored = list_mirrored(store)
    # No id here, no checkpoint there: an earlier start failed before its first save.
    if remote_id is None or (local_id is None and not mirrored):
        local_id = local_id or remote_id or uuid.uuid4().hex
        remote_id = local_id
        _write_identity(run, {**identity, "run": local_id})
        store.write(IDENTITY, f"{json.dumps({'run': local_id})}\n".encode())
    if remote_id != local_id:
        fix = "choose another save.mirror, or a new --out to continue that run"
        raise ConfigError("save.mirror holds another run", store.address, fix)
    steps = list_steps(run / CHECKPOINTS)
    if steps and mirrored and mirrored[-1] > steps[-1] and not identity.get("rewound"):
        what = f"save.mirror is ahead: step {mirrored[-1]:,} there, {steps[-1]:,} here"
        fix = "choose a new --out to continue from there, or another save.mirror"
        raise ConfigError(what, store.address, fix)


def allow_rewind(run: Path) -> None:
    """Let the next upload delete mirrored checkpoints that are later than the newest local one."""
    identity = read_object(run / IDENTITY)
    if identity:
        _write_identity(run, {**identity, "rewound": True})


def _write_identity(run: Path, identity: Mapping[str, Any]) -> None:
    with storage_errors(run):
        replace_file(run / IDENTITY, json.dumps(identity) + "\n", durable=True)


def read_identity(store: ObjectStore) -> str | None:
    """Return the id of the mirrored run, None if the address holds no mirror, "" if damaged."""
    try:
        return str(json.loads(store.read(IDENTITY))["run"])
    except MissingObjectError:
        return None
    except (ValueError, LookupError, TypeError):
        return ""


def update_mirror(
    run: Path, address: str, *, keep_last: int, keep_every: int, best: int | None = None
) -> dict[str, Any]:
    """Upload what is missing in a run's mirror, prune the mirror, and return a report for the log.

    It uploads small files, the newest checkpoint, the `best` one and multiples of `keep_every`. Old
    checkpoints are removed by the same rules as in `prune`. If it raises MegatokenError, the next
    call continues from what was already uploaded.

    run: has a checkpoint.
    """
    start = time.monotonic()
    store = ObjectStore(address)
    check_owner(run, store)
    for name in RUN_FILES:
        if (run / name).is_file():
            store.write(name, (run / name).read_bytes())
    steps = list_steps(run / CHECKPOINTS)
    surplus = choose_surplus(steps, keep_last=1, keep_every=keep_every, keep=[best])
    wanted = [step for step in reversed(steps) if step not in surplus]
    missing = [step for step in wanted if not _is_complete(store, step)]
    n_bytes = sum(upload_checkpoint(run, store, step) for step in missing)
    identity = read_object(run / IDENTITY)
    if identity.pop("rewound", False):
        remove_steps(store, [step for step in list_mirrored(store) if step > steps[-1]])
        _write_identity(run, identity)
    prune_mirror(store, keep_last=keep_last, keep_every=keep_every, best=best)
    return {
        "uploaded": [step_folder(run, step).name for step in missing],
        "bytes": n_bytes,
        "seconds": time.monotonic() - start,
    }


def upload_checkpoint(run: Path, store: ObjectStore, step: int) -> int:
    """Upload a checkpoint, its manifest last, and return the number of bytes.

    Raises DamagedError if the local checkpoint is damaged.
    """
    folder = step_folder(run / CHECKPOINTS, step)
    entries = verify(folder).files
    hashes = {name: entry.xxh3_128 for name, entry in entries.items()}
    store.below(f"{CHECKPOINTS}/{folder.name}").commit(folder, hashes, MANIFEST)
    open_mirrored(store, step)
    return sum(entry.bytes for entry in entries.values())


def open_mirrored(store: ObjectStore, step: int) -> tuple[CheckpointManifest, StoredFiles]:
    """Read the manifest of a mirrored checkpoint. Raises DamagedError."""
    name = step_folder(Path(), step).name
    checkpoint = store.below(f"{CHECKPOINTS}/{name}")
    where = checkpoint.at(MANIFEST)
    try:
        manifest = parse_manifest(checkpoint.read(MANIFEST), where, name)
    except MissingObjectError as error:
        raise damaged(where, "it is missing, so this was never committed") from error

    def find_damage(file: str, read: Read) -> str:
        entry = manifest.files[file]
        return describe_hash(hash_ranges(read, entry.bytes), entry)

    sizes = {file: entry.bytes for file, entry in manifest.files.items()}
    return manifest, StoredFiles(checkpoint, sizes, find_damage, damaged)


def prune_mirror(store: ObjectStore, *, keep_last: int, keep_every: int, best: int | None) -> None:
    """Remove old mirrored checkpoints, and old remains of interrupted uploads.

    Files of an upload are old if the newest checkpoint has a later step. A checkpoint
    counts as valid if all its files have their full size. Raises StorageError.

    keep_last, keep_every: as in `prune`. best: another step to keep.
    """
    steps = list_mirrored(store)
    valid = partial(_is_complete, store)
    surplus = choose_surplus(steps, valid, keep_last=keep_last, keep_every=keep_every, keep=[best])
    folders = parse_steps({name.split("/")[1] for name in store.list(CHECKPOINTS)})
    incomplete = {*folders} - {*steps}
    remove_steps(store, [*surplus, *(step for step in incomplete if step < max(steps, default=0))])


def remove_steps(store: ObjectStore, steps: Sequence[int]) -> None:
    """Remove mirrored checkpoints, starting in each with its manifest. Raises StorageError."""
    for step in steps:
        name = step_folder(Path(CHECKPOINTS), step).as_posix()
        store.remove(f"{name}/{MANIFEST}")
        store.remove(name)


def _is_complete(store: ObjectStore, step: int) -> bool:
    """Return whether a mirrored checkpoint has a manifest and every file at its full size."""
    with suppress(DamagedError):
        _, files = open_mirrored(store, step)
        stored = {name: info.bytes for name, info in files.store.list().items()}
        return files.sizes.items() <= stored.items()
    return False


def verify_mirror(store: ObjectStore) -> tuple[int, list[MegatokenError]]:
    """Verify all mirrored checkpoints by reading every byte.

    Returns their number, and the first error of each damaged one.
    """
    errors: list[MegatokenError] = []
    steps = list_mirrored(store)
    for step in steps:
        try:
            errors += open_mirrored(store, step)[1].verify()[:1]
        except MegatokenError as error:
            errors.append(error)
    return len(steps), errors


def fetch_run(run: Path, address: str, warn: Warn) -> Path | None:
    """Fetch a run's newest valid checkpoint and its small files, if the run folder has none.

    Returns the checkpoint's local folder, or None if nothing was fetched, because the run folder
    has a checkpoint or the mirror has none. Raises what `check_owner` raises, and CheckpointError
    if all mirrored checkpoints are damaged.

    warn: called with a message for each damaged checkpoint.
    """
    store = ObjectStore(address)
    if list_steps(run / CHECKPOINTS):
        check_owner(run, store)
        return None
    steps = list_mirrored(store)
    if not steps or read_identity(store) is None:
        return None
    _fetch_file(store, PROVENANCE, run)  # makes the folder a run even if this process is killed
    folder = fetch_newest(store, steps, run / CHECKPOINTS, warn)
    if folder is None:
        fix = "start without save.mirror, or with another one"
        raise CheckpointError("all checkpoints there are damaged", address, fix)
    for name in (*RUN_FILES, IDENTITY):
        _fetch_file(store, name, run)
    return folder


def fetch_newest(store: ObjectStore, steps: Sequence[int], root: Path, warn: Warn) -> Path | None:
    """Fetch the newest valid checkpoint of these ascending steps into `root`; return its folder.

    Returns None if all are damaged.
    """
    for step in reversed(steps):
        try:
            return fetch_checkpoint(store, step, root)
        except DamagedError as error:
            warn(f"{error} (skipping {step_folder(root, step).name})")
    return None


def fetch_checkpoint(store: ObjectStore, step: int, root: Path) -> Path:
    """Fetch and commit one checkpoint. Raises DamagedError, StorageError."""
    manifest, files = open_mirrored(store, step)
    draft = open_draft(root, step, count_needed_bytes(sum(files.sizes.values())))
    if draft is not None:
        try:
            with storage_errors(draft):
                files.fetch(draft)
            publish(draft, step, manifest.files, meta=manifest.meta)
        finally:
            discard(draft)
    return step_folder(root, step)


def fetch_model(address: str, warn: Warn) -> Path:
    """Fetch a checkpoint from a mirror into the cache, and return its local folder.

    Raises CheckpointError if no checkpoint is found.

    address: of a mirror, for its newest valid checkpoint, or of one checkpoint in it.
    """
    run, _, last = address.rstrip("/").rpartition(f"/{CHECKPOINTS}/")
    named = STEP.fullmatch(last)
    store = ObjectStore(run if named else address)
    steps = [step for step in list_mirrored(store) if not named or step == int(named[1])]
    root = cache_folder("models", store.address, b"") / CHECKPOINTS
    with storage_errors(root), lock_folder(root.parent, "download", on_wait=lambda: None):
        folder = fetch_newest(store, steps, root, warn)
        if folder is None:
            what = "all checkpoints there are damaged" if steps else "no checkpoint there"
            raise CheckpointError(what, address, "name the address of a run's save.mirror")
        for other in root.iterdir():
            if other != folder:
                discard(other)
    return folder


def _fetch_file(store: ObjectStore, name: str, run: Path) -> None:
    with suppress(MissingObjectError), storage_errors(run):
        content = store.read(name)
        run.mkdir(parents=True, exist_ok=True)
        replace_file(run / name, content, durable=True)
