"""bench prepare: the text it makes or reads, the ids it compares, the contenders it finds."""

import json
from pathlib import Path

import pytest

from megatoken.bench.prepare import (
    build_tiktoken,
    choose_tokenizer,
    compare_ids,
    find_contenders,
    make_documents,
    measure,
    read_documents,
    write_jsonl,
)
from megatoken.cli import main
from megatoken.console import Console
from megatoken.data import gpt2_vocabulary
from megatoken.data.dataset import open_dataset
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import Exit, Fault

PROSE = "The cat sat on the mat; it didn't purr.\r\nIl était une fois — 123 chats,\n\n\tpas 4. <|endoftext|> "


@pytest.fixture
def no_vocabulary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR", "MEGATOKEN_CACHE", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_made_text_is_always_the_same() -> None:
    first, again = (list(make_documents(20_000)) for _ in range(2))
    assert first == again
    assert sum(map(len, first[:-1])) < 20_000 <= sum(map(len, first))
    assert len(set(first)) == len(first)


def test_jsonl_holds_each_document(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one\ntwo", "drei ä"])
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert rows == [{"text": "one\ntwo"}, {"text": "drei ä"}]


def test_own_text_is_read_as_prepare_would(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one<|endoftext|>two<|endoftext|>  ")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n')
    (tmp_path / "c.bin.notes").write_text("not in a folder's listing")
    assert read_documents(str(tmp_path), 10**6) == ["one", "two", "three"]
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(Fault, match="no text in this source") as caught:
        read_documents(str(tmp_path / "empty.txt"), 10**6)
    assert caught.value.code == Exit.DATA


def test_a_large_source_gives_about_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "large.txt").write_text("word " * 1_000_000)
    assert 10**5 < sum(map(len, read_documents(str(tmp_path), 10**6))) <= 2**20


def test_every_turn_prepares_the_same_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [f"{number} {PROSE}" * 3 for number in range(60)]
    answer = measure(tmp_path, documents, "bpe:300", 2, Console())
    assert (answer["tokenizer"], answer["documents"]) == ("bpe:300", 60)
    assert answer["megabytes"] == sum(len(text.encode()) for text in documents) / 1e6
    rates = answer["megabytes_per_second"]
    assert set(rates) == {"prepare", "tokenizers"}
    assert all(rate["repeats"] == 2 and 0 < rate["low"] <= rate["median"] <= rate["high"] for rate in rates.values())
    assert answer["ratio"] == {"tokenizers": rates["prepare"]["median"] / rates["tokenizers"]["median"]}
    taught = load_tokenizer(str(tmp_path / "tokenizer"))
    for turn in range(3):  # one of them untimed
        manifest = open_dataset(tmp_path / f"out{turn}").manifest
        assert manifest.tokenizer["fingerprint"] == taught.fingerprint
        assert sum(manifest.documents.values()) == 60
        ids = sum(len(taught.encode(text)) for text in documents)
        ends = 59  # between documents; the end of so small a corpus is held out just as it stands
        assert manifest.tokens("train") + manifest.tokens("val") == ids + ends
    assert not (tmp_path / "out3").exists()
    assert "prepare is" in capsys.readouterr().out.splitlines()[-1]


def test_contenders_with_other_ids_are_refused() -> None:
    tokenizer = load_tokenizer("bytes")
    contenders = find_contenders(tokenizer)
    assert set(contenders) == {"tokenizers"}
    compare_ids(tokenizer, contenders, [PROSE, "b"])
    with pytest.raises(Fault, match="wrong gives other ids than bytes here — document 1") as caught:
        compare_ids(tokenizer, {"wrong": lambda texts: [[97], [97]]}, ["a", "b"])
    assert caught.value.code == Exit.NUMERICS


def test_tiktoken_from_our_merges_gives_the_published_ids(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(real_data / "tiktoken"))
    merges = gpt2_vocabulary.find_local_merges()
    assert merges is not None
    encode = build_tiktoken(merges)
    assert encode is not None
    assert encode(["Hello world, GPT-2!", ""]) == [[15496, 995, 11, 402, 11571, 12, 17, 0], []]
    tokenizer = load_tokenizer("gpt2")
    assert set(find_contenders(tokenizer)) == {"tokenizers", "tiktoken"}
    compare_ids(tokenizer, find_contenders(tokenizer), [PROSE])
    assert choose_tokenizer(Console()) == "gpt2"


@pytest.mark.usefixtures("no_vocabulary")
def test_without_gpt2_it_says_what_takes_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_tokenizer(Console()) == "bpe:4096"
    assert "GPT-2's vocabulary is not on this machine: bpe:4096" in capsys.readouterr().out


def test_the_command_measures_own_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a.txt", tmp_path / "out"
    source.write_text(PROSE * 100)
    words = ["bench", "prepare", "--source", str(source), "--tokenizer", "bytes", "--repeats", "1", "--out", str(out)]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["source"], answer["tokenizer"], answer["documents"]) == (str(source), "bytes", 100)
    assert json.loads((out / "prepare.json").read_text())["answer"] == answer
    assert main([*words[:3], "/no/such/file", *words[4:]]) == Exit.DATA
