"""bench loader and prepare: the dataset and the text they measure, the ids they compare, what the record holds."""

import json
from pathlib import Path

import pytest

from megatoken.bench.data import SIZES, make_documents, time_epochs, write_jsonl, write_shards
from megatoken.cli.main import main
from megatoken.data.dataset import load_dataset, verify_dataset
from megatoken.data.prepare import prepare
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import ExitCode, MegatokenError
from megatoken.system.machine import cpu_count


def test_made_text_is_always_the_same() -> None:
    first, again = (list(make_documents(20_000)) for _ in range(2))
    assert first == again
    assert sum(map(len, first[:-1])) < 20_000 <= sum(map(len, first))
    assert len(set(first)) == len(first)


def test_jsonl_holds_each_document(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one\ntwo", "drei ä"])
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert rows == [{"text": "one\ntwo"}, {"text": "drei ä"}]


def test_every_round_prepares_the_same_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatoken.bench.data.find_local_merges", lambda: None)
    monkeypatch.setattr("megatoken.bench.data.FALLBACK", "bpe:300")
    trained = []

    def prepare_and_look(source: str, out: Path, tokenizer: str) -> None:
        prepare(source, out, tokenizer=tokenizer)
        manifest = load_dataset(out).manifest
        trained.append(
            (manifest.tokenizer["fingerprint"], manifest.tokens("train") + manifest.tokens("val"))
        )

    monkeypatch.setattr("megatoken.bench.data.prepare", prepare_and_look)
    words = ["bench", "prepare", "--megabytes", "1", "--repeats", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    answer, documents = json.loads(last), list(make_documents(10**6))
    assert json.loads((tmp_path / "prepare.json").read_text())["answer"] == answer
    assert (answer["tokenizer"], answer["documents"]) == ("bpe:300", len(documents))
    assert answer["megabytes"] == sum(len(text.encode()) for text in documents) / 1e6
    rates = answer["megabytes_per_second"]
    assert set(rates) == {"prepare", "tokenizers"}
    assert all(
        rate["repeats"] == 2 and 0 < rate["low"] <= rate["median"] <= rate["high"]
        for rate in rates.values()
    )
    assert answer["ratio"] == {
        "tokenizers": rates["prepare"]["median"] / rates["tokenizers"]["median"]
    }
    tokenizer = load_tokenizer("bpe:300", lambda: iter(documents[:2000]))
    ids = sum(len(tokenizer.encode(text)) for text in documents)
    ends = len(documents) - 2  # between the documents of each split
    assert trained == [(tokenizer.fingerprint, ids + ends)] * 3, "one of them untimed"
    assert any(line.startswith("tokenizers ") for line in lines)


def test_other_ids_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, other = (
        load_tokenizer("bytes"),
        load_tokenizer("bpe:300", lambda: make_documents(10**5)),
    )
    tokenizer.to_json = other.to_json  # type: ignore[method-assign]
    monkeypatch.setattr("megatoken.bench.data.load_tokenizer", lambda *arguments: tokenizer)
    words = ["bench", "prepare", "--megabytes", "1", "--tokenizer", "bytes", "--out", str(tmp_path)]
    assert main(words) == ExitCode.NUMERICS


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shards(tmp_path, 2, 4000)
    return tmp_path


def test_shards_are_a_whole_dataset_of_different_ids(shards: Path) -> None:
    assert not list(verify_dataset(shards))
    dataset = load_dataset(shards)
    assert (len(dataset.train), len(dataset.val)) == (8000, 0)
    first, second = ((shards / f"train_00000{n}.bin").read_bytes() for n in range(2))
    assert len(first) == len(second) == 1024 + 2 * 4000
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]


def test_the_first_epoch_checks_every_block(shards: Path) -> None:
    path = shards / "train_000001.bin"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(MegatokenError, match="train_000001") as caught:
        time_epochs(shards, 16, 256, 1)
    assert caught.value.code == ExitCode.DATA


def test_the_loader_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bench",
        "loader",
        "--shards",
        "1",
        "--shard-tokens",
        "530000",
        "--repeats",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["seq_len"], row["batch_tokens"]) for row in answer["rows"]] == list(SIZES)
    for row in answer["rows"]:
        assert set(row["tokens_per_second"]) == {"first_epoch", "later_epochs"}
        assert all(
            0 < r["low"] <= r["median"] <= r["high"] for r in row["tokens_per_second"].values()
        )
    record = json.loads((tmp_path / "loader.json").read_text())
    assert record["answer"] == answer
    assert record["hardware"]["cores"] == cpu_count()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shards", "2", "--shard-tokens", "1000"], "give at least 262145"),
        (["--shards", "0"], "'0' is not a whole number from 1 on"),
        (["--shard-tokens", "many"], "'many' is not a whole number"),
        (["--repeats", "0"], "'0' is not a whole number from 1 on"),
    ],
)
def test_wrong_loader_sizes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "loader", *words, "--out", str(tmp_path / "out")]) == ExitCode.CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("out/*"))
