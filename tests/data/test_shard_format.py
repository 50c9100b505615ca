"""The header is llm.c's byte for byte; the manifest survives a round trip and no flipped bit."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from megatoken.data.shard_format import (
    BLOCK_BYTES,
    Header,
    Manifest,
    Shard,
    hash_block,
    hash_blocks,
    make_header,
    read_header,
    read_manifest,
    write_manifest,
)
from megatoken.errors import DataError
from tests.data.small_dataset import TOKENIZER

SHARD = Shard(
    file="train_000000.bin", split="train", tokens=3, blocks="0123456789abcdef", header="f" * 16
)
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
    assert len(raw) == 1024
    assert struct.unpack("<3i", raw[:12]) == (magic, version, 123_456)
    assert raw[12:32] == bytes(20)
    assert raw[32:64] == b"\x5a" * 32
    assert raw[64:] == bytes(960)
    assert read_header(raw, "x") == Header(dtype=dtype, tokens=123_456, fingerprint="5a" * 32)
    assert read_header(make_header(0, dtype, ""), "x") == Header(
        dtype=dtype, tokens=0, fingerprint=""
    )


@pytest.mark.parametrize(
    "fields", [(0, 1, 5), (20240520, 7, 5), (20240801, 1, 5), (20240520, 1, -5)]
)
def test_wrong_header_is_refused(fields: tuple[int, int, int]):
    with pytest.raises(DataError, match=r"some/file\.bin"):
        read_header(struct.pack("<3i", *fields) + bytes(1012), "some/file.bin")


def test_blocks_are_hashed_in_order():
    data = np.random.default_rng(0).integers(0, 255, 2 * BLOCK_BYTES + 7, dtype=np.uint8).tobytes()
    parts = [data[:BLOCK_BYTES], data[BLOCK_BYTES : 2 * BLOCK_BYTES], data[2 * BLOCK_BYTES :]]
    assert list(hash_blocks(data)) == [xxhash.xxh3_64_hexdigest(part) for part in parts]
    assert hash_block(b"") == "2d06800538d394c2"  # XXH3_64bits of nothing, as published


def test_manifest_round_trip(tmp_path: Path):
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert MANIFEST.tokens("train") == 3
    assert MANIFEST.tokens("val") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    content = json.loads((tmp_path / "manifest.json").read_bytes())
    assert list(content)[-1] == "xxh3"
    assert content["tokens"] == {"train": 3, "val": 0}
    before = (tmp_path / "manifest.json").read_bytes()
    write_manifest(tmp_path, MANIFEST)
    assert (tmp_path / "manifest.json").read_bytes() == before
    assert "bytes" not in content
    measured = replace(MANIFEST, bytes={"train": {"text": 3, "decoded": 2, "lost": 1}})
    write_manifest(tmp_path, measured)
    assert read_manifest(tmp_path) == measured
    assert measured.fingerprint == MANIFEST.fingerprint  # so that measuring changes no dataset


def test_fingerprint_follows_the_content():
    same = replace(MANIFEST, source=dict(reversed(MANIFEST.source.items())))
    assert same.fingerprint == MANIFEST.fingerprint == "f63c827d7686a7d2456eb60c58a3ba24"
    others = [
        replace(MANIFEST, shards=(replace(SHARD, blocks="0123456789abcdee"),)),
        replace(MANIFEST, tokenizer={**TOKENIZER, "fingerprint": "5b" * 32}),
        replace(MANIFEST, documents={"train": 2}),
    ]
    assert len({MANIFEST.fingerprint, *(other.fingerprint for other in others)}) == 4


def seal(body: str) -> bytes:
    """A manifest with a right hash whatever it says."""
    return f'{body},\n"xxh3": "{xxhash.xxh3_64_hexdigest(body.encode())}"\n}}\n'.encode()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 1', '"version": 2'),
        ('"format": "megatoken dataset"', '"format": "another"'),
        ('"train_000000.bin"', '"../train.bin"'),
        ('"train_000000.bin"', '"/etc/passwd"'),
        ('"train_000000.bin"', "7"),
        ('"shards": [', '"shards": [3, '),
        ('"dtype": "uint16"', '"dtype": ["uint16"]'),
        ('"split": "train"', '"split": "test"'),
        ('"tokens": 3}', '"tokens": -1}'),
        ('"tokens": 3}', '"tokens": 3.0}'),
        ('"source": {', '"source": [], "x": {'),
        ('"documents": {', '"documents": [], "x": {'),
    ],
)
def test_manifest_with_a_right_hash_and_wrong_content_is_refused(
    tmp_path: Path, old: str, new: str
):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    body = path.read_text().rpartition(',\n"xxh3"')[0]
    assert old in body
    path.write_bytes(seal(body.replace(old, new)))
    with pytest.raises(DataError, match=r"manifest\.json"):
        read_manifest(tmp_path)
