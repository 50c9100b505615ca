"""A page says which of its figures are older than the code they measured (tests/records.py)."""

import json
from pathlib import Path

import pytest

from megatoken.bench import report
from tests.records import CODE, ROOT, list_changed, mark

SOURCE = '"""What."""\nimport os  # why\n\n# a comment\nx = 1\n\n\ndef f():\n    """What it does."""\n    return 7 // x\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one file that stands for `data`."""
    (tmp_path / "src" / "data").mkdir(parents=True)
    (tmp_path / "src" / "data" / "loader.py").write_text(SOURCE)
    monkeypatch.setattr(report, "SOURCE", tmp_path / "src")
    return tmp_path / "src" / "data" / "loader.py"


def test_only_code_that_decides_the_figures_makes_a_record_old(
    source: Path, tmp_path: Path
) -> None:
    record = tmp_path / "loader.json"
    record.write_text(json.dumps({"code": report.hash_code()}))
    source.write_text(
        SOURCE.replace("What it does.", "What\n\n    it does.") + "\n    # another comment\n"
    )
    (source.parents[1] / "plots.py").write_text("y = 1\n")
    (source.parents[1] / "config").mkdir()
    (source.parents[1] / report.NO_FIGURES).write_text("z = 1\n")
    assert list_changed(record) == []
    source.write_text(SOURCE.replace("7", "8"))
    assert list_changed(record) == ["data"]
    record.write_text("{}")  # made before records kept hashes
    assert list_changed(record) == ["data"]


def test_a_new_module_makes_a_record_old(source: Path, tmp_path: Path) -> None:
    record = tmp_path / "loader.json"
    record.write_text(json.dumps({"code": report.hash_code()}))
    (source.parent / "more.py").write_text("z = 1\n")
    assert list_changed(record) == ["data"]


def test_daggers_follow_old_records_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "loader.json").write_text(json.dumps({"code": report.hash_code()}))
    (tmp_path / "prepare.json").write_text("{}")
    page = "[a](../records/loader.json)†, [b](https://x.y/records/prepare.json), [c](records/prepare.json)†"
    marked = "[a](../records/loader.json), [b](https://x.y/records/prepare.json)†, [c](records/prepare.json)†"
    assert mark(page, tmp_path) == marked
    assert mark(marked, tmp_path) == marked


def test_the_table_names_packages_and_records_that_exist() -> None:
    from megatoken import LAYERS

    assert {package for packages in CODE.values() for package in packages} <= set(LAYERS)
    made = {path.stem for path in (ROOT / "records").glob("*.json")}
    planned = {
        "prepare-calls",
        "config-soak",
        "hash-cost",
        "terminal-soak",
        "muon-sweep",
    }  # of make soak
    planned |= {"native-loss", "race-optimizers"}
    assert set(CODE) <= made | planned
