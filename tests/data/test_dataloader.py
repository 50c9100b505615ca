"""Every window once an epoch, the same global order however it is divided, any step at any time."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.data.dataloader import DataLoader, Prefetcher, evaluation_windows
from megatoken.data.dataset import Tokens, load_dataset
from megatoken.errors import ConfigError, DataError, MegatokenError
from tests.data.small_dataset import list_windows, write_dataset, write_external

SIZES = [997, 13, 2000, 1990]  # 5,000 tokens; one shard is shorter than a window


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokens, np.ndarray]:
    """A training split in four shards, and its ids."""
    folder = tmp_path_factory.mktemp("corpus")
    ids = write_dataset(folder, {"train": SIZES})["train"]
    return load_dataset(folder).train, ids


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 400), st.integers(1, 30), st.integers(0, 2**63), st.integers(0, 3))
def test_ledger(corpus: tuple[Tokens, np.ndarray], seq_len: int, batch: int, seed: int, epoch: int):
    """Over an epoch each window is visited exactly once, wherever its edges fall in a batch."""
    tokens, ids = corpus
    n_windows = (len(ids) - 1) // seq_len
    batch = min(batch, n_windows)
    loader = DataLoader(tokens, seq_len=seq_len, batch_size=batch, seed=seed)
    assert loader.n_windows == n_windows
    first, last = epoch * n_windows, (epoch + 1) * n_windows
    steps = range(first // batch, (last - 1) // batch + 1)
    visited = np.concatenate([list_windows(loader, step) for step in steps])[
        first - steps[0] * batch :
    ][:n_windows]
    assert np.array_equal(np.sort(visited), np.arange(n_windows))


def test_batch_holds_the_windows_it_names(corpus: tuple[Tokens, np.ndarray]):
    tokens, ids = corpus
    loader = DataLoader(tokens, seq_len=64, batch_size=8, seed=3)
    edges = np.cumsum(SIZES)[:-1]
    crossing = 0
    for step in range(25):
        batch = loader.rows(step)
        assert batch.dtype == np.uint16
        assert batch.shape == (8, 65)
        for row, window in zip(batch, list_windows(loader, step), strict=True):
            assert np.array_equal(row, ids[window * 64 : window * 64 + 65])
            crossing += int(((edges > window * 64) & (edges < window * 64 + 65)).sum())
    assert crossing >= 2 * len(
        edges
    )  # two epochs and more: windows over shard edges were among them


def test_golden_order(corpus: tuple[Tokens, np.ndarray]):
    """Pinned: a change here changes what every recipe trains on."""
    loader = DataLoader(corpus[0], seq_len=64, batch_size=8, seed=1337)
    assert list_windows(loader, 0).tolist() == [10, 26, 49, 6, 61, 44, 1, 77]
    assert list_windows(loader, 9).tolist() == [52, 41, 16, 58, 7, 23, 65, 30]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_ranks_are_disjoint_and_together_the_batch(
    corpus: tuple[Tokens, np.ndarray], world_size: int
):
    whole = DataLoader(corpus[0], seq_len=16, batch_size=12, seed=5)
    comm = [
        DataLoader(corpus[0], seq_len=16, batch_size=12, seed=5, dp_rank=rank, dp_size=world_size)
        for rank in range(world_size)
    ]
    for step in [0, 1, 25, 26, 1000]:
        parts = [loader.rows(step) for loader in comm]
        assert {len(part) for part in parts} == {12 // world_size}
        assert np.array_equal(np.concatenate(parts), whole.rows(step))
        assert all(
            np.array_equal(list_windows(loader, step), list_windows(whole, step)) for loader in comm
        )


def test_resume_chains(corpus: tuple[Tokens, np.ndarray]):
    """1,000 random (world size, step) jumps give the rows of one uninterrupted reading."""
    options = {"seq_len": 32, "batch_size": 12, "seed": 11}
    sequential = [DataLoader(corpus[0], **options).rows(step) for step in range(60)]
    kept = {
        (world_size, rank): DataLoader(corpus[0], **options, dp_rank=rank, dp_size=world_size)
        for world_size in (1, 2, 3, 4)
        for rank in range(world_size)
    }
    rng = np.random.default_rng(0)
    for _ in range(1000):
        world_size, step = int(rng.integers(1, 5)), int(rng.integers(60))
        rank = int(rng.integers(world_size))
        fresh = DataLoader(corpus[0], **options, dp_rank=rank, dp_size=world_size)
        expected = sequential[step][rank * 12 // world_size : (rank + 1) * 12 // world_size]
        assert np.array_equal(fresh.rows(step), expected)
        assert np.array_equal(kept[world_size, rank].rows(step), expected)


def test_order_far_away_and_over_chunks(tmp_path: Path):
    """More windows than one chunk of the order: pieces fit together; a far epoch costs nothing."""
    ids = (np.arange(30_001) % 50_000).astype(np.uint16)
    write_external(tmp_path / "train.bin", ids)
    tokens = load_dataset(tmp_path).train
    loader = DataLoader(tokens, seq_len=3, batch_size=7, seed=0)
    epoch = np.concatenate([list_windows(loader, step) for step in range(10_000 // 7 + 1)])[:10_000]
    assert np.array_equal(np.sort(epoch), np.arange(10_000))
    wide = DataLoader(tokens, seq_len=3, batch_size=9_999, seed=0)
    assert np.array_equal(list_windows(wide, 0), epoch[:9_999])
    assert loader.rows(10**15).shape == (7, 4)


def test_corpus_of_exactly_one_batch(tmp_path: Path):
    ids = write_dataset(tmp_path, {"train": [129]})["train"]
    loader = DataLoader(load_dataset(tmp_path).train, seq_len=64, batch_size=2, seed=0)
    assert loader.n_windows == 2
    rows = loader.rows(5)[np.argsort(list_windows(loader, 5))]
    assert np.array_equal(rows, [ids[:65], ids[64:]])


@pytest.mark.parametrize(
    ("limit", "count", "length"),
    [(10**9, 78, 64), (640, 10, 64), (639, 9, 64), (64, 1, 64), (20, 1, 20)],
)
def test_evaluation_windows(corpus: tuple[Tokens, np.ndarray], limit: int, count: int, length: int):
    windows = evaluation_windows(corpus[0], seq_len=64, limit_tokens=limit)
    assert (len(windows), windows.seq_len, windows.n_targets) == (count, length, count * length)
    rows = windows.rows(0, count)
    assert rows.shape == (count, length + 1)
    n_windows = (len(corpus[1]) - 1) // length
    middles = [int((i + 0.5) * n_windows / count) * length for i in range(count)]
    assert np.array_equal(rows, [corpus[1][start : start + length + 1] for start in middles])
    pieces = [windows.rows(first, 4) for first in range(0, count + 8, 4)]
    assert np.array_equal(np.concatenate(pieces), rows)


def test_some_evaluation_windows_are_spread_evenly_over_the_split(tmp_path: Path):
    ids = np.arange(64 * 1000 + 1) // 64  # a token is its window's number
    np.save(tmp_path / "val.npy", ids.astype(np.uint16))
    tokens = load_dataset(tmp_path).val
    few = evaluation_windows(tokens, seq_len=64, limit_tokens=64 * 10).rows(0, 10)
    assert few[:, 0].tolist() == [50, 150, 250, 350, 450, 550, 650, 750, 850, 950]
    most = evaluation_windows(tokens, seq_len=64, limit_tokens=64 * 900).rows(0, 900)[:, 0]
    assert sorted({*np.diff(most.astype(int)).tolist()}) == [1, 2]


@pytest.mark.parametrize(("n_tokens", "count", "length"), [(40, 1, 39), (2, 1, 1), (1, 0, 1)])
def test_evaluation_of_a_split_shorter_than_a_window(
    tmp_path: Path, n_tokens: int, count: int, length: int
):
    write_dataset(tmp_path, {"val": [n_tokens]})
    dataset = load_dataset(tmp_path)
    windows = evaluation_windows(dataset.val, seq_len=64, limit_tokens=1000)
    assert windows.rows(0, 8).shape == (count, length + 1)
    assert len(evaluation_windows(dataset.train, seq_len=64, limit_tokens=1000)) == 0


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_prefetcher_gives_exactly_the_batch_of_any_step(tmp_path: Path, dtype: str):
    rng = np.random.default_rng(0)
    write_external(tmp_path / "train.bin", rng.integers(30_000, 50_257, 3000).astype(dtype))
    loader = DataLoader(load_dataset(tmp_path).train, seq_len=32, batch_size=4, seed=0)
    prefetcher = Prefetcher(loader, torch.device("cpu"))
    for step in [0, 1, 2, 3, 10, 11, 11, 5, 6, 0, *rng.integers(0, 100, 100).tolist()]:
        batch = prefetcher.get(step)
        inputs, targets = batch.inputs_BT, batch.targets_BT
        expected = loader.rows(step).astype(np.int64)
        assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert np.array_equal(inputs.numpy(), expected[:, :-1])
        assert np.array_equal(targets.numpy(), expected[:, 1:])
    prefetcher.close()
    prefetcher.close()
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("megatoken-prefetch")
    ]


def test_a_batch_is_the_rows_of_its_step(corpus: tuple[Tokens, np.ndarray]):
    loader = DataLoader(corpus[0], seq_len=32, batch_size=4, seed=0)
    inputs, targets = loader.batch(7)
    rows = torch.from_numpy(loader.rows(7).astype(np.int64))
    assert torch.equal(torch.cat([inputs, targets[:, -1:]], dim=1), rows)
    assert torch.equal(targets, rows[:, 1:])


@pytest.mark.fault(31, 34)
def test_prefetcher_raises_where_the_batch_is_asked_for(tmp_path: Path):
    """A bad block stops the step that needs it, not the one before, and again when asked again."""
    ids = np.zeros(3 * (1 << 17) + 1, dtype=np.uint16)
    ids[-1] = 60_000
    write_external(tmp_path / "train.bin", ids)
    tokens = load_dataset(tmp_path).train
    loader = DataLoader(tokens, seq_len=1 << 17, batch_size=1, seed=0)
    bad = next(step for step in range(3) if list_windows(loader, step)[0] == 2)
    prefetcher = Prefetcher(loader, torch.device("cpu"))
    for _ in range(3):
        for step in range(6):
            if step % 3 == bad or list_windows(loader, step)[0] == 2:
                with pytest.raises(
                    MegatokenError, match="token id 60000 is outside the vocabulary"
                ):
                    prefetcher.get(step)
            else:
                assert prefetcher.get(step).inputs_BT.shape == (1, 1 << 17)
    prefetcher.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prefetcher_on_cuda(corpus: tuple[Tokens, np.ndarray]):
    loader = DataLoader(corpus[0], seq_len=32, batch_size=4, seed=0)
    prefetcher = Prefetcher(loader, torch.device("cuda", 0))
    for step in [0, 1, 2, 50, 3]:
        batch = prefetcher.get(step)
        inputs, targets = batch.inputs_BT, batch.targets_BT
        expected = loader.rows(step).astype(np.int64)
        assert inputs.device.type == "cuda"
        assert np.array_equal(inputs.cpu().numpy(), expected[:, :-1])
        assert np.array_equal(targets.cpu().numpy(), expected[:, 1:])
    prefetcher.close()


@pytest.mark.fault(38)
def test_a_batch_that_cannot_be_made_is_refused(tmp_path: Path):
    write_dataset(tmp_path, {"train": [1000]})
    tokens = load_dataset(tmp_path).train
    for seq_len, batch_size, dp_size in ((64, 12, 5), (64, 0, 1), (0, 4, 1)):
        with pytest.raises(ConfigError):
            DataLoader(
                tokens,
                seq_len=seq_len or 1,
                batch_size=batch_size * seq_len // 64,
                seed=0,
                dp_size=dp_size,
            )
    for seq_len, batch_size, dp_size in ((64, 16, 2), (1000, 1, 1)):
        with pytest.raises(DataError):
            DataLoader(tokens, seq_len=seq_len, batch_size=batch_size, seed=0, dp_size=dp_size)
