"""Examples from files of every form, and every way in which a file can be wrong."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megatoken.errors import Exit, Fault
from megatoken.evaluate.rows import read_examples
from megatoken.evaluate.tasks import find_tasks

ROWS = [{"goal": f"goal {n}", "sol1": "a", "sol2": "b", "label": n % 2} for n in range(5)]
PIQA, BOTH = find_tasks("piqa"), find_tasks("piqa,lambada")


def write(folder: Path, name: str) -> Path:
    path = folder / name
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_the_same_examples_from_every_form(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, f"piqa{suffix}")
    examples = read_examples(PIQA, path)["piqa"]
    assert [example.prompts[0][0] for example in examples] == [f"Question: goal {n}\nAnswer:" for n in range(5)]
    assert [example.gold for example in examples] == [0, 1, 0, 1, 0]
    assert read_examples(PIQA, path, 2)["piqa"] == examples[:2]
    assert read_examples(PIQA, tmp_path)["piqa"] == examples  # a folder that holds it


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"goal": "x"}\n', r"malformed example of piqa: no key 'sol1'.*a\.jsonl:1 — mend or remove it"),
        ("a.jsonl", json.dumps(ROWS[0]) + "\n\n{oops\n", r"not JSON: .* — .*a\.jsonl:3"),
        ("a.jsonl", json.dumps(ROWS[0]) + "\n[1]\n", r"not an object but \[1\] — .*a\.jsonl:2"),
        ("a.jsonl", "", "no examples of piqa — .*a.jsonl"),
        ("a.json", "{}", r"not a list of objects — .*a\.json"),
        ("a.json", json.dumps([ROWS[0], {}]), r"no key 'goal' \(it has: none\) — .*a\.json, row 2"),
        ("a.jsonl", '{"goal": "half \\ud800", "sol1": "a", "sol2": "b", "label": 0}\n', r"surrogates.*a\.jsonl:1"),
        ("a.parquet", "PAR1", r"not a whole parquet file: .*a\.parquet"),
        ("a.csv", "", r"examples are not read from \.csv files — .*a\.csv — give a local file"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(Fault, match=said) as caught:
        read_examples(PIQA, tmp_path / name)
    assert caught.value.code == Exit.DATA
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(Fault, match=r"no such file — .*nowhere"):
        read_examples(PIQA, tmp_path / "nowhere.jsonl")
    with pytest.raises(Fault, match=r"no examples of piqa in this folder — .* — place piqa\.jsonl there"):
        read_examples(PIQA, tmp_path)


def test_one_file_is_one_task(tmp_path: Path) -> None:
    with pytest.raises(Fault, match=r"one file cannot be 2 tasks.*give a folder with piqa\.jsonl, lambada\.jsonl"):
        read_examples(BOTH, write(tmp_path, "piqa.jsonl"))


def test_without_the_hub_a_local_file_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)  # as where it is not installed
    with pytest.raises(Fault, match=r"reading baber/piqa from the hub needs `datasets` — piqa — pip install"):
        read_examples(PIQA, None)


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(Fault, match="cannot get baber/piqa from the Hugging Face hub: ConnectionError — piqa — give a"):
        read_examples(PIQA, None)
