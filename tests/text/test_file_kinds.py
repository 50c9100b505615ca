"""What a file is, by its name and first bytes: its split, its format, and how all doors agree."""

from pathlib import Path

import numpy as np
import pytest

from megatoken.base.errors import ConfigError
from megatoken.data.dataset import load_dataset
from megatoken.text.file_kinds import find_split
from megatoken.text.sources import Source, find_corpus, find_source
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


@pytest.mark.parametrize("pattern", ["", "*", "[a-f]*.bin"])
def test_external_shards_have_the_splits_of_their_names(tmp_path: Path, pattern: str):
    splits = {"a_VAL_0": "val", "b-dev": "val", "c_eval_1": "val", "d_heldout": "val", "e": "train"}
    for name in (*splits, "f_test_0"):
        write_external(tmp_path / "test" / f"{name}.bin", np.arange(9, dtype="uint16"))
    shards = load_dataset(tmp_path / "test" / pattern).manifest.shards
    assert {shard.file.removesuffix(".bin"): shard.split for shard in shards} == splits
    assert len(load_dataset(tmp_path / "test/f_test_0.bin").train) == 9


def test_text_that_looks_like_rows_is_text(tmp_path: Path):
    for content in ('{"a": 1}\n{"b": 2}\n', '{"a": 1}\n', "{x}\n", "{\n", "{}\n{}"):
        path = write(tmp_path / "a.txt", content)
        assert find_source(str(path)).files[0].format == "separated"
