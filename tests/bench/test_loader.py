"""bench loader: what it reads is a real dataset, checked in the first epoch, and the record is of the whole machine."""

import json
import os
from pathlib import Path

import pytest

from megatoken.bench.loader import SIZES, measure, measure_size, use_one_core, write_shards
from megatoken.cli import main
from megatoken.console import Console
from megatoken.data.dataset import open_dataset, verify_dataset
from megatoken.errors import Exit, Fault
from megatoken.hardware import cpu_count


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shards(tmp_path, 2, 4000)
    return tmp_path


def test_shards_are_a_whole_dataset_of_different_ids(shards: Path) -> None:
    assert not list(verify_dataset(shards))
    dataset = open_dataset(shards)
    assert (len(dataset.train), len(dataset.val)) == (8000, 0)
    first, second = ((shards / f"train_00000{n}.bin").read_bytes() for n in range(2))
    assert len(first) == len(second) == 1024 + 2 * 4000
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]


def test_rows_say_their_sizes_and_spread(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure(shards, [(16, 256), (50, 500)], 3, Console())
    assert [(row["seq_len"], row["batch_tokens"]) for row in rows] == [(16, 256), (50, 500)]
    for row in rows:
        assert set(row["tokens_per_second"]) == {"first_epoch", "later_epochs"}
        for rate in row["tokens_per_second"].values():
            assert 0 < rate["low"] <= rate["median"] <= rate["high"]
            assert rate["repeats"] == 3
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [["16", "256"], ["50", "500"]]


def test_the_first_epoch_checks_every_block(shards: Path) -> None:
    path = shards / "train_000001.bin"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(Fault, match="train_000001") as caught:
        measure_size(shards, 16, 256, 1)
    assert caught.value.code == Exit.DATA


def test_one_core_is_given_back() -> None:
    before = cpu_count()
    with use_one_core():
        assert cpu_count() == (1 if hasattr(os, "sched_setaffinity") else before)
    assert cpu_count() == before


def test_the_command_leaves_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "loader", "--shards", "1", "--shard-tokens", "530000", "--repeats", "1", "--out", str(tmp_path)]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["seq_len"], row["batch_tokens"]) for row in answer["rows"]] == list(SIZES)
    record = json.loads((tmp_path / "loader.json").read_text())
    assert record["answer"] == answer
    assert record["hardware"]["cores"] == cpu_count()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shards", "2", "--shard-tokens", "1000"], "give at least 262145"),
        (["--shards", "0"], "'0' is not a whole number from 1 on"),
        (["--shard-tokens", "many"], "'many' is not a whole number"),
        (["--repeats", "0"], "0 repeats measure nothing"),
    ],
)
def test_wrong_sizes_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "loader", *words, "--out", str(tmp_path / "out")]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
