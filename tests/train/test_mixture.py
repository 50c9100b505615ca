"""Batches of weighted mixtures, of shards in order, and of one batch repeated."""

from pathlib import Path

import numpy as np
import pytest

from megatoken.base.errors import ConfigError, DataError, ExitCode
from megatoken.cli.main import main
from megatoken.data.dataloader import DataLoader
from megatoken.data.dataset import load_dataset
from megatoken.data.mixture import load_mixture
from megatoken.text.prepare import prepare
from tests.tiny_run import TINY, read_losses, read_rows, train, write_shards

LETTERS, DIGITS = b"to be or not to be, that is the question. ", b"0123456789876543210 "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """External shards of letters and, a tenth as many, of digits."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, text, repeats in (("letters", LETTERS, 200), ("digits", DIGITS, 40)):
        write_shards(folder / name, text * repeats, (text * repeats)[:300])
    return folder


def test_batches_have_the_shares_of_their_sources(folder: Path):
    mixture = load_mixture(f"{folder}/letters:3,{folder}/digits:1", external_tokenizer="bytes")
    assert [component.share for component in mixture.components] == [0.75, 0.25]
    sources = [(len(component.dataset.train), component.share) for component in mixture.components]
    loader = DataLoader(mixture.train, seq_len=16, batch_size=12, seed=1, sources=sources)
    n_digits = 0
    for step in range(100):
        texts = [bytes(row.astype(np.uint8)) for row in loader.rows(step)]
        n_digits += sum(not text.strip(b"0123456789 ") for text in texts)
        assert n_digits == pytest.approx(3 * (step + 1), abs=3)


@pytest.mark.long
def test_each_source_is_validated_and_the_mean_has_the_weights(folder: Path, tmp_path: Path):
    mixed = f"data.path={folder}/letters:0.75,{folder}/digits:0.25"
    train(tmp_path / "run", mixed, "evaluate.every=6 evaluate.tokens=256")
    rows = read_rows(tmp_path / "run", "val")
    assert [row["step"] for row in rows] == [0, 6, 12]
    for row in rows:
        letters, digits = (row["sources"][f"{folder}/{name}"] for name in ("letters", "digits"))
        for key in ("loss", "bits_per_byte"):
            assert row[key] == pytest.approx(0.75 * letters[key] + 0.25 * digits[key])
        assert row["target_tokens"] == letters["target_tokens"] + digits["target_tokens"] == 512
    with pytest.raises((ConfigError, DataError)):
        train(tmp_path / "run", f"data.path={folder}/letters:0.5,{folder}/digits:0.5")


def test_what_cannot_be_mixed_is_refused(folder: Path, tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text of letters, and more of it " * 50)
    bpe, letters, digits = tmp_path / "bpe", folder / "letters", folder / "digits"
    # The last two: what the error recommends, and the tokenizer's file, which has another name.
    file = f"{bpe}/tokenizer/tokenizer.json"
    for name, tokenizer in (("bytes", "bytes"), ("bpe", "bpe:300"), ("same", bpe), ("named", file)):
        prepare(f"{tmp_path}/a.txt", tmp_path / name, tokenizer=str(tokenizer))
    assert len(load_mixture(f"{bpe}:1,{tmp_path}/same:1,{tmp_path}/named:1").components) == 3
    one, other = load_mixture(f"{bpe}:0.5"), load_mixture(str(bpe))
    assert (one.fingerprint, str(one)) == (other.fingerprint, str(other))
    for address in (f"{tmp_path}/bytes:1,{bpe}:1", f"{folder}/missing:1"):
        with pytest.raises(DataError):
            load_mixture(address)
    for weighted in (
        f"{letters}:1,x",
        f"{letters}:1,{letters}:2",
        f"{letters}:1,{digits}:0",
        f"{letters},{digits}",
        f"{letters}:abc",
    ):
        with pytest.raises(ConfigError):
            load_mixture(weighted)
    with pytest.raises(ConfigError):
        train(tmp_path / "run", f"data.path={letters}:0.75,{digits}:0.25 data.order=sequential")


def test_sequential_batches_are_those_of_a_loader_that_reads_shards_in_a_row(tmp_path: Path):
    rng = np.random.default_rng(0)
    sizes = (100, 1000, 8 * 16 + 1, 700, 8 * 16 * 3)  # the first is less than a batch
    shards = [rng.integers(0, 256, size).astype(np.uint16) for size in sizes]
    for number, ids in enumerate(shards):
        np.save(tmp_path / f"edufineweb_train_{number:06d}.npy", ids)
    tokens = load_dataset(tmp_path, external_tokenizer="bytes").train
    fixed = {"seq_len": 16, "batch_size": 8, "seed": 0, "order": "sequential"}
    loader = DataLoader(tokens, **fixed, sources=[(len(tokens), 1.0)])
    rank = DataLoader(tokens, **fixed, dp_rank=1, dp_size=2)

    # As build-nanogpt's loader, whose micro-batches on all ranks are the batch.
    starts = [(ids, n) for ids in shards for n in range(0, len(ids) - 8 * 16, 8 * 16)]
    batches = [ids[first : first + 8 * 16 + 1] for ids, first in starts]
    assert loader.n_windows == 8 * len(batches) == 8 * (7 + 1 + 5 + 2)
    for step, ids in enumerate(2 * batches):
        rows = loader.rows(step)
        assert np.array_equal(rows[:, :-1].reshape(-1), ids[:-1])
        assert np.array_equal(rows[:, 1:].reshape(-1), ids[1:])
        assert np.array_equal(rank.rows(step), rows[4:])


def test_one_batch_is_learnt_by_heart(folder: Path, tmp_path: Path):
    settings = f"data.path={folder}/letters budget.steps=60 budget.batch_tokens=64"
    line = f"train {TINY} --overfit-batch --out {tmp_path}/run {settings}"
    assert main(line.split()) == ExitCode.DONE
    assert read_losses(tmp_path / "run")[-1] < read_losses(tmp_path / "run", "val")[-1] - 0.3
    tokens = load_dataset(folder / "letters", external_tokenizer="bytes").train
    loader = DataLoader(tokens, seq_len=16, batch_size=8, seed=1337, order="one-batch")
    assert np.array_equal(loader.rows(0), loader.rows(99))
