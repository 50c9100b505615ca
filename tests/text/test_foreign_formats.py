"""Formats of other programs that are not read: both doors name them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatoken.base.errors import DataError
from megatoken.data.dataset import load_dataset
from megatoken.text.file_kinds import FOREIGN, find_foreign
from megatoken.text.sources import find_source
from megatoken.text.tokenizer import load_tokenizer
from tests.data.small_dataset import write_external

Door = Callable[[str], Any]
DATASETS = [name for name, row in FOREIGN.items() if len(row["markers"]) > 1]
FILES = [name for name in FOREIGN if name not in DATASETS]


def check_named(door: Door, path: Path, name: str) -> None:
    with pytest.raises(DataError, match=re.escape(name)):
        door(str(path))


@pytest.mark.parametrize("name", DATASETS)
def test_a_foreign_dataset_is_named_by_both_doors(name: str, tmp_path: Path):
    markers = FOREIGN[name]["markers"]
    folder = tmp_path / "data/train"
    folder.mkdir(parents=True)
    for marker in markers:
        (folder / marker.replace("*", "a")).write_text("{}")
    last = markers[-1].replace("*", "a")
    for path in (folder, folder.parent, folder / last):
        for door in (load_dataset, find_source):
            check_named(door, path, name)
    (folder / "notes.txt").write_text("text")
    assert find_foreign(folder / "notes.txt") is None
    (folder / last).unlink()
    assert find_source(str(folder)).files


@pytest.mark.parametrize("name", FILES)
def test_a_foreign_file_is_named_if_nothing_else_is_there(name: str, tmp_path: Path):
    row = FOREIGN[name]
    file = tmp_path / row["markers"][0].replace("[0-9]", "0").replace("*", "0")
    start = row.get("start", "")
    file.write_bytes((start if start.isalpha() else "\x17").encode() + bytes(100))
    for path in (file, tmp_path, tmp_path / "*"):
        check_named(find_source, path, name)
        if file.suffix in (".npy", ".bin", ".ds"):
            check_named(load_dataset, path, name)
        if path.exists() and file.suffix in (".model", ".tiktoken", ".bpe"):
            check_named(load_tokenizer, path, name)
    (tmp_path / "notes.txt").write_text("text")
    assert [each.name for each in find_source(str(tmp_path)).files] == ["notes.txt"]


def test_shards_with_headers_are_read_under_foreign_names(tmp_path: Path):
    for name in ("data00.bin", "part-000-00000.npy"):
        write_external(tmp_path / name, np.arange(9, dtype="uint16"))
        assert len(load_dataset(tmp_path / name).train) == 9


def test_the_prefix_of_megatrons_files_is_recognized(tmp_path: Path):
    for suffix in ("bin", "idx"):
        (tmp_path / f"a.{suffix}").write_bytes(bytes(8))
    with pytest.raises(DataError, match="Megatron"):
        load_dataset(tmp_path / "a")
