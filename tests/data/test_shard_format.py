"""The header equals llm.c's; the manifest survives a round trip, and any flipped bit is found."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from megatoken.base.errors import DataError
from megatoken.data.shard_format import (
    BLOCK_BYTES,
    Header,
    Manifest,
    Part,
    Shard,
    hash_blocks,
    hash_bytes,
    make_header,
    read_header,
    read_manifest,
    write_manifest,
)
from tests.data.small_dataset import TOKENIZER

SHARD = Shard(file="train_000000.bin", split="train", tokens=3, hash="0123456789abcdef" * 2)
PART = Part(name="part-00000", tokens={"train": 3, "val": 1}, hash="0123456789abcdef" * 2)
MANIFEST = Manifest(
    tokenizer=TOKENIZER,
    dtype="uint16",
    documents={"train": 1},
    shards=(SHARD,),
    source={"kind": "text", "é": 1},
)


@pytest.mark.parametrize(
    ("dtype", "magic", "version"), [("uint16", 20240520, 1), ("uint32", 20240801, 7)]
)
def test_header_is_llmc_layout(dtype: str, magic: int, version: int):
    raw = make_header(123_456, dtype, "5a" * 32)
    assert raw == struct.pack("<3i20x", magic, version, 123_456) + b"\x5a" * 32 + bytes(960)
    for tokens, fingerprint in ((123_456, "5a" * 32), (0, "")):
        header = Header(dtype=dtype, tokens=tokens, fingerprint=fingerprint)
        assert read_header(make_header(tokens, dtype, fingerprint), "x") == header


def test_wrong_header_is_refused():
    for fields in ((0, 1, 5), (20240520, 7, 5), (20240801, 1, 5), (20240520, 1, -5)):
        with pytest.raises(DataError, match=r"some/file\.bin"):
            read_header(struct.pack("<3i1012x", *fields), "some/file.bin")


def test_blocks_are_hashed_in_order():
    data = np.random.default_rng(0).bytes(2 * BLOCK_BYTES + 7)
    parts = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
    digests = b"".join(xxhash.xxh3_64_digest(part)[::-1] for part in parts)  # little-endian
    assert hash_blocks(data).tobytes() == digests
    assert hash_bytes(b"") == "99aa06d3014798d86001c324468d497f"  # XXH3_128bits of nothing


def test_manifest_round_trip(tmp_path: Path):
    path = tmp_path / "manifest.json"
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert [*tmp_path.iterdir()] == [path]
    before = path.read_bytes()
    content = json.loads(before)
    assert [*content][-1] == "xxh3"
    counts = {split: MANIFEST.tokens(split) for split in ("train", "val")}
    assert content["tokens"] == counts == {"train": 3, "val": 0}
    assert "bytes" not in content
    write_manifest(tmp_path, MANIFEST)
    assert path.read_bytes() == before
    measured = replace(MANIFEST, bytes={"train": {"text": 3, "decoded": 2, "lost": 1}})
    write_manifest(tmp_path, measured)
    assert read_manifest(tmp_path) == measured
    in_parts = replace(MANIFEST, shards=(), parts=(PART, replace(PART, name="part-00001")))
    write_manifest(tmp_path, in_parts)
    assert read_manifest(tmp_path) == in_parts
    assert (in_parts.tokens("train"), in_parts.tokens("val")) == (6, 2)


CHANGES = """\
"version": 2 -> "version": 1
"format": "megatoken dataset" -> "format": "another"
"train_000000.bin" -> "../train.bin"
"train_000000.bin" -> "/etc/passwd"
"train_000000.bin" -> 7
"shards": [ -> "shards": [3,
"dtype": "uint16" -> "dtype": ["uint16"]
"split": "train" -> "split": "test"
"tokens": 3} -> "tokens": -1}
"tokens": 3} -> "tokens": 3.0}
"source": { -> "source": [], "x": {
"documents": { -> "documents": [], "x": {
"""


def test_fingerprint_follows_the_content():
    same = replace(MANIFEST, source=dict(reversed(MANIFEST.source.items())))
    assert same.fingerprint == MANIFEST.fingerprint == "f94ab207875decf72d9b8804a97b1783"
    others = [
        replace(MANIFEST, shards=(replace(SHARD, hash="0123456789abcdee" * 2),)),
        replace(MANIFEST, tokenizer={**TOKENIZER, "fingerprint": "5b" * 32}),
        replace(MANIFEST, documents={"train": 2}),
    ]
    assert len({MANIFEST.fingerprint, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize("change", CHANGES.splitlines())
def test_manifest_with_a_right_hash_and_wrong_content_is_refused(tmp_path: Path, change: str):
    old, new = change.split(" -> ")
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    body = path.read_text().rpartition(',\n"xxh3"')[0]
    assert old in body
    body = body.replace(old, new)
    path.write_text(f'{body},\n"xxh3": "{xxhash.xxh3_64_hexdigest(body.encode())}"\n}}\n')
    with pytest.raises(DataError, match=r"manifest\.json"):
        read_manifest(tmp_path)
