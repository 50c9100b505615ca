"""The dataset format: shards, their block hashes, and `manifest.json`.

A folder holds `manifest.json`, `tokenizer/`, `inputs.xxh3` and shards `train_000000.bin`, ...,
`val_000000.bin`, .... `inputs.xxh3` covers the modification times of the text files, so it is the
only file that can differ between two preparations of the same text. A shard has llm.c's layout: a
header of 256 little-endian int32, then the tokens. Header bytes 32..63 are the tokenizer's sha256,
which other programs ignore. Beside it, `train_000000.xxh3` holds the xxh3_64 of each block of
tokens, as little-endian uint64. The manifest has a hash of that file.

A large dataset is divided into parts: folders with a manifest and shards of their own. Then the
manifest has a hash of each part's manifest, so its size does not depend on the number of shards.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatoken.base.errors import DataError
from megatoken.base.system.atomic_write import MALFORMED, read_small_file, replace_file
from megatoken.base.system.sealed_json import parse_sealed, seal

HEADER_BYTES = 1024
BLOCK_BYTES = 1 << 16  # bytes of tokens per hash
HASH_BYTES = 8
MANIFEST_NAME = "manifest.json"
PROGRESS_NAME = "progress.json"  # of an unfinished preparation
INPUTS_NAME = "inputs.xxh3"  # hash of the listing of the text files, with their times
DESCRIPTION_NAME = "megatoken_tokenizer.json"  # in tokenizer/: its manifest entry, and a hash
FORMAT_VERSION = 2
LARGEST_MANIFEST = 1 << 28  # bytes, enough for 2 million shards

# dtype -> (magic, version) of llm.c, as its data_common.py writes GPT-2 and LLaMA-3 shards.
MAGICS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}
SPLITS = ("train", "val")

_FINGERPRINT = slice(32, 64)
RESTORE = "restore it from a copy or prepare the dataset again"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A row of the manifest: a file of tokens."""

    file: str  # name inside the folder
    split: str  # "train" | "val"
    tokens: int
    hash: str  # xxh3_128 hex of `hashes_file`; "" if external

    @property
    def hashes_file(self) -> str:
        """Name of the file with the hashes of its blocks."""
        return f"{self.file.removesuffix('.bin')}.xxh3"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A row of the manifest: a folder with a manifest and shards of its own."""

    name: str
    tokens: dict[str, int]  # per split
    hash: str  # xxh3_128 hex of its manifest.json


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The tokenizer, token type, documents and shards of a dataset, and how they were made.

    A dataset in parts has no shards here. bytes: for each split, the sizes that
    `Tokenizer.measure_text` returns; empty if not measured.
    """

    tokenizer: dict[str, Any]  # name, vocab_size, eot, fingerprint (sha256 hex; "" if external)
    dtype: str  # "uint16" | "uint32"
    documents: dict[str, int]  # per split
    shards: tuple[Shard, ...]  # in reading order
    source: dict[str, Any]  # settings and counts, without times, workers and paths
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()  # in reading order

    def tokens(self, split: str) -> int:
        """Return the number of tokens in `split`."""
        in_shards = sum(shard.tokens for shard in self.shards if shard.split == split)
        return in_shards + sum(part.tokens[split] for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """The xxh3_128 hex of the manifest. It covers every block of tokens."""
        return hash_bytes(_encode_manifest(self))


@dataclass(frozen=True, kw_only=True)
class Header:
    """The fields of a shard's header."""

    dtype: str
    tokens: int
    fingerprint: str  # sha256 hex of the tokenizer; "" if not recorded


@contextmanager
def read_errors(where: str | Path) -> Iterator[None]:
    """Convert OSError to DataError. where: the file, for the error message."""
    try:
        yield
    except OSError as error:
        fix = "check the path and its permissions"
        raise DataError(f"cannot read: {error.strerror}", where, fix) from error


def hash_blocks(data: Any) -> NDArray[np.uint64]:
    """Return the xxh3_64 of each block of BLOCK_BYTES in a buffer; the last block can be shorter.

    It detects accidents, not attacks.
    """
    view = memoryview(data).cast("B")
    blocks = (view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES))
    return np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], "<u8")


def hash_bytes(data: bytes) -> str:
    """Return the xxh3_128 hex of small files: block hashes and manifests of parts."""
    return str(xxhash.xxh3_128_hexdigest(data))


def check_hash(data: bytes, expected: str, where: str | Path) -> bytes:
    """Return `data`. Raises DataError, naming the file `where`, unless it has this hash."""
    actual = hash_bytes(data)
    if actual != expected:
        what = f"file is damaged: hash {actual}, expected {expected}"
        raise DataError(what, where, RESTORE)
    return data


def make_header(tokens: int, dtype: str, fingerprint: str) -> bytes:
    """Return the 1,024 header bytes of a shard.

    fingerprint: sha256 hex of the tokenizer, or "" if unknown.
    """
    assert 0 <= tokens < 2**31, "llm.c keeps the count in an int32"
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = (*MAGICS[dtype], tokens)
    raw = bytearray(header.tobytes())
    if fingerprint:
        digest = bytes.fromhex(fingerprint)
        assert len(digest) == 32, "a tokenizer's fingerprint is a sha256"
        raw[_FINGERPRINT] = digest
    return bytes(raw)


def has_magic(raw: bytes) -> bool:
    """Return whether `raw` begins with the magic number of a shard header."""
    return any(raw.startswith(magic.to_bytes(4, "little")) for magic, _ in MAGICS.values())


def read_header(raw: bytes, where: str | Path) -> Header:
    """Decode 1,024 header bytes. Raises DataError, naming the file `where`, if they are wrong."""
    dtypes = {magic: dtype for dtype, magic in MAGICS.items()}
    magic, version, tokens = np.frombuffer(raw.ljust(12, b"\0")[:12], dtype="<i4").tolist()
    dtype = dtypes.get((magic, version))
    if dtype is None or tokens < 0 or len(raw) < HEADER_BYTES:
        what = f"not a token shard: its header starts with {magic}, {version}, {tokens}"
        raise DataError(what, where, "remove it from the folder or prepare it again")
    digest = raw[_FINGERPRINT]
    return Header(dtype=dtype, tokens=tokens, fingerprint=digest.hex() if any(digest) else "")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` atomically and durably. Raises OSError."""
    replace_file(folder / MANIFEST_NAME, seal(_encode_manifest(manifest), bits=64), durable=True)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises DataError if it is missing, unreadable, damaged or of another version.
    """
    path = folder / MANIFEST_NAME
    with read_errors(path):
        return parse_manifest(read_small_file(path, LARGEST_MANIFEST), path)


def parse_manifest(data: bytes, where: str | Path) -> Manifest:
    """Decode the bytes of `manifest.json`. Raises DataError as `read_manifest` does."""
    try:
        content = parse_sealed(data)
        version = content["version"]
        if content["format"] != "megatoken dataset" or version != FORMAT_VERSION:
            what = f"manifest of version {version!r}; this program reads version {FORMAT_VERSION}"
            raise DataError(what, where, "prepare the dataset again")
        manifest = Manifest(
            tokenizer=content["tokenizer"],
            dtype=content["dtype"],
            documents=content["documents"],
            shards=tuple(_decode_shard(row) for row in content["shards"]),
            source=content["source"],
            bytes=content.get("bytes", {}),
            parts=tuple(_decode_part(row) for row in content.get("parts", ())),
        )
        tokenizer = manifest.tokenizer
        numbers = [tokenizer["vocab_size"], tokenizer["eot"], *manifest.documents.values()]
        numbers += [shard.tokens for shard in manifest.shards]
        numbers += [count for part in manifest.parts for count in part.tokens.values()]
        has_types = isinstance(manifest.source, dict) and manifest.dtype in MAGICS
        texts = [tokenizer["name"], tokenizer["fingerprint"]]
        if not has_types or {*map(type, numbers)} != {int} or {*map(type, texts)} != {str}:
            raise ValueError("a value has a wrong type")
        return manifest
    except MALFORMED as error:
        raise DataError(f"manifest is damaged: {error!r}", where, RESTORE) from error


def _encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON with sorted keys and one shard per line.

    The closing brace is left out, because `seal` appends the checksum and the brace.
    """

    def dump(value: Any) -> str:
        return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False)

    def dump_rows(rows: Iterable[Shard | Part]) -> str:
        return "[\n" + ",\n".join(dump(asdict(row)) for row in rows) + "\n]"

    counts = {split: manifest.tokens(split) for split in SPLITS}
    sizes = f'"bytes": {dump(manifest.bytes)},\n' if manifest.bytes else ""
    parts = f'"parts": {dump_rows(manifest.parts)},\n' if manifest.parts else ""
    return (
        f'{{\n"format": "megatoken dataset",\n"version": {FORMAT_VERSION},\n'
        f'"dtype": {dump(manifest.dtype)},\n'
        f'"tokens": {dump(counts)},\n"documents": {dump(manifest.documents)},\n{sizes}'
        f'"tokenizer": {dump(manifest.tokenizer)},\n"source": {dump(manifest.source)},\n{parts}'
        f'"shards": {dump_rows(manifest.shards)}'
    ).encode("ascii")


def _decode_shard(row: dict[str, Any]) -> Shard:
    shard = Shard(**row)
    if not _is_inside(shard.file) or shard.split not in SPLITS or shard.tokens < 0:
        raise ValueError(f"bad shard {shard.file!r}")
    return shard


def _decode_part(row: dict[str, Any]) -> Part:
    part = Part(**row)
    if not _is_inside(part.name) or any(part.tokens[split] < 0 for split in SPLITS):
        raise ValueError(f"bad part {part.name!r}")
    return part


def _is_inside(name: str) -> bool:
    """Return whether a name is of something in the dataset's own folder."""
    return bool(re.fullmatch(r"\w[\w.-]*", name))
