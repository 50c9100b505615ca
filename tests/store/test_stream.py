"""Streamed batches are the local ones, whatever the cache holds and the store does."""

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megatoken.base.errors import DataError, StorageError
from megatoken.data.dataloader import DataLoader, evaluation_windows
from megatoken.data.dataset import load_dataset
from megatoken.data.mixture import load_mixture
from megatoken.store.objects import ObjectStore
from tests.data.small_dataset import join_parts, write_dataset
from tests.flip import flip_bit
from tests.s3_server import serve

SIZES = {"train": [300_000, 150_001, 7], "val": [5_000]}
NAMES = ["part-00000", "part-00001"]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    monkeypatch.setattr("megatoken.store.objects.RETRY_SECONDS", (0.0, 0.0, 0.0, 0.0, 0.0))
    # Blocks leave the memory at once.
    monkeypatch.setattr("megatoken.data.dataset.CACHE_TOKENS", 1 << 15)
    return tmp_path / "cache/datasets"


@pytest.fixture(scope="module")
def faulty_server() -> Iterator[dict[str, str]]:
    with serve(faults=0.1) as variables:
        yield variables


@pytest.fixture(params=["memory", "s3"])
def address(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The address of a dataset in parts, of which a copy is in tmp_path / "made"."""
    made = tmp_path / "made"
    for number, name in enumerate(NAMES):
        write_dataset(made / name, SIZES, seed=number)
    join_parts(made, NAMES)
    address = "memory://stream"
    if request.param == "s3":
        for name, value in request.getfixturevalue("faulty_server").items():
            monkeypatch.setenv(name, value)
        address = f"s3://tests{tmp_path}"
    store = ObjectStore(address)
    for path in made.rglob("*"):
        if path.is_file():
            store.write(path.relative_to(made).as_posix(), path.read_bytes())
    yield address
    fsspec.filesystem("memory").store.clear()


def be_faulty(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let a tenth of reads fail, and change a bit in some of the others."""
    draw, read = random.Random(seed), ObjectStore.read

    def unreliable(self, name, *arguments):
        content = self._call("read", name, lambda: fail() or read(self, name, *arguments))
        if name.endswith(".bin") and draw.random() < 0.02:
            changed = bytearray(content)
            changed[draw.randrange(len(changed))] ^= 1
            return bytes(changed)
        return content

    def fail():
        if draw.random() < 0.1:
            raise OSError("the store is busy")

    monkeypatch.setattr(ObjectStore, "read", unreliable)


Load = Callable[[str], list[np.ndarray]]


@pytest.mark.parametrize("order", ["spans", "shuffled"])
def test_streamed_batches_are_the_local_ones(
    address: str, order: Any, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """From a cold, a tiny, a warm and a damaged cache, on 1, 2 and 4 ranks, from a faulty store."""
    steps, made = [0, 1, 2, 40, 3], load_mixture(f"{tmp_path}/made")

    def read(data, n_ranks):
        data.set_vocab_size(500)
        loaders = [
            DataLoader(data.train, 60, 16, 5, rank, n_ranks, order=order) for rank in range(n_ranks)
        ]
        rows = [np.concatenate([loader.rows(step) for loader in loaders]) for step in steps]
        windows = evaluation_windows(data.components[0].dataset.val, seq_len=60, limit_tokens=900)
        return np.concatenate([*rows, windows.rows(0, 15)])

    expected = read(made, 1)
    whole = load_mixture(address)  # whose blocks the runs below remove
    with monkeypatch.context() as patch:
        # A file is closed when nothing refers to it.
        patch.setattr("megatoken.data.dataset._open_shard", lambda file: file.open())
        if address.startswith("memory"):
            be_faulty(patch, 3)
        for n_ranks, limit in ((1, "0.00001GB"), (2, "0.0003GB"), (4, "1TB"), (1, "1TB")):
            for path in cache.rglob("*.bin"):
                if (size := path.stat().st_size) > 1024:  # with blocks
                    flip_bit(path, 8 * size - 9)
            data = load_mixture(address, cache=limit)
            assert data.fingerprint == made.fingerprint
            assert np.array_equal(read(data, n_ranks), expected)
            data.train.loads.cancel()  # they could empty the cache of the next ones
        assert np.array_equal(read(whole, 1), expected)
    for name in NAMES:  # all that is used is in the cache
        ObjectStore(address).remove(name)
    assert np.array_equal(read(load_mixture(address, cache="1TB"), 1), expected)


@pytest.mark.parametrize("address", ["memory"], indirect=True)
def test_without_a_cache_or_a_store(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk does not matter; what is missing or damaged at the address is named."""
    monkeypatch.chdir(tmp_path)
    Path("memory").mkdir()  # named like the protocol
    tokens, store = load_mixture(address, cache="1GB").train, ObjectStore(address)
    expected = load_dataset(tmp_path / "made").train

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for name in ("pwrite", "truncate", "replace"):
            patch.setattr(os, name, fail)
        assert np.array_equal(tokens.read(0, 400_000), expected.read(0, 400_000))
    content = bytearray(store.read(f"{NAMES[1]}/train_000000.bin"))
    content[1024 + 65_536 + 5] ^= 1  # in its second block
    store.write(f"{NAMES[1]}/train_000000.bin", bytes(content))
    with pytest.raises(
        DataError, match=rf"block 1 has hash .*{address}/part-00001/train_000000\.bin"
    ):
        tokens.read(450_008, 100_000)
    store.remove(NAMES[0])
    with pytest.raises(
        StorageError, match=rf"cannot fetch block 0: .*{address}/part-00000/train_000000\.bin"
    ):
        tokens.read(0, 10)


@pytest.mark.parametrize("address", ["memory"], indirect=True)
def test_batches_and_validation_at_the_same_time(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read = ObjectStore.read

    def be_slow(*arguments):
        time.sleep(0.01)
        return read(*arguments)

    monkeypatch.setattr(ObjectStore, "read", be_slow)
    data = load_mixture(address, cache="1GB")
    loader = DataLoader(data.train, 60, 16, 5, order="spans")
    windows = evaluation_windows(data.components[0].dataset.val, seq_len=60, limit_tokens=9000)
    with ThreadPoolExecutor(2) as threads:
        batches = [threads.submit(loader.rows, step) for step in range(20)]
        held_out = [windows.rows(first, 5) for first in range(0, 150, 5)]
    made = load_mixture(f"{tmp_path}/made")
    expected = DataLoader(made.train, 60, 16, 5, order="spans")
    assert all(np.array_equal(b.result(), expected.rows(step)) for step, b in enumerate(batches))
    val = evaluation_windows(made.components[0].dataset.val, seq_len=60, limit_tokens=9000)
    assert np.array_equal(np.concatenate(held_out), val.rows(0, 150))


@pytest.mark.parametrize("address", ["memory"], indirect=True)
def test_killed_at_every_write(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The next process reads the same ids, whatever a killed one left in the cache."""
    starts = np.array([0, 140_000, 299_990, 449_990, 800_000])
    expected = load_dataset(tmp_path / "made").train.gather(starts, 90_000)
    n_written = deaths = 0

    def die(descriptor, data, position):
        nonlocal n_written, deaths
        n_written += 1
        if n_written % 7 or deaths == 10:
            return write(descriptor, data, position)
        deaths += 1
        write(descriptor, data[: len(data) // 2], position)
        raise KeyboardInterrupt

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", die)
    found = None
    while found is None:
        with suppress(KeyboardInterrupt):
            found = load_dataset(address, cache="0.0004GB").train.gather(starts, 90_000)
    assert np.array_equal(found, expected)
    assert deaths == 10
