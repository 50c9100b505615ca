"""Datasets at an address: fetched through the cache, uploaded with the manifest last; S3 by a local server."""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from megatoken.cli.main import main
from megatoken.cli.verify import verify_folder
from megatoken.console import format_quantity
from megatoken.data.dataset import load_dataset
from megatoken.data.remote import fetch_dataset, list_remote, verify_remote
from megatoken.errors import ConfigError, DataError, ExitCode, StorageError
from megatoken.system import object_store
from megatoken.system.object_store import ObjectStore, is_address
from tests.conftest import Ask
from tests.data.small_dataset import write_dataset, write_external

SIZES = {"train": [300_000, 150_001], "val": [5_000]}  # 3, 2 and 1 blocks


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    monkeypatch.setattr(object_store, "RETRY_SECONDS", (0.0, 0.0))


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
        yield f"local://{tmp_path}/store/data"  # as file://, which is read where it lies


def put(source: Path, address: str, *, without: str = "") -> ObjectStore:
    store = ObjectStore(address)
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.name != without:
            store.write(path.relative_to(source).as_posix(), path.read_bytes())
    return store


def flip(store: ObjectStore, name: str, at: int) -> None:
    content = bytearray(store.read(name))
    content[at] ^= 1
    store.write(name, bytes(content))


@pytest.mark.parametrize("address", ["file", "memory", "s3"], indirect=True)
def test_shards_are_fetched_once_and_read_as_local_ones(address: str, tmp_path: Path):
    ids = write_dataset(tmp_path / "made", SIZES)
    store, lines = put(tmp_path / "made", address), list[str]()
    dataset = load_dataset(address, report=lines.append)
    for split in SIZES:
        tokens = getattr(dataset, split)
        assert np.array_equal(tokens.read(0, len(tokens)), ids[split])
    assert dataset.fingerprint == load_dataset(tmp_path / "made").fingerprint
    assert len(lines) == 1
    assert dataset.path.is_relative_to(tmp_path / "cache" / "datasets")
    for name in store.list():
        if name.endswith(".bin"):
            store.remove(name)
    again: list[str] = []
    assert load_dataset(address, report=again.append).path == dataset.path
    assert again == []


def test_a_damaged_shard_is_named_and_what_was_fetched_is_kept(address: str, tmp_path: Path):
    write_dataset(tmp_path / "made", SIZES)
    store = put(tmp_path / "made", address)
    flip(store, "train_000001.bin", 1024 + 262_144 + 5)  # in its second block
    with pytest.raises(
        DataError, match=r"shard is damaged: block 1 has hash .*/data/train_000001\.bin"
    ):
        fetch_dataset(address)
    (cached,) = (tmp_path / "cache" / "datasets").iterdir()
    assert not (cached / "manifest.json").exists()
    assert not [*cached.glob("train_000001*")]
    errors = verify_remote(list_remote(address))
    assert len(errors) == 2  # the shard, and the tokenizer that this dataset never had
    assert "train_000001.bin" in str(errors[0])
    put(tmp_path / "made", address)
    lines: list[str] = []
    missing = {
        name: size
        for name, size in list_remote(address).files.items()
        if not (cached / name).exists()
    }
    assert (
        missing["train_000001.bin"] == 1024 + 2 * 150_001
    )  # and those whose transfer had not begun by then
    fetch_dataset(address, lines.append)
    assert lines[0].startswith(f"fetching {format_quantity(sum(missing.values()), 'B')} from ")


def test_without_a_manifest_there_is_no_dataset(address: str, tmp_path: Path):
    write_dataset(tmp_path / "made", SIZES)
    put(tmp_path / "made", address, without="manifest.json")
    with pytest.raises(DataError):
        load_dataset(address)
    with pytest.raises(DataError):
        load_dataset(address + "/other")
    put(tmp_path / "made", address)
    flip(ObjectStore(address), "manifest.json", 40)
    with pytest.raises(DataError):
        load_dataset(address)


def test_another_content_is_another_folder(address: str, tmp_path: Path):
    write_dataset(tmp_path / "first", SIZES)
    write_dataset(tmp_path / "second", SIZES, seed=1)
    put(tmp_path / "first", address)
    first = load_dataset(address)
    put(tmp_path / "second", address)
    second = load_dataset(address)
    assert first.path != second.path
    assert first.fingerprint != second.fingerprint == load_dataset(tmp_path / "second").fingerprint


@pytest.mark.parametrize("pattern", ["", "/*train*.bin", "/x_train_0.bin"])
def test_external_shards(address: str, pattern: str, tmp_path: Path):
    (tmp_path / "made").mkdir()
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
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_dataset(tmp_path / "made", SIZES)
    put(tmp_path / "made", address)
    fetched: list[str] = []
    download = ObjectStore.download

    def count(self: ObjectStore, name: str, path: Path) -> None:
        fetched.append(name)
        download(self, name, path)

    monkeypatch.setattr(ObjectStore, "download", count)
    threads = [threading.Thread(target=fetch_dataset, args=(address,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fetched) == ["train_000000.bin", "train_000001.bin", "val_000000.bin"]


def test_a_full_disk_is_noticed_before(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_dataset(tmp_path / "made", SIZES)
    put(tmp_path / "made", address)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 1000}))
    with pytest.raises(StorageError):
        fetch_dataset(address)


def test_prepare_verify_and_eval_at_an_address(
    s3: str,
    tmp_path: Path,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """`prepare` goes on after a store that failed in the middle; the manifest came last."""
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be.\n\n" * 2000)
    line = f"prepare {text} --tokenizer bytes --workers 1 --out"
    words = [*line.split(), f"{s3}/data"]
    upload = ObjectStore.upload

    def fail(self: ObjectStore, path: Path, name: str, xxh3_128: str) -> None:
        if name.startswith("val"):
            raise StorageError("cannot write: the store is gone", self.at(name))
        upload(self, path, name, xxh3_128)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload", fail)
        assert main(words) == ExitCode.STORAGE
    capsys.readouterr()
    store = ObjectStore(f"{s3}/data")
    names = store.list()
    assert "manifest.json" not in names
    assert "progress.json" in names
    with pytest.raises(DataError):
        load_dataset(f"{s3}/data")

    assert main(words) == 0
    assert {"manifest.json", "train_000000.bin"} <= store.list().keys()
    assert "progress.json" not in store.list()
    assert main(words) == 0  # unchanged
    answer = {"kind": "dataset", "checked": 2, "damaged": []}
    assert ask(f"verify {s3}/data") == answer
    assert load_dataset(f"{s3}/data").tokenizer.name == "bytes"

    flip(store, "val_000000.bin", 1030)
    assert main(["verify", f"{s3}/data"]) == ExitCode.DATA
    assert f"{s3}/data/val_000000.bin" in capsys.readouterr().out
    text.write_text("Other text.\n\n" * 2000)
    other = [*line.split(), f"{s3}/data/", "--val-fraction", "0"]
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/other-cache")
    assert main(other) == ExitCode.DATA


def test_errors_are_one_line(s3: str):
    with pytest.raises(ConfigError):
        load_dataset("nothing://bucket/data")
    with pytest.raises(DataError):
        load_dataset("s3://a-bucket-that-is-not-there/data")
    with pytest.raises(StorageError):
        ObjectStore("s3://a-bucket-that-is-not-there/data").write("x", b"")
    for address in ("s3:bucket/run", "s3:/bucket/run"):
        with pytest.raises(ConfigError):
            ObjectStore(address)
    with pytest.raises(ConfigError):
        load_dataset(Path("s3://bucket/data"))
    assert not is_address("C:/data")
    assert not is_address("runs/a://b")
