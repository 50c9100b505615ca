"""Each window occurs once per epoch, in an order that does not depend on ranks or other steps."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.base.errors import ConfigError, DataError, MegatokenError
from megatoken.data.dataloader import DataLoader, Prefetcher, evaluation_windows
from megatoken.data.dataset import Tokens, load_dataset
from tests.data.small_dataset import list_windows, write_dataset, write_external

SIZES = [997, 13, 2000, 1983]  # 78 windows of 64 tokens; one shard is shorter than a window
Corpus = tuple[Tokens, np.ndarray]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A training split in four shards, and its ids."""
    folder = tmp_path_factory.mktemp("corpus")
    ids = write_dataset(folder, {"train": SIZES})["train"]
    return load_dataset(folder).train, ids


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 400),
    st.integers(1, 30),
    st.integers(0, 2**63),
    st.integers(0, 3),
    st.sampled_from(["shuffled", "spans"]),
)
def test_ledger(corpus: Corpus, seq_len: int, batch: int, seed: int, epoch: int, order: Any):
    """In an epoch, each window occurs once, even if the epoch ends within a batch."""
    tokens, ids = corpus
    n_windows = (len(ids) - 1) // seq_len
    batch = min(batch, n_windows)
    loader = DataLoader(tokens, seq_len=seq_len, batch_size=batch, seed=seed, order=order)
    first = epoch * n_windows
    steps = range(first // batch, (first + n_windows - 1) // batch + 1)
    visited = np.concatenate([list_windows(loader, step) for step in steps])
    visited = visited[first % batch :][:n_windows]
    assert np.array_equal(np.sort(visited), np.arange(loader.n_windows))
    assert loader.n_windows == n_windows


def test_batch_holds_the_windows_it_names(corpus: Corpus):
    """Read more than two epochs, which include windows that cross shards."""
    tokens, ids = corpus
    loader = DataLoader(tokens, seq_len=64, batch_size=8, seed=3)
    for step in range(25):
        expected = [ids[at : at + 65] for at in 64 * list_windows(loader, step)]
        batch = loader.rows(step)
        assert batch.dtype == np.uint16
        assert np.array_equal(batch, expected)


def test_any_rank_and_step_in_any_order(corpus: Corpus):
    """1,000 random (rank, world size, step) triples give the rows that reading in order gives."""

    def load(rank=0, size=1):
        options = {"batch_size": 12, "seed": 11, "dp_rank": rank, "dp_size": size}
        return DataLoader(corpus[0], seq_len=32, **options)

    sequential = [load().rows(step) for step in range(60)]
    kept = {(rank, size): load(rank, size) for size in (1, 2, 3, 4, 6) for rank in range(size)}
    rng = np.random.default_rng(0)
    for rank, size in rng.choice([*kept], 1000).tolist():
        step, part = int(rng.integers(60)), 12 // size
        expected = sequential[step][rank * part : (rank + 1) * part]
        for loader in (load(rank, size), kept[rank, size]):
            assert np.array_equal(loader.rows(step), expected)


def test_golden_order(corpus: Corpus):
    """Pinned: a change here changes what every recipe trains on."""
    loader = DataLoader(corpus[0], seq_len=64, batch_size=8, seed=1337)
    assert list_windows(loader, 0).tolist() == [10, 26, 49, 6, 61, 44, 1, 77]
    assert list_windows(loader, 9).tolist() == [52, 41, 16, 58, 7, 23, 65, 30]


def test_order_far_away_and_over_chunks(tmp_path: Path):
    """Read more windows than a chunk of the order has; a late epoch takes no longer."""
    np.save(tmp_path / "train.npy", np.arange(30_001, dtype=np.uint16))
    tokens = load_dataset(tmp_path).train
    loader = DataLoader(tokens, seq_len=3, batch_size=7, seed=0)
    epoch = np.concatenate([list_windows(loader, step) for step in range(10_000 // 7 + 1)])[:10_000]
    assert np.array_equal(np.sort(epoch), np.arange(10_000))
    wide = DataLoader(tokens, seq_len=3, batch_size=9_999, seed=0)
    assert np.array_equal(list_windows(wide, 0), epoch[:9_999])
    assert loader.rows(10**15).shape == (7, 4)


# The limit of tokens, windows and their length.
LIMITS = "1000000000 78 64,4480 70 64,640 10 64,639 9 64,64 1 64,20 1 20"


@pytest.mark.parametrize("row", LIMITS.split(","))
def test_evaluation_windows(corpus: Corpus, row: str):
    limit, count, length = map(int, row.split())
    tokens, ids = corpus
    windows = evaluation_windows(tokens, seq_len=64, limit_tokens=limit)
    assert (len(windows), windows.seq_len, windows.n_targets) == (count, length, count * length)
    n_windows = (len(ids) - 1) // length
    middles = [int((i + 0.5) * n_windows / count) * length for i in range(count)]
    rows = windows.rows(0, count)
    assert np.array_equal(rows, [ids[start : start + length + 1] for start in middles])
    pieces = [windows.rows(first, 4) for first in range(0, count + 8, 4)]
    assert np.array_equal(np.concatenate(pieces), rows)


def test_evaluation_of_a_split_shorter_than_a_window(tmp_path: Path):
    for n_tokens, shape in ((40, (1, 40)), (2, (1, 2)), (1, (0, 2))):
        write_dataset(tmp_path, {"val": [n_tokens]})
        dataset = load_dataset(tmp_path)
        for tokens, expected in ((dataset.val, shape), (dataset.train, (0, 2))):
            windows = evaluation_windows(tokens, seq_len=64, limit_tokens=1000)
            assert windows.rows(0, 8).shape == expected


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_cuda)])
def test_prefetcher_gives_exactly_the_batch_of_any_step(tmp_path: Path, dtype: str, device: str):
    rng = np.random.default_rng(0)
    write_external(tmp_path / "train.bin", rng.integers(30_000, 50_257, 3000).astype(dtype))
    loader = DataLoader(load_dataset(tmp_path).train, seq_len=32, batch_size=4, seed=0)
    prefetcher = Prefetcher(loader, torch.device(device))
    for step in [0, 1, 2, 3, 10, 11, 11, 5, 6, 0, *rng.integers(0, 100, 100).tolist()]:
        batch, rows = prefetcher.get(step), torch.tensor(loader.rows(step).astype(int))
        for tensor, ids in ((batch.inputs_BT, rows[:, :-1]), (batch.targets_BT, rows[:, 1:])):
            assert (str(tensor.device), tensor.is_contiguous()) == (device, True)
            torch.testing.assert_close(tensor.cpu(), ids)
    prefetcher.close()
    prefetcher.close()
    assert not [
        each for each in threading.enumerate() if each.name.startswith("megatoken-prefetch")
    ]


@pytest.mark.fault(31, 34)
def test_prefetcher_raises_where_the_batch_is_asked_for(tmp_path: Path):
    """A bad block fails the step that needs it, each time, but not the step before."""
    ids = np.zeros(3 * (1 << 17) + 1, dtype=np.uint16)
    ids[-1] = 60_000
    write_external(tmp_path / "train.bin", ids)
    loader = DataLoader(load_dataset(tmp_path).train, seq_len=1 << 17, batch_size=1, seed=0)
    prefetcher = Prefetcher(loader, torch.device("cpu"))
    for step in [*range(6)] * 3:
        if list_windows(loader, step)[0] == 2:
            with pytest.raises(MegatokenError, match="token id 60000 is outside the vocabulary"):
                prefetcher.get(step)
        else:
            assert prefetcher.get(step).inputs_BT.shape == (1, 1 << 17)
    prefetcher.close()


@pytest.mark.fault(38)
def test_a_batch_that_cannot_be_made_is_refused(corpus: Corpus):
    for error, seq_len, batch_size, dp_size in (
        (ConfigError, 64, 12, 5),
        (ConfigError, 64, 0, 1),
        (DataError, 64, 80, 2),
        (DataError, 4993, 1, 1),
    ):
        with pytest.raises(error):
            DataLoader(corpus[0], seq_len=seq_len, batch_size=batch_size, seed=0, dp_size=dp_size)
