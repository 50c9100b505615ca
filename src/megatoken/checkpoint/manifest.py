"""What a checkpoint says of itself: the manifest with the hash of every file, and checking a folder against it.

In: a folder. Out: a `Manifest` if every byte is as written, else Fault(CHECKPOINT) that names the file and both
hashes. The manifest is JSON whose last key, `xxh3`, is the hash of all bytes before it; that ending is the same in
every format, so a flipped bit is told apart from another format.

xxh3 finds accidents, not forgers; names and sizes out of a manifest are treated as hostile all the same.
Absent on purpose: writing, choosing and removing checkpoints (store), torch.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatoken.errors import Exit, Fault

FORMAT = 1
MANIFEST = "manifest.json"
LIMIT_BYTES = 4 * 2**20  # the worst JSON of this size parses into about 100 MB
STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")  # always with fullmatch: step-10.bak is no checkpoint
_SEAL = re.compile(rb',\n "xxh3": "([0-9a-f]{32})"\n}\n')
_CHUNK_BYTES = 4 * 2**20

Signature = frozenset[tuple[str, int, int, int, int]]  # of a folder: (name, device, inode, bytes, mtime in ns)


class OtherFormat(Fault):
    """The checkpoint is whole but of another format: never skipped, never overwritten."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What the manifest knows of one file."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a verified checkpoint says of itself; files by name relative to the folder, with `/`."""

    step: int
    meta: Mapping[str, Any]
    files: Mapping[str, Stored]


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and return its manifest, or raise Fault(CHECKPOINT) naming the file.

    Checked: the manifest's own hash and format, size and xxh3-128 of each file, no file missing or extra,
    nothing but plain files and folders, no name that leaves the folder, the step in the folder's name.
    """
    try:
        signature = sign(folder)
        manifest = read_manifest(folder)
        _compare_listing(folder, manifest, {name: size for name, _, _, size, _ in signature})
        for name in manifest.files:
            verify_file(folder, manifest, name)
    except OSError as failure:
        where = Path(failure.filename or folder)
        if isinstance(failure, FileNotFoundError) and where == folder:
            raise Fault(Exit.CHECKPOINT, "no checkpoint here", str(folder), "name an existing folder") from failure
        raise _damaged(where, f"it cannot be read: {failure.strerror}") from failure
    return manifest


def verify_file(folder: Path, manifest: Manifest, name: str) -> None:
    """Read every byte of one file. Raises Fault(CHECKPOINT) unless they are as written, OSError as the disk does."""
    actual, expected = hash_file(folder / name), manifest.files[name].xxh3_128
    if actual != expected:
        raise _damaged(folder / name, f"its xxh3-128 is {actual}, expected {expected}")


def seal(manifest: Manifest) -> bytes:
    """The manifest as it stands on disk, closed with the hash of everything before that last key."""
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "meta": dict(manifest.meta),
        "files": {name: asdict(stored) for name, stored in manifest.files.items()},
    }
    body = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}").encode()
    sealed = body + b',\n "xxh3": "' + xxhash.xxh3_128(body).hexdigest().encode() + b'"\n}\n'
    if len(sealed) > LIMIT_BYTES:
        raise ValueError(f"manifest of {len(sealed):,} bytes: put what is large into a file of its own")
    return sealed


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder: size, own hash, format and every value checked, in that order."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT_BYTES + 1)
    except FileNotFoundError as failure:
        raise _damaged(path, "it is missing, so this was never committed") from failure
    if len(raw) > LIMIT_BYTES:
        raise _damaged(path, f"it is larger than {LIMIT_BYTES:,} bytes")
    start = raw.rfind(b",\n")
    seal = _SEAL.fullmatch(raw, max(0, start))
    if start < 0 or seal is None:
        raise _damaged(path, "it does not end with its own hash (cut short?)")
    expected, actual = seal[1].decode(), xxhash.xxh3_128(raw[:start]).hexdigest()
    if actual != expected:
        raise _damaged(path, f"its xxh3-128 is {actual}, expected {expected}")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as failure:
        raise _damaged(path, f"it is not JSON ({type(failure).__name__})") from failure
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise OtherFormat(
            Exit.CHECKPOINT,
            f"checkpoint has format {str(content.get('format'))[:40]}, this megatoken reads format {FORMAT}",
            str(folder),
            "use the megatoken that wrote it, or move the folder away",
        )
    return _parse_manifest(path, content)


def _parse_manifest(path: Path, content: Any) -> Manifest:
    """Check the shape of a decoded manifest and every name in it."""
    match content:
        case {"step": int(step), "meta": dict(meta), "files": dict(entries)}:
            pass
        case _:
            raise _damaged(path, "step, meta or files is missing or of the wrong type")
    named = STEP.fullmatch(path.parent.name)
    if named and int(named[1]) != step:
        raise _damaged(path, f"it belongs to step {step}, not to this folder")
    files = {}
    for name, entry in entries.items():
        if not is_contained(name):
            raise _damaged(path, f"it names a file outside the checkpoint: {name[:200]!r}")
        match entry:
            case {"bytes": int(size), "xxh3_128": str(digest)} if size >= 0:
                files[name] = Stored(size, digest)
            case _:
                raise _damaged(path, f"bytes or xxh3_128 of {name!r} is missing or of the wrong type")
    return Manifest(step, meta, files)


def _compare_listing(folder: Path, manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Fault unless the folder holds exactly the files of the manifest, each of its size."""
    for name in sorted(sizes.keys() - manifest.files.keys() - {MANIFEST}):
        raise _damaged(folder / name, "the manifest does not know it")
    for name, stored in manifest.files.items():
        if name not in sizes:
            raise _damaged(folder / name, f"it is missing, expected xxh3-128 {stored.xxh3_128}")
        if sizes[name] != stored.bytes:
            raise _damaged(folder / name, f"it has {sizes[name]:,} bytes, expected {stored.bytes:,}")


def sign(folder: Path) -> Signature:
    """What stat says of every file below a folder; Fault(CHECKPOINT) if one is not a plain file."""
    found = []
    pending = [(folder, "")]
    while pending:
        current, prefix = pending.pop()
        with os.scandir(current) as entries:
            for entry in entries:
                facts = Path(entry.path).lstat()
                if stat.S_ISDIR(facts.st_mode):
                    pending.append((Path(entry.path), f"{prefix}{entry.name}/"))
                elif stat.S_ISREG(facts.st_mode):
                    name = prefix + entry.name
                    found.append((name, facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns))
                else:
                    raise _damaged(Path(entry.path), "it is a link or a device, not a plain file")
    return frozenset(found)


def is_contained(name: str) -> bool:
    """Whether a name stays inside its folder on every system and is not the manifest's."""
    parts = name.split("/")
    return (
        len(name) <= 1000
        and name.isprintable()
        and not any(mark in name for mark in "\\:")
        and not any(part in ("", ".", "..") for part in parts)
        and name != MANIFEST
    )


def hash_file(path: Path) -> str:
    """xxh3-128 of a file, as 32 hex digits."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(min(_CHUNK_BYTES, path.stat().st_size + 1))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return str(digest.hexdigest())


def _damaged(path: Path, how: str) -> Fault:
    return Fault(
        Exit.CHECKPOINT,
        f"checkpoint is damaged: {how}",
        str(path),
        "an older checkpoint is used where there is one",
    )
