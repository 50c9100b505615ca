"""The form of a dataset on disk: shard headers and the manifest beside them.

In: token counts, dtype names, hashes. Out: header bytes, `manifest.json`, and both of them read back and
checked. Deliberately absent: reading tokens (dataset.py) and making them (prepare.py).

A folder holds `manifest.json`, `tokenizer/` (files that rebuild the tokenizer) and shards named
`train_000000.bin`, `val_000000.bin`. A shard is llm.c's layout: 256 little-endian int32 of header, then the
tokens. Ours adds the tokenizer's sha256 in header bytes 32..63, which llm.c and modded-nanogpt ignore.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatoken.errors import Exit, Fault

HEADER_BYTES = 1024
BLOCK_BYTES = 1 << 18  # unit of hashing; blocks are counted over token bytes, after the header
MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1

# dtype -> (magic, version) of llm.c: dev/data/data_common.py writes GPT-2 and LLaMA-3 shards with these.
MAGICS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}
ITEM_BYTES = {"uint16": 2, "uint32": 4}
SPLITS = ("train", "val")

_SEAL = b',\n"xxh3": "'
_MANIFEST_LIMIT_BYTES = 1 << 28  # about 4 trillion uint16 tokens; a larger file is junk that would eat the memory
_FINGERPRINT = slice(32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One row of the manifest: a file and the hashes of what it must hold."""

    file: str  # name inside the folder
    split: str  # "train" | "val"
    tokens: int
    blocks: tuple[str, ...]  # xxh3_64 hex of every BLOCK_BYTES of token bytes (last one shorter); () when foreign
    header: str  # xxh3_64 hex of the 1,024 header bytes; "" when foreign


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a dataset is: tokenizer, token type, documents, shards in reading order and how they were made."""

    tokenizer: dict[str, Any]  # name, vocab_size, eot, fingerprint (sha256 hex; "" = unknown, foreign shards)
    dtype: str  # "uint16" | "uint32"
    documents: dict[str, int]  # per split
    shards: tuple[Shard, ...]  # in reading order
    source: dict[str, Any]  # policy and counts; equal for equal preparations, so no times, workers or paths

    def tokens(self, split: str) -> int:
        """Number of tokens in `split`."""
        return sum(shard.tokens for shard in self.shards if shard.split == split)

    @property
    def fingerprint(self) -> str:
        """xxh3_128 hex of the whole content, hence of every token: another dataset has another one."""
        return str(xxhash.xxh3_128_hexdigest(_encode_manifest(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the first 1,024 bytes of a shard say."""

    dtype: str
    tokens: int
    fingerprint: str  # sha256 hex of the tokenizer; "" = not recorded


def hash_block(data: Any) -> str:
    """xxh3_64 hex of bytes, a memoryview or a contiguous array (against accidents, not against attackers)."""
    return str(xxhash.xxh3_64_hexdigest(data))


def hash_blocks(data: Any) -> Iterator[str]:
    """Yields the hash of every BLOCK_BYTES of a buffer of token bytes, the last one maybe shorter."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), BLOCK_BYTES):
        yield hash_block(view[start : start + BLOCK_BYTES])


def make_header(tokens: int, dtype: str, fingerprint: str) -> bytes:
    """The 1,024 header bytes of a shard of `tokens` tokens; `fingerprint`: sha256 in hex, "" for unknown."""
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
    """Whether bytes begin like a shard with a header."""
    return any(raw.startswith(magic.to_bytes(4, "little")) for magic, _ in MAGICS.values())


def read_header(raw: bytes, where: str) -> Header:
    """Reads and checks 1,024 header bytes; `where` names the file in the Fault(Exit.DATA)."""
    if len(raw) < HEADER_BYTES:
        what = f"shard has {len(raw):,} bytes, less than its {HEADER_BYTES:,}-byte header"
        raise Fault(Exit.DATA, what, where, "copy or prepare the file again")
    magic, version, tokens = (int(value) for value in np.frombuffer(raw, dtype="<i4", count=3))
    dtypes = [dtype for dtype, (known, _) in MAGICS.items() if known == magic]
    if not dtypes:
        known = " or ".join(f"{magic} ({dtype})" for dtype, (magic, _) in MAGICS.items())
        what = f"not a token shard: its magic number is {magic}, not {known}"
        raise Fault(Exit.DATA, what, where, "remove it from the folder or prepare it again")
    if version != MAGICS[dtypes[0]][1]:
        what = f"shard version {version}; magic {magic} goes with version {MAGICS[dtypes[0]][1]}"
        raise Fault(Exit.DATA, what, where, "prepare the file again")
    if tokens < 0:
        raise Fault(Exit.DATA, f"shard header counts {tokens} tokens", where, "prepare the file again")
    digest = raw[_FINGERPRINT]
    return Header(dtype=dtypes[0], tokens=tokens, fingerprint=digest.hex() if any(digest) else "")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` whole or not at all: temporary file, fsync, rename, fsync of the folder.

    Its last key "xxh3" is the hash of everything before it, so a flipped bit anywhere in it is found.
    Fault(Exit.STORAGE) when the folder cannot be written.
    """
    path = folder / MANIFEST_NAME
    temporary = folder / f"{MANIFEST_NAME}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(_seal(_encode_manifest(manifest)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        fix = "free some space or choose a folder you can write to"
        raise Fault(Exit.STORAGE, f"cannot write the manifest: {error.strerror}", str(path), fix) from error


def read_manifest(folder: Path) -> Manifest:
    """Reads `manifest.json` and checks its own hash, version and every field's type.

    Fault(Exit.DATA) when it is missing, unreadable, damaged or of another version.
    """
    path = folder / MANIFEST_NAME
    try:
        size = path.stat().st_size
        if size > _MANIFEST_LIMIT_BYTES:
            raise Fault(Exit.DATA, f"manifest has {size:,} bytes, which no dataset needs", str(path), _PREPARE)
        data = path.read_bytes()
    except OSError as error:
        what = f"cannot read the manifest: {error.strerror}"
        raise Fault(Exit.DATA, what, str(path), "finish the preparation or correct the folder's name") from error
    body, seal, found = data.rpartition(_SEAL)
    if not seal:
        raise Fault(Exit.DATA, "manifest is truncated or not ours: it does not end in its hash", str(path), _PREPARE)
    if data != _seal(body):
        actual, expected = hash_block(body), found.partition(b'"')[0].decode("ascii", "backslashreplace")
        raise Fault(Exit.DATA, f"manifest is damaged: hash {actual}, expected {expected}", str(path), _PREPARE)
    return _decode_manifest(body, path)


_PREPARE = "restore it from a copy or prepare the dataset again"


def _seal(body: bytes) -> bytes:
    return body + _SEAL + hash_block(body).encode() + b'"\n}\n'


def _encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON without its end: one shard a line, keys sorted, so equal means equal bytes."""

    def dump(value: Any) -> str:
        return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False)

    shards = ",\n".join(
        dump(
            {
                "file": shard.file,
                "split": shard.split,
                "tokens": shard.tokens,
                "header": shard.header,
                # One string, 16 digits a block: a third of the size and parsed in one go.
                "blocks": "".join(shard.blocks),
            }
        )
        for shard in manifest.shards
    )
    counts = {split: manifest.tokens(split) for split in SPLITS}
    return (
        f'{{\n"format": "megatoken dataset",\n"version": {FORMAT_VERSION},\n'
        f'"dtype": {dump(manifest.dtype)},\n'
        f'"tokens": {dump(counts)},\n"documents": {dump(manifest.documents)},\n'
        f'"tokenizer": {dump(manifest.tokenizer)},\n"source": {dump(manifest.source)},\n'
        f'"shards": [\n{shards}\n]'
    ).encode("ascii")


def _decode_manifest(body: bytes, path: Path) -> Manifest:
    try:
        content = json.loads(body + b"}")
        version = content["version"]
        if content["format"] != "megatoken dataset" or version != FORMAT_VERSION:
            what = f"manifest of version {version!r}; this program reads version {FORMAT_VERSION}"
            raise Fault(Exit.DATA, what, str(path), "use the program that wrote it or prepare the dataset again")
        manifest = Manifest(
            tokenizer=_typed(content["tokenizer"], dict),
            dtype=_typed(content["dtype"], str),
            documents=_typed(content["documents"], dict),
            shards=tuple(_decode_shard(row) for row in _typed(content["shards"], list)),
            source=_typed(content["source"], dict),
        )
        for key, kind in {"name": str, "vocab_size": int, "eot": int, "fingerprint": str}.items():
            _typed(manifest.tokenizer[key], kind)
        if manifest.dtype not in MAGICS:
            raise ValueError(f"dtype {manifest.dtype!r}")
        names = [shard.file for shard in manifest.shards]
        if len(set(names)) != len(names):
            raise ValueError("a shard is listed twice")
        if content["tokens"] != {split: manifest.tokens(split) for split in SPLITS}:
            raise ValueError("token counts do not add up")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise Fault(Exit.DATA, f"manifest makes no sense: {reason}", str(path), _PREPARE) from error
    return manifest


def _decode_shard(row: dict[str, Any]) -> Shard:
    digits = _typed(row["blocks"], str)
    shard = Shard(
        file=_typed(row["file"], str),
        split=_typed(row["split"], str),
        tokens=_typed(row["tokens"], int),
        blocks=tuple(digits[start : start + 16] for start in range(0, len(digits), 16)),
        header=_typed(row["header"], str),
    )
    # A manifest from elsewhere must not make us read outside its folder.
    if shard.file in ("", ".", "..") or any(sign in shard.file for sign in "/\\\0"):
        raise ValueError(f"{shard.file!r} is not a file name")
    if shard.split not in SPLITS or shard.tokens < 0:
        raise ValueError(f"{shard.file}: split {shard.split!r}, {shard.tokens} tokens")
    return shard


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60} is not {kind.__name__}")
    return value
