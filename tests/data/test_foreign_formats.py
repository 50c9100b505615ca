"""Datasets of other programs that are not read: both doors name the format."""

import re
from pathlib import Path

import pytest

from megatoken.data.dataset import load_dataset
from megatoken.data.foreign_formats import FOREIGN_FORMATS, refuse_foreign
from megatoken.data.sources import find_source
from megatoken.errors import DataError


@pytest.mark.parametrize("name", FOREIGN_FORMATS)
def test_a_foreign_dataset_is_named_by_both_doors(name: str, tmp_path: Path):
    markers = FOREIGN_FORMATS[name]["markers"]
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    for marker in markers:
        (folder / marker.replace("*", "a")).write_text("{}")
    last = markers[-1].replace("*", "a")
    for path in (folder, folder.parent, folder / last):
        for door in (load_dataset, find_source):
            with pytest.raises(DataError, match=re.escape(name)):
                door(str(path))
    (folder / "notes.txt").write_text("text")
    refuse_foreign(folder / "notes.txt")
    (folder / last).unlink()
    assert find_source(str(folder)).files


def test_the_prefix_of_megatrons_files_is_recognized(tmp_path: Path):
    for suffix in ("bin", "idx"):
        (tmp_path / f"a.{suffix}").write_bytes(bytes(8))
    with pytest.raises(DataError, match="Megatron"):
        load_dataset(tmp_path / "a")
