"""What a file is, by its name and first bytes: its split, its format, and how all doors agree."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatoken.base.errors import ConfigError
from megatoken.data.dataset import load_dataset
from megatoken.text.file_kinds import find_split
from megatoken.text.prepare_chats import prepare_chats
from megatoken.text.sources import Source, find_corpus, find_source
from megatoken.text.tokenizer import load_tokenizer, open_tokenizer
from tests.data.small_dataset import write_external
from tests.text.test_documents import write
from tests.text.test_prepare import EOT, prepare, read_split

# As `datasets` assigns them (data_files.py of 4.4), but for "eval": there a name of the test split.
SPLITS = {
    "train": "data/train-00000-of-00001.parquet webtext.train.jsonl TinyStoriesV2-GPT4-train.txt"
    " training/a.txt train/all-the-tests.txt train/crash-test.txt TRAIN_1.txt interval_train_01.bin en/c4-train.00.json.gz",
    "val": "data/validation-00000-of-00001.parquet webtext.valid.jsonl fineweb_VAL_000.bin dev.tsv"
    " Validation/test_1.txt sets/my-dev/a.txt eval/a.txt val2.txt x_heldout_1.bin books-valid.bin",
    "test": "data/test-00000-of-00001.parquet a/test/b/c.txt wiki.test.raw testing/a.txt my test.txt",
    "": "tests/a.txt contest.txt latest-1.txt trained.txt value.txt devices/a.txt validate.txt a.txt"
    " evaluated.bin valued.bin retrieval_1.bin",
}


@pytest.mark.parametrize("split", SPLITS)
def test_splits_by_name(split: str):
    names = SPLITS[split].replace("my test", "my\ttest").split(" ")
    assert {name: find_split(name) for name in names} == dict.fromkeys(names, split)


def list_splits(source: Source) -> dict[str, str]:
    return {file.name: file.split for file in source.files}


def read_text(out: Path, split: str) -> bytes:
    """Return a split's text, with NUL between the documents."""
    return bytes(id % EOT for id in read_split(out, split))


def write_all(folder: Path, names: str) -> Path:
    for name in names.split():
        write(folder / name, f"text of {name}")
    return folder


def test_validation_files_are_the_val_split_and_test_files_are_left_out(tmp_path: Path):
    source = write_all(tmp_path / "set", "train.txt more.txt dev/a.txt test.txt x/test_1.md")
    result = prepare(source, tmp_path / "out", val_fraction=0.9)
    texts = {split: read_text(tmp_path / "out", split) for split in ("train", "val")}
    assert texts == {"train": b"text of more.txt\0text of train.txt", "val": b"text of dev/a.txt"}
    assert result.skipped_files == {"named test": 2}
    assert result.counts["val_from_tail_tokens"] == 0


@pytest.mark.parametrize("names", ["test/a.txt test/b.txt", "val.txt", "test.txt dev.txt"])
def test_names_are_ignored_if_nothing_is_left_to_train_on(tmp_path: Path, names: str):
    folder, paths = write_all(tmp_path / "test", names), sorted(names.split())
    assert list_splits(find_corpus(str(folder))) == dict.fromkeys(paths, "")
    assert {*list_splits(find_corpus(f"{folder}/{paths[0]}")).values()} == {""}


def test_names_above_the_source_and_names_of_code_are_ignored(tmp_path: Path):
    folder = write_all(tmp_path / "test", "a.py test/b.py test_c.py val/d.log e.txt")
    splits = list_splits(find_corpus(f"{folder}/**/*"))
    assert [*splits.values()] == [""] * 5
    code = find_corpus("python")
    assert {*list_splits(code).values()} == {""}
    assert code.digest(times=True) == find_source("python").digest(times=True)


def test_validation_files_are_named_by_hand(tmp_path: Path):
    folder = write_all(tmp_path / "set", "a.txt b.txt val.txt test.txt")
    other, out = write(tmp_path / "other.txt", "other"), tmp_path / "out"
    for val in (folder / "b.txt", other):
        source = find_corpus(str(folder), val=str(val))
        assert list_splits(source) == {"a.txt": "", "b.txt": "", val.name: "val"}
        assert source.skipped == {"named val": 1, "named test": 1}
    result = prepare(folder, out, val=str(other))
    assert read_text(out, "val") == b"other"
    assert result.train_tokens == len("text of a.txt text of b.txt")
    with pytest.raises(ConfigError):
        find_corpus(str(other), val=str(other))


def test_chats_have_the_splits_of_their_files(tmp_path: Path):
    out = tmp_path / "out"
    for split, count in {"train": 3, "validation": 2, "test": 4}.items():
        contents = {"user": split, "assistant": "x"}.items()
        row = {"messages": [{"role": role, "content": content} for role, content in contents]}
        write(tmp_path / "set" / f"{split}.jsonl", f"{json.dumps(row)}\n" * count)
    source = find_corpus(str(tmp_path / "set"))
    prepare_chats(source, out, load_tokenizer("bytes"), seq_len=64, val_fraction=0.5)
    dataset = load_dataset(out)
    assert dataset.manifest.documents == {"train": 3, "val": 2}
    assert "validation" in open_tokenizer(dataset.vocabulary).decode(read_split(out, "val"))


@pytest.mark.parametrize("pattern", ["", "*", "[a-f]*.bin"])
def test_external_shards_have_the_splits_of_their_names(tmp_path: Path, pattern: str):
    splits = {"a_VAL_0": "val", "b-dev": "val", "c_eval_1": "val", "d_heldout": "val", "e": "train"}
    for name in (*splits, "f_test_0"):
        write_external(tmp_path / "test" / f"{name}.bin", np.arange(9, dtype="uint16"))
    shards = load_dataset(tmp_path / "test" / pattern).manifest.shards
    assert {shard.file.removesuffix(".bin"): shard.split for shard in shards} == splits
    assert len(load_dataset(tmp_path / "test" / "f_test_0.bin").train) == 9


ROWS = '{"id": 1, "text": "one"}\n\n{"id": 2, "text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, ROWS) for name in ("wiki_00", "a.jl", "a.jsonlines", "a.txt", "a.log")),
        ("a.json", '{\n "text": "one\\u0000two"\n}'),
        ("wiki_00", f"\ufeff{ROWS}"),
        ("a.csv", 'id;text\n1;"one"\n2;two\n'),
    ],
)
def test_rows_are_recognized_by_their_content(tmp_path: Path, name: str, content: str):
    path = write(tmp_path / "in" / name, content)
    for number, source in enumerate((path, path.parent)):
        prepare(source, tmp_path / f"{number}", val_fraction=0)
        assert read_text(tmp_path / f"{number}", "train") == b"one\0two"


def test_text_that_looks_like_rows_is_text(tmp_path: Path):
    for content in ('{"a": 1}\n{"b": 2}\n', '{"a": 1}\n', "{x}\n", "{\n", "{}\n{}"):
        path = write(tmp_path / "a.txt", content)
        assert find_source(str(path)).files[0].format == "separated"
