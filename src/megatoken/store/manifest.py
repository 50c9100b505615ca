"""Read, write and verify the manifest of a checkpoint. No torch.

`manifest.json` holds the size and xxh3-128 hash of every file, and a hash of itself. Every version
of the format computes that hash in the same way, so that a damaged manifest is not mistaken for one
of another version.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import xxhash

from megatoken.base.config.fields import list_fields, parse_value
from megatoken.base.config.load import IMPORTS
from megatoken.base.config.model_config import ModelConfig, validate_model
from megatoken.base.errors import CheckpointError
from megatoken.base.rooms import ask_for_modules
from megatoken.base.system.atomic_write import BLOCK_BYTES, MALFORMED, hash_file, read_small_file
from megatoken.base.system.sealed_json import parse_sealed, seal

FORMAT = 1
MANIFEST = "manifest.json"
STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")  # use fullmatch, which rejects step-10.bak
# Names in `meta.shape` that differ from ModelConfig's.
_SAVED_NAMES = {"pos_emb": "positions", "tie_embeddings": "tied"}


class DamagedError(CheckpointError):
    """A checkpoint is missing or damaged, so it may be replaced and an older one used instead."""


@dataclass(frozen=True)
class FileEntry:
    """A file listed in a manifest.

    mtime_ns: the file's mtime when this process hashed it; negative if it did not. Not saved.
    """

    bytes: int
    xxh3_128: str
    mtime_ns: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a manifest. File names are relative to the checkpoint, separated by `/`."""

    step: int
    meta: Mapping[str, Any]
    files: Mapping[str, FileEntry]


class VerifiedFile:
    """Reads a file once, in order, and hashes each block while it is in the CPU's cache."""

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self._path = path
        self._entry = entry
        self._hash = xxhash.xxh3_128()
        with read_errors(path):
            self._file = path.open("rb", buffering=0)
            self._mtime_ns = os.fstat(self._file.fileno()).st_mtime_ns

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def skip_header(self) -> None:
        """Read the header of a safetensors file: its length in 8 bytes, then JSON."""
        length = memoryview(bytearray(8))
        self.read_into(length)
        n_bytes = min(int.from_bytes(length, "little"), self._entry.bytes)
        self.read_into(memoryview(bytearray(n_bytes)))

    def read_into(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes, which are not verified until `finish` returns."""
        while len(buffer):
            block = buffer[:BLOCK_BYTES]
            with read_errors(self._path):
                size = self._file.readinto(block)
            if not size:
                raise damaged(self._path, f"it ends before {self._entry.bytes:,} bytes")
            self._hash.update(block[:size])
            buffer = buffer[size:]

    def finish(self) -> FileEntry:
        """Check the hash, and return the file's entry. The whole file must have been read.

        Raises DamagedError.
        """
        _check_hash(self._path, self._hash.hexdigest(), self._entry)
        return replace(self._entry, mtime_ns=self._mtime_ns)


def verify(
    folder: Path,
    *,
    hashes: Callable[[str], bool] | None = None,
    known: Mapping[str, FileEntry] | None = None,
) -> CheckpointManifest:
    """Verify a checkpoint and return its manifest. Raises DamagedError naming the damaged file.

    It checks the manifest's hash and format, the step in the folder's name, that no file is missing
    or extra, and the size and hash of each file. Raises CheckpointError for an intact checkpoint of
    another format, which callers must not skip or overwrite.

    hashes: function that returns for a file name whether to check the hash; None to check all.
    known: entries of files that this process has already hashed; they are hashed again only if
        their mtime has changed.
    """
    if not folder.is_dir():
        raise DamagedError("no checkpoint here", str(folder), "choose an existing folder")
    with read_errors(folder):
        manifest = read_manifest(folder)
        files = dict(manifest.files)
        statuses = list_files(folder)
        for name, status in statuses.items():
            if not stat.S_ISREG(status.st_mode):
                raise damaged(folder / name, "it is a link or a device, not a file")
        statuses.pop(MANIFEST, None)
        for name in sorted({*statuses, *files}):
            if name not in files:
                raise damaged(folder / name, "it is not in the manifest")
            if name not in statuses:
                raise damaged(folder / name, "it is missing")
            entry = files[name]
            size = statuses[name].st_size
            if size != entry.bytes:
                raise damaged(folder / name, f"it has {size:,} bytes, expected {entry.bytes:,}")
            mtime_ns = statuses[name].st_mtime_ns
            hashed = (known or {}).get(name)
            if hashed != entry or hashed.mtime_ns != mtime_ns:
                if hashes is not None and not hashes(name):
                    continue
                _check_hash(folder / name, hash_file(folder / name), entry)
            files[name] = replace(entry, mtime_ns=mtime_ns)
    return replace(manifest, files=files)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint folder, and check its hash, format and step.

    Raises what `verify` raises.
    """
    path = folder / MANIFEST
    with read_errors(path):
        if not path.is_file():
            raise damaged(path, "it is missing, so this was never committed")
        raw = read_small_file(path)
    return parse_manifest(raw, path, folder.name)


def parse_manifest(raw: bytes, path: Path | str, folder_name: str) -> CheckpointManifest:
    """Parse and check the content of a manifest file. Raises what `verify` raises.

    path: of the file, for errors. folder_name: the checkpoint's, which must contain the same step.
    """
    try:
        content = parse_sealed(raw)
        if content["format"] != FORMAT:
            what = f"checkpoint has format {content['format']}, not {FORMAT}"
            folder = str(path).removesuffix(f"/{MANIFEST}")
            raise CheckpointError(what, folder, "use the megatoken that wrote it, or move it away")
        files = {
            name: FileEntry(int(entry["bytes"]), entry["xxh3_128"])
            for name, entry in content["files"].items()
        }
        manifest = CheckpointManifest(int(content["step"]), dict(content["meta"]), files)
    except MALFORMED as error:
        raise damaged(path, f"it is malformed: {type(error).__name__}: {error}") from error
    folder_step = STEP.fullmatch(folder_name)
    if folder_step and int(folder_step[1]) != manifest.step:
        raise damaged(path, f"it belongs to step {manifest.step}, not to this folder")
    return manifest


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the manifest as JSON with a hash of itself. Raises ValueError if it holds NaN."""
    files = {
        name: {"bytes": entry.bytes, "xxh3_128": entry.xxh3_128}
        for name, entry in manifest.files.items()
    }
    content = {"format": FORMAT, "step": manifest.step, "meta": dict(manifest.meta), "files": files}
    body = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}")
    return seal(body.encode(), bits=128, indent=" ")


def encode_model_config(config: ModelConfig) -> dict[str, Any]:
    """Return the architecture as the JSON object that a manifest stores as `meta.shape`."""
    return {
        _SAVED_NAMES.get(f.name, f.name): getattr(config, f.name)
        for f in fields(config)
        if f.compare
    }


def decode_model_config(meta: Mapping[str, Any], folder: Path) -> ModelConfig:
    """Return the architecture stored as `shape`; missing fields get GPT-2's values.

    Raises CheckpointError if the value is malformed.
    """
    names = {saved: name for name, saved in _SAVED_NAMES.items()}
    try:
        shape = meta["shape"]
        config = ModelConfig(**{names.get(name, name): value for name, value in shape.items()})
        values = {}
        for spec in list_fields(config, "model."):
            name = spec.key.removeprefix("model.")
            values[name] = parse_value(spec, str(getattr(config, name)))
        config = replace(config, **values)
        problems = [what for _, what, _ in validate_model(config)]
    except MALFORMED as error:
        problems = [str(error)]
    if problems:
        what = f"manifest.json does not describe a model: {problems[0]:.200}"
        raise CheckpointError(what, str(folder), ask_for_modules(meta.get(IMPORTS, ())))
    return config


def list_files(folder: Path) -> dict[str, os.stat_result]:
    """Return the stat result of every file and link below a folder, by name. Raises OSError."""
    statuses = {path.relative_to(folder).as_posix(): path.lstat() for path in folder.rglob("*")}
    return {name: each for name, each in statuses.items() if not stat.S_ISDIR(each.st_mode)}


def describe_hash(actual: str, entry: FileEntry) -> str:
    """Say that a file has another hash than in its entry, or return ""."""
    expected = entry.xxh3_128
    return "" if actual == expected else f"its xxh3-128 is {actual}, expected {expected}"


def _check_hash(path: Path, actual: str, entry: FileEntry) -> None:
    if damage := describe_hash(actual, entry):
        raise damaged(path, damage)


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Convert OSError to DamagedError."""
    try:
        yield
    except OSError as error:
        where = Path(error.filename or path)
        raise damaged(where, f"it cannot be read: {error.strerror}") from error


def damaged(path: Path | str, reason: str) -> DamagedError:
    """Return the error for a damaged file of a checkpoint."""
    what = f"checkpoint is damaged: {reason}"
    return DamagedError(what, str(path), "an older checkpoint is used if there is one")
