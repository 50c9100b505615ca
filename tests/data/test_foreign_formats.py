"""Datasets of other programs that are not read: both doors name the format."""

import re
from pathlib import Path

import pytest

from megatoken.data.dataset import load_dataset
from megatoken.data.foreign_formats import FOREIGN_FORMATS, ForeignFormat, refuse_foreign
from megatoken.data.sources import find_source
from megatoken.errors import DataError


@pytest.mark.parametrize("foreign", FOREIGN_FORMATS, ids=lambda foreign: foreign.name)
def test_a_foreign_dataset_is_named_by_both_doors(foreign: ForeignFormat, tmp_path: Path):
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    for marker in foreign.markers:
        (folder / marker.replace("*", "a")).write_text("{}")
    last = foreign.markers[-1].replace("*", "a")
    for path in (folder, folder.parent, folder / last):
        for door in (load_dataset, find_source):
            with pytest.raises(DataError, match=re.escape(foreign.name)):
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
