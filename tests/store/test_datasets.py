"""Datasets at an address are fetched through the cache, and uploaded with the manifest last."""

import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from megatoken.base.console import format_quantity
from megatoken.base.errors import ConfigError, DataError, ExitCode, StorageError
from megatoken.base.system.address import is_address
from megatoken.cli.verify import verify_folder
from megatoken.data.dataset import load_dataset
from megatoken.store.objects import ObjectStore
from tests.conftest import Ask, Call
from tests.data.small_dataset import write_dataset, write_external

SIZES = {"train": [300_000, 150_001], "val": [5_000]}  # 10, 5 and 1 blocks


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")


@pytest.fixture(params=["file", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty folder of a store; S3 where a test asks for it."""
    if request.param == "s3":
        yield request.getfixturevalue("s3") + "/data"
    elif request.param == "memory":
        name = uuid.uuid4().hex
        yield f"memory://{name}/data"
        fsspec.filesystem("memory").store.clear()
    else:
        yield f"local://{tmp_path}/store/data"  # as file://, which is not fetched


def put(source: Path, address: str) -> ObjectStore:
    store = ObjectStore(address)
    for path in source.rglob("*"):
        if path.is_file():
            store.write(path.relative_to(source).as_posix(), path.read_bytes())
    return store


@pytest.fixture
def store(address: str, tmp_path: Path) -> ObjectStore:
    """The store at an address, with the dataset of tmp_path / "made"."""
    write_dataset(tmp_path / "made", SIZES)
    return put(tmp_path / "made", address)


def flip(store: ObjectStore, name: str, at: int) -> None:
    content = bytearray(store.read(name))
    content[at] ^= 1
    store.write(name, bytes(content))


@pytest.mark.parametrize("address", ["file", "memory", "s3"], indirect=True)
def test_shards_are_fetched_once_and_read_as_local_ones(
    store: ObjectStore, address: str, tmp_path: Path
):
    made, lines = load_dataset(tmp_path / "made"), []
    dataset = load_dataset(address, report=lines.append)
    for found, expected in ((dataset.train, made.train), (dataset.val, made.val)):
        assert np.array_equal(found.read(0, len(found)), expected.read(0, len(expected)))
    assert dataset.fingerprint == made.fingerprint
    assert dataset.path.is_relative_to(tmp_path / "cache/datasets")
    for name in store.list():
        if name.endswith(".bin"):
            store.remove(name)
    assert load_dataset(address, report=lines.append).path == dataset.path
    assert len(lines) == 1


def test_a_damaged_shard_is_named_and_what_was_fetched_is_kept(
    store: ObjectStore, address: str, tmp_path: Path
):
    flip(store, "train_000001.bin", 1024 + 65_536 + 5)  # in its second block
    message = r"shard is damaged: block 1 has hash .*/data/train_000001\.bin"
    with pytest.raises(DataError, match=message):
        load_dataset(address)
    (damaged,) = verify_folder(address).errors
    assert re.search(message, str(damaged))
    put(tmp_path / "made", address)
    (cached,) = (tmp_path / "cache/datasets").iterdir()
    kept = sum(512 * path.stat().st_blocks for path in cached.glob("*.bin"))
    missing = sum(1024 + 2 * tokens for split in SIZES.values() for tokens in split) - kept
    assert 0 < missing < 900_000
    lines = []
    load_dataset(address, report=lines.append)
    assert lines[0].startswith(f"fetching {format_quantity(missing, 'B')} from ")


def test_without_a_manifest_there_is_no_dataset(store: ObjectStore, address: str):
    manifest = store.read("manifest.json")
    store.remove("manifest.json")
    for path in (address, f"{address}/other"):
        with pytest.raises(DataError):
            load_dataset(path)
    store.write("manifest.json", manifest)
    flip(store, "manifest.json", 40)
    with pytest.raises(DataError):
        load_dataset(address)


def test_another_content_is_another_folder(store: ObjectStore, address: str, tmp_path: Path):
    write_dataset(tmp_path / "second", SIZES, seed=1)
    first = load_dataset(address)
    put(tmp_path / "second", address)
    second = load_dataset(address)
    assert first.path != second.path
    assert first.fingerprint != second.fingerprint == load_dataset(tmp_path / "second").fingerprint


@pytest.mark.parametrize("pattern", ["", "/*train*.bin", "/x_train_0.bin"])
def test_external_shards(address: str, pattern: str, tmp_path: Path):
    ids = np.arange(3000, dtype="uint16")
    for name in ("x_train_0.bin", "x_val_0.bin"):
        write_external(tmp_path / "made" / name, ids)
    store = put(tmp_path / "made", address)
    dataset = load_dataset(address + pattern)
    assert np.array_equal(dataset.train.read(0, 3000), ids)
    assert len(dataset.val) == (0 if pattern else 3000)
    assert verify_folder(address + pattern).errors == []
    store.remove("x_train_0.bin")
    with pytest.raises(DataError):
        load_dataset(address + "/*train*.bin")


def test_one_process_fetches_and_others_wait(
    store: ObjectStore, address: str, monkeypatch: pytest.MonkeyPatch
):
    fetched, read = [], ObjectStore.read

    def count(self, name, *arguments):
        fetched.append(name)
        return read(self, name, *arguments)

    monkeypatch.setattr(ObjectStore, "read", count)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(load_dataset, [address] * 3))
    shards = ("train_000000", "train_000001", "val_000000")
    files = [f"{name}.{kind}" for name in shards for kind in ("bin", "xxh3")]
    assert sorted(fetched) == [*["manifest.json"] * 3, *files]


def test_a_full_disk_is_noticed_before(
    store: ObjectStore, address: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(StorageError, match="no room to fetch"):
        load_dataset(address)


def test_prepare_verify_and_eval_at_an_address(
    s3: str, tmp_path: Path, ask: Ask, call: Call, monkeypatch: pytest.MonkeyPatch
):
    """After a store has failed, `prepare` continues; the manifest is uploaded last."""
    text, address = tmp_path / "text.txt", f"{s3}/data"
    text.write_text("To be, or not to be.\n\n" * 2000)
    line = f"prepare {text} --tokenizer bytes --workers 1 --out {address}"
    upload = ObjectStore.upload

    def fail(self, path, name, xxh3_128):
        if name.startswith("val"):
            raise StorageError("cannot write: the store is gone", self.at(name))
        upload(self, path, name, xxh3_128)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload", fail)
        assert call(line)[0] == ExitCode.STORAGE
    store = ObjectStore(address)
    assert {"manifest.json", "progress.json"} & store.list().keys() == {"progress.json"}
    with pytest.raises(DataError):
        load_dataset(address)

    for _ in range(2):  # the second time unchanged
        assert call(line)[0] == 0
        names = {"manifest.json", "train_000000.bin"}
        assert {*names, "progress.json"} & store.list().keys() == names
    assert ask(f"verify {address}") == {"kind": "dataset", "checked": 2, "damaged": []}
    assert load_dataset(address).vocabulary.name == "bytes"

    flip(store, "val_000000.bin", 1030)
    code, printed, _ = call(f"verify {address}")
    assert (code, f"{address}/val_000000.bin" in printed) == (ExitCode.DATA, True)
    text.write_text("Other text.\n\n" * 2000)
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/other-cache")
    assert call(f"{line} --val-fraction 0")[0] == ExitCode.DATA


def test_errors_are_one_line(s3: str):
    missing = "s3://a-bucket-that-is-not-there/data"
    for error, path in (
        (ConfigError, "nothing://bucket/data"),
        (ConfigError, Path("s3://bucket/data")),
        (DataError, missing),
    ):
        with pytest.raises(error):
            load_dataset(path)
    with pytest.raises(StorageError):
        ObjectStore(missing).write("x", b"")
    with pytest.raises(StorageError, match="no such object or bucket"):
        ObjectStore(s3).read("x", 0, 1)
    for address in ("s3:bucket/run", "s3:/bucket/run"):
        with pytest.raises(ConfigError):
            ObjectStore(address)
    assert not is_address("C:/data")
    assert not is_address("runs/a://b")
