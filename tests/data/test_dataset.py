"""A damaged dataset is not opened, or the damage is found when the block is first read."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.base.errors import DataError, MegatokenError
from megatoken.data.dataset import Dataset, Folder, load_dataset
from megatoken.data.shard_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    make_header,
    read_manifest,
    write_manifest,
)
from megatoken.data.verify import verify_dataset
from tests.data.small_dataset import TOKENIZER, join_parts, write_dataset, write_external
from tests.flip import flip_bit

BLOCK = BLOCK_BYTES // 2  # uint16 tokens
IDS = np.arange(1000, dtype=np.uint16)
SHARD = "train_000001.bin"


def read_all(dataset: Dataset) -> list[np.ndarray]:
    return [tokens.read(0, len(tokens)) for tokens in (dataset.train, dataset.val)]


def refuse(path: Path, text: str = "") -> None:
    """Assert that reading and verifying raise one-line DataErrors that contain `text`."""
    with pytest.raises(DataError) as caught:
        read_all(load_dataset(path))
    for error in (caught.value, next(verify_dataset(Folder(path)))):
        assert isinstance(error, DataError)
        assert (text in str(error), "\n" in str(error)) == (True, False)


def test_every_flipped_bit_is_found(tmp_path: Path):
    """Reading and verifying find 210 random flips of headers, tokens, hashes and manifest."""
    write_dataset(tmp_path, {"train": [BLOCK + 100, 500], "val": [64]})
    rng = np.random.default_rng(1)
    files = sorted(tmp_path.iterdir())
    for turn in range(210):
        path = files[turn % 7]
        in_header = turn % 8 >= 4 and path.suffix == ".bin"
        bit = int(rng.integers(8 * (HEADER_BYTES if in_header else path.stat().st_size)))
        flip_bit(path, bit)
        refuse(tmp_path, path.name)
        assert len([*verify_dataset(Folder(tmp_path))]) == 1
        flip_bit(path, bit)
    read_all(load_dataset(tmp_path))
    assert not [*verify_dataset(Folder(tmp_path))]


@pytest.mark.fault(33)
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_shard_written_to_in_use_gives_right_ids_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
):
    """A block is verified in the memory from which its ids are taken."""
    monkeypatch.setattr(
        "megatoken.data.dataset.CACHE_TOKENS", BLOCK_BYTES // np.dtype(dtype).itemsize
    )
    block = BLOCK_BYTES // np.dtype(dtype).itemsize
    ids = write_dataset(tmp_path, {"train": [2 * block, 10]}, dtype)["train"]
    tokens, shard = load_dataset(tmp_path).train, tmp_path / "train_000000.bin"
    everything = tokens.read(0, len(ids))
    assert everything.dtype == dtype
    assert np.array_equal(everything, ids)
    assert tokens.read(block, 1) == ids[block]
    flip_bit(shard, 8 * (HEADER_BYTES + BLOCK_BYTES))
    assert np.array_equal(tokens.read(block, block), ids[block : 2 * block])  # still in memory
    assert np.array_equal(tokens.read(0, block), ids[:block])
    for start, count in ((block, 1), (0, len(ids))):
        with pytest.raises(MegatokenError, match="block 1 has hash"):
            tokens.read(start, count)


@pytest.mark.fault(30)
@pytest.mark.parametrize(("name", "offset"), [("a.bin", HEADER_BYTES), ("a.npy", 128)])
def test_a_disk_that_fails_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, offset: int
):
    path = tmp_path / name
    write_external(path, IDS)
    tokens = load_dataset(path).train

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    message = f"cannot read: Input/output error — {path}, byte offset {offset:,}"
    with pytest.raises(MegatokenError, match=message):
        tokens.read(10, 5)


def test_more_shards_than_files_may_be_open(tmp_path: Path):
    """llm.c's FineWeb has 1,030 shards; many systems let a process open 1,024 files."""
    for name in "ab":
        write_dataset(tmp_path / name, {"train": [3] * 700})
    program = (
        "import resource, sys; from megatoken.data.mixture import load_mixture\n"
        "for limit in (1024, 256):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "    data = load_mixture('{0}/a:0.5,{0}/b:0.5'.format(sys.argv[1]))\n"
        "    print([len(data.train.read(start, 2100)) for start in (0, 2100, 1050)])"
    )
    command = [sys.executable, "-W", "error", "-c", program, tmp_path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == 2 * "[2100, 2100, 2100]\n"


def test_only_shards_in_use_are_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ids = write_dataset(tmp_path, {"train": [50] * 300})["train"]
    tokens, open_file, opened = load_dataset(tmp_path).train, os.open, []

    def record(path, flags):
        opened.append(path)
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", record)
    for _ in range(2):
        assert np.array_equal(tokens.gather(np.array([10, 7_000]), 60)[1], ids[7_000:7_060])
    assert opened == [tmp_path / f"train_{number:06d}.bin" for number in (0, 1, 140, 141)]


@pytest.mark.fault(30)
@pytest.mark.parametrize("sizes", [[3 * BLOCK], [BLOCK, BLOCK, BLOCK]])
@pytest.mark.parametrize("touched", [False, True])
def test_a_shard_truncated_in_use_is_an_error(tmp_path: Path, sizes: list[int], touched: bool):
    """With a mapped file, reading beyond its end would kill the process."""
    ids = write_dataset(tmp_path, {"train": sizes})["train"]
    tokens, shard = load_dataset(tmp_path).train, tmp_path / f"train_{len(sizes) // 2:06d}.bin"
    if touched:  # so that it is open
        tokens.read(0, len(ids))
        tokens.set_vocab_size(tokens.vocab_size)  # forget the blocks
    data = shard.read_bytes()
    os.truncate(shard, 2000)
    for start, length in ((BLOCK, 10), (0, len(ids)), (BLOCK - 5, 10)):
        with pytest.raises(DataError, match=str(shard)):
            tokens.read(start, length)
    assert str(shard) in str(next(verify_dataset(Folder(tmp_path))))
    shard.write_bytes(data)
    if touched:
        shard.unlink()  # an open file stays readable
        assert np.array_equal(tokens.read(0, len(ids)), ids)


def test_verify_finds_all_that_is_wrong(tmp_path: Path):
    write_dataset(tmp_path, {"train": [2 * BLOCK, 500, 500], "val": [64]})
    for number in range(2):
        flip_bit(tmp_path / "train_000000.bin", 8 * (HEADER_BYTES + number * BLOCK_BYTES))
    (tmp_path / SHARD).unlink()
    flip_bit(tmp_path / "val_000000.bin", 8 * 1000)
    words = ["block 0", "block 1", SHARD, "val_000000.bin"]
    for word, error in zip(words, verify_dataset(Folder(tmp_path)), strict=True):
        assert word in str(error)


@pytest.mark.fault(31)
def test_id_outside_the_vocabulary_with_right_hashes(tmp_path: Path):
    largest = int(write_dataset(tmp_path, {"train": [BLOCK + 500]})["train"].max())
    tokenizer = {**TOKENIZER, "vocab_size": largest}
    write_manifest(tmp_path, replace(read_manifest(tmp_path), tokenizer=tokenizer))
    refuse(tmp_path, "train_000000.bin, byte offset")


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_external_shards_are_used_as_they_are(tmp_path: Path, suffix: str, dtype: str):
    names = ["fineweb_train_000001", "fineweb_train_000002", "fineweb_val_000000"]
    parts = np.random.default_rng(0).integers(0, 50257, (3, 1000)).astype(dtype)
    for name, part in zip(names, parts, strict=True):
        write_external(tmp_path / f"{name}{suffix}", part)
    (tmp_path / "README.txt").write_text("not a shard")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    is_llama = (suffix, dtype) == (".bin", "uint32")
    tokenizer = {"name": "llama-3", "vocab_size": 128256, "eot": 128000, "fingerprint": ""}
    tokenizer |= {} if is_llama else {"name": "gpt2", "vocab_size": 50257, "eot": 50256}
    for place in (tmp_path, tmp_path / f"fine*{suffix}"):
        dataset = load_dataset(place)
        train, val = read_all(dataset)
        assert train.dtype == dtype
        assert np.array_equal([*train, *val], parts.ravel())
        assert dataset.manifest.tokenizer == tokenizer
    assert not [*verify_dataset(Folder(tmp_path))]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    single = load_dataset(tmp_path / f"{names[0]}{suffix}")
    assert [*map(len, read_all(single))] == [1000, 0]


def test_nanogpts_files_are_ids_and_nothing_else(tmp_path: Path):
    train, val = tmp_path / "train.bin", tmp_path / "val.bin"
    train.write_bytes(IDS[:900].tobytes())
    val.write_bytes(IDS[900:].tobytes())
    found = read_all(load_dataset(tmp_path))
    assert [*map(len, found)] == [900, 100]
    assert np.array_equal(np.concatenate(found), IDS)
    assert not [*verify_dataset(Folder(tmp_path))]
    val.write_bytes(b"odd")
    refuse(tmp_path, "val.bin")
    val.unlink()
    (tmp_path / "meta.pkl").touch()
    refuse(tmp_path)
    train.rename(tmp_path / "other.bin")
    refuse(tmp_path)


def test_external_int32_and_other_tokenizers(tmp_path: Path):
    def load(*ids):
        np.save(tmp_path / "train.npy", np.array(ids, dtype=np.int32))
        return load_dataset(tmp_path, external_tokenizer="bytes")

    dataset = load(1, 2, 70_000)
    assert dataset.vocabulary.name == dataset.manifest.tokenizer["name"] == "bytes"
    for _ in range(2):
        assert read_all(dataset)[0].tolist() == [1, 2, 70_000]
        dataset.set_vocab_size(70_001)
    dataset.set_vocab_size(70_000)
    with pytest.raises(DataError, match="70000"):
        read_all(dataset)
    with pytest.raises(DataError, match=r"4294967295.*train\.npy"):
        read_all(load(1, -1, 2))


@pytest.mark.fault(31)
@pytest.mark.parametrize(("suffix", "start"), [(".bin", HEADER_BYTES), (".npy", 128)])
def test_external_id_outside_the_vocabulary_is_located(tmp_path: Path, suffix: str, start: int):
    ids = np.zeros(BLOCK + 500, dtype=np.uint16)
    ids[BLOCK + 7] = 50257
    write_external(tmp_path / f"train{suffix}", ids)
    tokens = load_dataset(tmp_path).train
    assert not tokens.read(0, BLOCK).any()
    with pytest.raises(MegatokenError) as caught:
        tokens.gather(np.array([3, BLOCK]), 5)  # the bad id is in their block
    assert "token id 50257 is outside the vocabulary of 50,257" in str(caught.value)
    where = f"byte offset {start + 2 * (BLOCK + 7):,} (token {BLOCK + 7:,})"
    assert f"train{suffix}, {where}" in str(caught.value)


def test_external_fingerprint_follows_names_sizes_and_content(tmp_path: Path):
    ids = np.arange(20_000, dtype=np.uint16)
    parts = {"0/train_a": ids, "1/train_b": ids, "2/train_a": ids[:-1], "3/train_a": ids[::-1]}
    seen = []
    for name, part in parts.items():
        path = tmp_path / f"{name}.bin"
        write_external(path, part)
        copy = shutil.copytree(path.parent, f"{path.parent}.copy")
        seen.append(load_dataset(copy).fingerprint)
        assert load_dataset(path.parent).fingerprint == seen[-1]
    assert len(set(seen)) == 4
    assert seen[0] == "348cf82e90c76c4e918eb62473785e34"  # checkpoints record it


@pytest.mark.fault(30, 33)
def test_a_damaged_shard_is_refused(tmp_path: Path):
    write_dataset(tmp_path, {"train": [700, 500, 500], "val": [64]})
    shard = tmp_path / SHARD
    data = shard.read_bytes()
    contents = [(data + bytes(2))[:size] for size in (0, 1024, 1501, 2025, 2026)]
    contents += [bytes(2024), shard.with_name("train_000002.bin").read_bytes()]
    for tokens, digits in ((400, "5a"), (500, "5b"), (500, "")):
        contents.append(make_header(tokens, "uint16", digits * 32) + bytes(2 * tokens))
    contents.append(make_header(500, "uint32", "5a" * 32) + bytes(2000))
    for content in contents:
        shard.write_bytes(content)
        refuse(tmp_path, SHARD)
    shard.unlink()
    refuse(tmp_path, SHARD)


def test_shards_without_their_manifest_are_refused(tmp_path: Path):
    write_dataset(tmp_path, {"train": [500]})
    manifest = read_manifest(tmp_path)
    write_manifest(tmp_path, replace(manifest, shards=(replace(manifest.shards[0], hash=""),)))
    refuse(tmp_path, "train_000000.xxh3")
    (tmp_path / "manifest.json").unlink()
    refuse(tmp_path, "train_000000.bin")
    (tmp_path / "progress.json").touch()
    refuse(tmp_path)


def test_reads_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ids = write_dataset(tmp_path, {"train": [300, 40, 5]})["train"]
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:7]], at))
    assert np.array_equal(load_dataset(tmp_path).train.read(0, 345), ids)


def test_external_shards_of_two_formats_are_refused(tmp_path: Path):
    write_external(tmp_path / "train_1.bin", IDS)
    other, path = tmp_path / "train_2.npy", tmp_path / "train_2.bin"
    write_external(other, IDS)
    refuse(tmp_path)
    other.unlink()
    for content in (
        make_header(100, "uint32", "") + bytes(400),
        make_header(1, "uint16", "5a" * 32) + bytes(2),
        make_header(0, "uint16", ""),
        pickle.dumps(IDS) + bytes(2000),
    ):
        path.write_bytes(content)
        refuse(tmp_path, path.name)


def test_nothing_to_open(tmp_path: Path):
    (tmp_path / "text.txt").write_text("no shard")
    for name in ("nowhere", "*.bin", ".", "text.txt", "long" * 100, "x/**foo*.bin"):
        with pytest.raises(DataError):
            load_dataset(tmp_path / name)
    for address in ("nothing://bucket/data", "s3:/x", ""):
        with pytest.raises(MegatokenError):
            load_dataset(address)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=4), st.data())
def test_any_windows(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[int]], data: st.DataObject
):
    """Of a dataset in one folder, or in parts."""
    folder = tmp_path_factory.mktemp("any")
    if len(parts) == 1:
        ids = write_dataset(folder, {"train": parts[0], "val": [3]})["train"]
    else:
        names = [f"part-{number:05d}" for number in range(len(parts))]
        each = [
            write_dataset(folder / name, {"train": sizes, "val": [3]}, seed=number)["train"]
            for number, (name, sizes) in enumerate(zip(names, parts, strict=True))
        ]
        join_parts(folder, names)
        ids = np.concatenate(each)
    dataset = load_dataset(folder)
    assert (len(dataset.train), len(dataset.val)) == (len(ids), 3 * len(parts))
    assert dataset.train.shard_tokens == [size for sizes in parts for size in sizes]
    assert not [*verify_dataset(Folder(folder))]
    length = data.draw(st.integers(0, len(ids)))
    starts = data.draw(st.lists(st.integers(0, len(ids) - length), max_size=60))
    windows = np.reshape([ids[start : start + length] for start in starts], (len(starts), length))
    assert np.array_equal(dataset.train.gather(np.array(starts, int), length), windows)


def test_a_damaged_part_is_refused(tmp_path: Path):
    names = ["part-00000", "part-00001"]
    for name in names:
        write_dataset(tmp_path / name, {"train": [500], "val": [64]})
    join_parts(tmp_path, names)
    path = tmp_path / names[1] / "manifest.json"
    write_manifest(path.parent, replace(read_manifest(path.parent), source={"files": 2}))
    refuse(tmp_path, str(path))
    path.unlink()
    refuse(tmp_path, str(path))
