"""A dataset opens whole or not at all; damage is found at the latest when it is first touched."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.cli.verify import verify_folder
from megatoken.data.dataset import Dataset, Tokens, load_dataset, verify_dataset
from megatoken.data.prepare import prepare
from megatoken.data.shard_format import (
    BLOCK_BYTES,
    HEADER_BYTES,
    make_header,
    read_manifest,
    write_manifest,
)
from megatoken.errors import DataError, ExitCode, MegatokenError
from tests.data.small_dataset import TOKENIZER, write_dataset, write_external

BLOCK = BLOCK_BYTES // 2  # uint16 tokens


def read_all(dataset: Dataset) -> None:
    for tokens in (dataset.train, dataset.val):
        tokens.read(0, len(tokens))


def refuse(path: Path, text: str = "") -> None:
    """Assert that reading and verifying raise one-line DataErrors that contain `text`."""
    with pytest.raises(DataError) as caught:
        read_all(load_dataset(path))
    for error in (caught.value, next(iter(verify_dataset(path)))):
        assert isinstance(error, DataError)
        assert text in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_prepared_folder_reads_back(tmp_path: Path, dtype: str):
    ids = write_dataset(tmp_path, {"train": [BLOCK + 17, 1, 2 * BLOCK], "val": [300]}, dtype)
    dataset = load_dataset(str(tmp_path))
    assert len(dataset.train) == 3 * BLOCK + 18
    for split, tokens in (("train", dataset.train), ("val", dataset.val)):
        everything = tokens.read(0, len(tokens))
        assert everything.dtype == np.dtype(dtype)
        assert np.array_equal(everything, ids[split])
    assert (
        dataset.fingerprint == read_manifest(tmp_path).fingerprint == dataset.manifest.fingerprint
    )
    assert list(verify_dataset(tmp_path)) == []


def test_a_dataset_knows_its_tokenizer(tmp_path: Path):
    (tmp_path / "text.txt").write_text("some text")
    prepare(f"{tmp_path}/text.txt", tmp_path / "out", tokenizer="bytes", val_fraction=0)
    dataset = load_dataset(tmp_path / "out")
    assert dataset.vocab_size == 257
    assert dataset.tokenizer.decode(dataset.train.read(0, 9)) == "some text"
    write_external(tmp_path / "train.bin", np.arange(100, dtype=np.uint16))
    external = load_dataset(tmp_path / "train.bin", external_tokenizer="bytes")
    assert (external.vocab_size, external.tokenizer.name) == (65536, "bytes")


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_stretch_and_any_windows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    folder = tmp_path_factory.mktemp("any")
    ids = write_dataset(folder, {"train": sizes})["train"]
    tokens = load_dataset(folder).train
    start = data.draw(st.integers(0, len(ids)))
    count = data.draw(st.integers(0, len(ids) - start))
    assert np.array_equal(tokens.read(start, count), ids[start : start + count])
    length = data.draw(st.integers(1, len(ids)))
    starts = np.array(
        data.draw(st.lists(st.integers(0, len(ids) - length), max_size=60)), dtype=np.int64
    )
    expected = np.array([ids[start : start + length] for start in starts]).reshape(
        len(starts), length
    )
    assert np.array_equal(tokens.gather(starts, length), expected)


def test_windows_longer_than_a_block_are_checked_in_the_middle(tmp_path: Path):
    write_dataset(tmp_path, {"train": [4 * BLOCK]})
    flip(tmp_path / "train_000000.bin", 8 * (HEADER_BYTES + 2 * BLOCK_BYTES + 5))
    tokens = load_dataset(tmp_path).train
    assert tokens.gather(np.array([0, BLOCK - 5]), BLOCK).shape == (2, BLOCK)
    with pytest.raises(MegatokenError, match="block 2 has hash"):
        tokens.gather(np.array([0]), 4 * BLOCK)


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << (bit % 8)]))


def test_every_flipped_bit_is_found(tmp_path: Path):
    """200 random flips over headers, tokens and manifest: each found, its file named, by both ways of looking."""
    write_dataset(tmp_path, {"train": [BLOCK + 100, 500], "val": [64]})
    rng = np.random.default_rng(1)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    for turn in range(200):
        path = files[turn % 4]
        size = path.stat().st_size
        limit = (
            size if turn % 8 < 4 or path.suffix == ".json" else HEADER_BYTES
        )  # half of them in headers
        bit = int(rng.integers(8 * limit))
        flip(path, bit)
        with pytest.raises(MegatokenError) as caught:
            read_all(load_dataset(tmp_path))
        assert caught.value.code == ExitCode.DATA
        assert path.name in str(caught.value)
        findings = list(verify_dataset(tmp_path))
        assert len(findings) == 1
        assert path.name in str(findings[0])
        flip(path, bit)
    read_all(load_dataset(tmp_path))
    assert list(verify_dataset(tmp_path)) == []


def rewrite(path: Path, bits: list[int]) -> None:
    """Flip bits in place, as some time after the file was opened."""
    for bit in bits:
        flip(path, bit)
    later = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))


@pytest.mark.fault(33)
def test_a_shard_written_to_in_use_is_verified_again(tmp_path: Path):
    ids = write_dataset(tmp_path, {"train": [2 * BLOCK, 10]})["train"]
    tokens, shard = load_dataset(tmp_path).train, tmp_path / "train_000000.bin"
    assert np.array_equal(
        tokens.gather(np.array([5, 2 * BLOCK - 1]), 4)[1], ids[2 * BLOCK - 1 : 2 * BLOCK + 3]
    )
    rewrite(shard, [])  # touched, but the same
    assert np.array_equal(tokens.read(0, len(ids)), ids)
    rewrite(shard, [8 * (HEADER_BYTES + BLOCK_BYTES)])
    assert np.array_equal(tokens.read(0, BLOCK), ids[:BLOCK])
    for _ in range(2):
        with pytest.raises(MegatokenError, match="block 1 has hash"):
            tokens.read(BLOCK, 1)


def test_a_shard_written_to_between_check_and_copy_is_verified_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_dataset(tmp_path, {"train": [BLOCK, 10]})
    tokens, copy = load_dataset(tmp_path).train, Tokens._copy

    def damage_first(self: Tokens, *arguments: Any) -> None:
        monkeypatch.undo()
        rewrite(tmp_path / "train_000000.bin", [8 * HEADER_BYTES])
        copy(self, *arguments)

    monkeypatch.setattr(Tokens, "_copy", damage_first)
    with pytest.raises(MegatokenError, match="block 0 has hash"):
        tokens.read(0, BLOCK + 1)


@pytest.mark.fault(30)
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_disk_that_fails_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
):
    path = tmp_path / f"train{suffix}"
    write_external(path, np.arange(1000, dtype=np.uint16))
    tokens = load_dataset(path).train
    tokens.read(0, 1000)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    where = f"{path}, byte offset {HEADER_BYTES + 20 if suffix == '.bin' else 148:,}"
    with pytest.raises(MegatokenError, match=f"cannot read: Input/output error — {where}"):
        tokens.read(10, 5)


@pytest.mark.parametrize("limit", [256, 1024])
def test_more_shards_than_files_may_be_open(tmp_path: Path, limit: int):
    """llm.c's FineWeb has 1,030 shards; many systems let a process open 1,024 files."""
    for name in "ab":
        write_dataset(tmp_path / name, {"train": [3] * 700})
    program = (
        "import resource, sys; from megatoken.data.mixture import load_mixture\n"
        "limit, path = int(sys.argv[1]), sys.argv[2]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "data = load_mixture(f'{path}/a:0.5,{path}/b:0.5')\n"
        "print([len(data.train.read(start, 2100)) for start in (0, 2100, 1050)])"
    )
    command = [sys.executable, "-W", "error", "-c", program, str(limit), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "[2100, 2100, 2100]\n"


def test_only_shards_in_use_are_opened_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ids = write_dataset(tmp_path, {"train": [50] * 300})["train"]
    tokens = load_dataset(tmp_path).train
    checked: set[int] = set()
    fstat = os.fstat

    def record(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        checked.add(status.st_ino)
        return status

    monkeypatch.setattr(os, "fstat", record)
    for starts in ([10, 7_000], [10, 7_000]):
        assert np.array_equal(tokens.gather(np.array(starts), 60)[1], ids[7_000:7_060])
    used = [tmp_path / f"train_{number:06d}.bin" for number in (0, 1, 140, 141)]
    assert checked == {path.stat().st_ino for path in used}


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


@pytest.mark.fault(30)
@pytest.mark.parametrize("sizes", [[3 * BLOCK], [BLOCK, BLOCK, BLOCK]])
@pytest.mark.parametrize("touched", [False, True])
def test_a_shard_truncated_in_use_is_an_error(tmp_path: Path, sizes: list[int], touched: bool):
    """A mapped file would end the process: pages beyond the end of a file cannot be read."""
    write_dataset(tmp_path, {"train": sizes})
    tokens = load_dataset(tmp_path).train
    if touched:
        read = tokens.read(0, len(tokens))
    shard = tmp_path / f"train_{len(sizes) // 2:06d}.bin"
    whole = shard.read_bytes()
    os.truncate(shard, 2000)
    for start, length in ((BLOCK, 10), (0, len(tokens)), (BLOCK - 5, 10)):
        with pytest.raises(DataError, match=str(shard)):
            tokens.gather(np.array([start]), length)
    assert str(shard) in str(next(tokens.verify()))
    shard.write_bytes(whole)
    if touched:
        shard.unlink()  # what is open stays
        assert np.array_equal(tokens.read(0, len(tokens)), read)


@pytest.mark.parametrize("name", ["fineweb_val_000000", "val", "validation_1", "books-valid"])
def test_val_is_a_word_of_the_name(tmp_path: Path, name: str):
    write_external(tmp_path / f"{name}.bin", np.arange(100, dtype=np.uint16))
    assert len(load_dataset(tmp_path).val) == 100


@pytest.mark.parametrize("name", ["interval_train_01", "evaluated", "valued", "retrieval_1"])
def test_other_names_are_training_data(tmp_path: Path, name: str):
    write_external(tmp_path / f"{name}.bin", np.arange(100, dtype=np.uint16))
    assert len(load_dataset(tmp_path).train) == 100


def swap(first: Path, second: Path) -> None:
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


SHARD = "train_000001.bin"


def test_verify_finds_all_that_is_wrong(tmp_path: Path):
    write_dataset(tmp_path, {"train": [2 * BLOCK, 500, 500], "val": [64]})
    flip(tmp_path / "train_000000.bin", 8 * HEADER_BYTES)
    flip(tmp_path / "train_000000.bin", 8 * (HEADER_BYTES + BLOCK_BYTES))
    (tmp_path / SHARD).unlink()
    flip(tmp_path / "val_000000.bin", 8 * 1000)
    words = ["block 0", "block 1", SHARD, "val_000000.bin"]
    findings = [str(error) for error in verify_dataset(tmp_path)]
    assert len(findings) == len(words)
    assert all(word in finding for word, finding in zip(words, findings, strict=True))


@pytest.mark.fault(31)
def test_id_outside_the_vocabulary_with_right_hashes(tmp_path: Path):
    write_dataset(tmp_path, {"train": [BLOCK + 500]})
    manifest = read_manifest(tmp_path)
    largest = int(load_dataset(tmp_path).train.read(0, BLOCK + 500).max())
    write_manifest(tmp_path, replace(manifest, tokenizer={**TOKENIZER, "vocab_size": largest}))
    refuse(tmp_path, "train_000000.bin, byte offset")


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_external_shards_are_used_as_they_are(tmp_path: Path, suffix: str, dtype: str):
    rng = np.random.default_rng(0)
    names = ["fineweb_train_000002", "fineweb_val_000000", "fineweb_train_000001"]
    parts = {name: rng.integers(0, 50257, 1000).astype(dtype) for name in names}
    for name, part in parts.items():
        write_external(tmp_path / f"{name}{suffix}", part)
    (tmp_path / "README.txt").write_text("not a shard")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    expected = np.concatenate([parts["fineweb_train_000001"], parts["fineweb_train_000002"]])
    for place in (tmp_path, tmp_path / f"fine*{suffix}"):
        dataset = load_dataset(place)
        assert np.array_equal(dataset.train.read(0, 2000), expected)
        assert dataset.train.dtype == np.dtype(dtype)
        assert np.array_equal(dataset.val.read(0, 1000), parts["fineweb_val_000000"])
        assert dataset.manifest.tokenizer["fingerprint"] == ""
    name = "llama-3" if (suffix, dtype) == (".bin", "uint32") else "gpt2"
    assert dataset.manifest.tokenizer["name"] == name
    assert dataset.manifest.tokenizer["vocab_size"] == {"gpt2": 50257, "llama-3": 128256}[name]
    assert list(verify_dataset(tmp_path)) == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    single = load_dataset(tmp_path / f"fineweb_train_000001{suffix}")
    assert (len(single.train), len(single.val)) == (1000, 0)


def test_nanogpts_files_are_ids_and_nothing_else(tmp_path: Path):
    ids = np.random.default_rng(4).integers(0, 50257, 999).astype("<u2")
    (tmp_path / "train.bin").write_bytes(ids[:900].tobytes())
    (tmp_path / "val.bin").write_bytes(ids[900:].tobytes())
    dataset = load_dataset(tmp_path)
    assert (len(dataset.train), len(dataset.val)) == (900, 99)
    np.testing.assert_array_equal(dataset.train.read(0, 900), ids[:900])
    assert list(verify_dataset(tmp_path)) == []
    (tmp_path / "val.bin").write_bytes(ids[900:].tobytes() + b"x")
    with pytest.raises(DataError, match=r"val\.bin"):
        load_dataset(tmp_path)
    (tmp_path / "val.bin").unlink()
    (tmp_path / "meta.pkl").touch()
    with pytest.raises(DataError):
        load_dataset(tmp_path)
    (tmp_path / "train.bin").rename(tmp_path / "other.bin")
    with pytest.raises(DataError):
        load_dataset(tmp_path)


def test_external_int32_and_other_tokenizers(tmp_path: Path):
    np.save(tmp_path / "train.npy", np.array([1, 2, 70_000], dtype=np.int32))
    dataset = load_dataset(tmp_path, external_tokenizer="my.json")
    assert dataset.train.read(0, 3).tolist() == [1, 2, 70_000]
    assert dataset.manifest.tokenizer["name"] == "my.json"
    dataset.set_vocab_size(70_001)
    assert dataset.train.read(0, 3).tolist() == [1, 2, 70_000]
    dataset.set_vocab_size(70_000)
    with pytest.raises(DataError, match="70000"):
        dataset.train.read(0, 3)
    np.save(tmp_path / "train.npy", np.array([1, -1, 2], dtype=np.int32))
    with pytest.raises(DataError, match=r"4294967295.*train\.npy"):
        read_all(load_dataset(tmp_path, external_tokenizer="my.json"))


@pytest.mark.fault(31)
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_external_id_outside_the_vocabulary_is_located(tmp_path: Path, suffix: str):
    ids = np.zeros(BLOCK + 500, dtype=np.uint16)
    ids[BLOCK + 7] = 50257
    write_external(tmp_path / f"train{suffix}", ids)
    tokens = load_dataset(tmp_path).train
    assert not tokens.read(0, BLOCK).any()
    with pytest.raises(MegatokenError) as caught:
        tokens.gather(
            np.array([3, BLOCK]), 5
        )  # the bad id is not even in the window, but in its block
    offset = (HEADER_BYTES if suffix == ".bin" else 128) + 2 * (BLOCK + 7)
    assert "token id 50257 is outside the vocabulary of 50,257" in str(caught.value)
    assert f"train{suffix}, byte offset {offset:,} (token {BLOCK + 7:,})" in str(caught.value)


def test_external_fingerprint_follows_names_sizes_and_content(tmp_path: Path):
    ids = np.arange(20_000, dtype=np.uint16)
    seen: list[str] = []
    for number, (name, part) in enumerate(
        [("train_a", ids), ("train_b", ids), ("train_a", ids[:-1]), ("train_a", ids[::-1].copy())]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_external(folder / f"{name}.bin", part)
        seen.append(load_dataset(folder).fingerprint)
        shutil.copytree(folder, folder.with_suffix(".copy"))
        assert load_dataset(folder.with_suffix(".copy")).fingerprint == seen[-1]
    assert len(set(seen)) == 4
    assert seen[0] == "348cf82e90c76c4e918eb62473785e34"  # checkpoints record it


def write_header(tokens: int, dtype: str, fingerprint: str) -> bytes:
    """Return a shard of 500 uint16 tokens, except as its header says."""
    return make_header(tokens, dtype, fingerprint) + bytes(tokens * np.dtype(dtype).itemsize)


DAMAGES: list[Callable[[Path], object]] = [
    lambda shard: shard.unlink(),
    *(lambda shard, size=size: os.truncate(shard, size) for size in (0, 1024, 1501, 2025, 2026)),
    lambda shard: shard.write_bytes(bytes(2024)),
    lambda shard: swap(shard, shard.with_name("train_000002.bin")),
    lambda shard: shard.write_bytes(write_header(500, "uint32", "5a" * 32)),
    lambda shard: shard.write_bytes(write_header(400, "uint16", "5a" * 32)),
    lambda shard: shard.write_bytes(write_header(500, "uint16", "5b" * 32)),
    lambda shard: shard.write_bytes(write_header(500, "uint16", "")),
]


@pytest.mark.fault(30, 33)
@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_a_damaged_shard_is_refused(tmp_path: Path, number: int):
    write_dataset(tmp_path, {"train": [700, 500, 500], "val": [64]})
    DAMAGES[number](tmp_path / SHARD)
    refuse(tmp_path, SHARD)


def test_shards_without_their_manifest_are_refused(tmp_path: Path):
    write_dataset(tmp_path, {"train": [500]})
    manifest = read_manifest(tmp_path)
    write_manifest(tmp_path, replace(manifest, shards=(replace(manifest.shards[0], blocks=""),)))
    refuse(tmp_path, "train_000000.bin")
    (tmp_path / "manifest.json").unlink()
    refuse(tmp_path, "train_000000.bin")
    (tmp_path / "progress.json").write_text("{}")
    refuse(tmp_path)


def test_another_tokenizer_is_noticed(tmp_path: Path):
    (tmp_path / "text.txt").write_text("some text")
    prepare(tmp_path / "text.txt", tmp_path / "out", tokenizer="bytes")
    assert verify_folder(tmp_path / "out").errors == []
    description = tmp_path / "out" / "tokenizer" / "megatoken_tokenizer.json"
    description.write_text(description.read_text().replace('"eot": 256', '"eot": 255'))
    (error,) = verify_folder(tmp_path / "out").errors
    assert isinstance(error, DataError)
    with pytest.raises(DataError):
        _ = load_dataset(tmp_path / "out").tokenizer


def test_reads_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ids = write_dataset(tmp_path, {"train": [300, 40, 5]})["train"]
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:7]], at))
    assert np.array_equal(load_dataset(tmp_path).train.read(0, 345), ids)


def test_external_shards_of_two_formats_are_refused(tmp_path: Path):
    ids = np.arange(100, dtype=np.uint16)
    write_external(tmp_path / "train_1.bin", ids)
    write_external(tmp_path / "train_2.npy", ids)
    refuse(tmp_path)
    (tmp_path / "train_2.npy").unlink()
    path = tmp_path / "train_2.bin"
    for content in (
        make_header(100, "uint32", "") + bytes(400),
        make_header(1, "uint16", "5a" * 32) + bytes(2),
        make_header(0, "uint16", ""),
        pickle.dumps(ids) + bytes(2000),
    ):
        path.write_bytes(content)
        refuse(tmp_path, path.name)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3), np.uint16),
        np.zeros(3, np.int64),
        np.zeros(3, ">u2"),
        np.zeros(3, np.float32),
        np.zeros((), np.uint16),
        np.array([Path()], dtype=object),
    ],
)
def test_npy_that_is_not_a_row_of_ids_is_refused(tmp_path: Path, array: np.ndarray):
    np.save(tmp_path / "train.npy", array, allow_pickle=True)
    refuse(tmp_path, "train.npy")


def test_damaged_npy_headers_are_refused(tmp_path: Path):
    path = tmp_path / "train.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    data = path.read_bytes()
    contents = [data[:size] for size in (0, 5, 9, 100, 127, -1)]
    contents += [data[:8] + b"\xff\xff" + data[10:], data.replace(b"(100,)", b"(9**9,)")]
    for content in contents:
        path.write_bytes(content)
        refuse(tmp_path, "train.npy")


@pytest.mark.parametrize(
    "name", ["nowhere", "*.bin", ".", "text.txt", "long" * 100, "x/**foo*.bin"]
)
def test_nothing_to_open(tmp_path: Path, name: str):
    (tmp_path / "text.txt").write_text("no shard")
    with pytest.raises(DataError):
        load_dataset(tmp_path / name)
    for path in ("nothing://bucket/data", "s3:/x", ""):
        with pytest.raises(MegatokenError):
            load_dataset(path)
