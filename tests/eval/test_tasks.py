"""Tasks: prompts equal to lm-evaluation-harness 0.4.13's (benchmarks/harness_race.py compares), files of examples."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megatoken.errors import ExitCode, MegatokenError
from megatoken.eval.tasks import TASKS, Example, find_tasks, read_examples

ROWS: dict[str, dict[str, Any]] = {
    "hellaswag": {
        "activity_label": "Roof shingle  removal",
        "ctx_a": "A man [header] sits [title] on  a   roof.",
        "ctx_b": "he Looks",
        "ctx": "A man [header] sits [title] on  a   roof. he Looks",
        "endings": [
            " is using [substeps] wrap.",
            "is ripping [title] tiles",
            "é [x",
            "starts  up ",
        ],
        "label": "3",
    },
    "arc_easy": {
        "question": "Which gas?",
        "choices": {"text": ["oxygen", "neon ", "iron"], "label": ["1", "2", "3"]},
        "answerKey": "2",
    },
    "openbookqa": {
        "question_stem": "The sun is responsible for",
        "choices": {"text": ["puppies", "plants", "ice", "war"], "label": ["A", "B", "C", "D"]},
        "answerKey": " B",
    },
    "piqa": {
        "goal": "Open a jar",
        "sol1": "Twist the lid.",
        "sol2": "Twist the jar, lid off.",
        "label": 0,
    },
    "winogrande": {
        "sentence": "The trophy did not fit the case as _ was too big.",
        "option1": "the trophy",
        "option2": "the case",
        "answer": "1",
    },
    "lambada": {"text": 'he said, "go home"  and went'},
}
HELLASWAG = "Roof shingle removal: A man sits. on a  roof. He looks"


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (
            "hellaswag",
            Example(
                prompts=(
                    (HELLASWAG, " is using wrap."),
                    (HELLASWAG, " is ripping. tiles"),
                    (HELLASWAG, " é [x"),
                    (HELLASWAG, " starts up"),
                ),
                gold=3,
                lengths=(14, 17, 4, 9),
                raw_prompts=tuple(
                    (ROWS["hellaswag"]["ctx"], f" {ending}")
                    for ending in ROWS["hellaswag"]["endings"]
                ),
            ),
        ),
        (
            "arc_easy",
            Example(
                prompts=tuple(
                    ("Question: Which gas?\nAnswer:", f" {gas}")
                    for gas in ("oxygen", "neon ", "iron")
                ),
                gold=1,
                lengths=(6, 5, 4),
            ),
        ),
        (
            "openbookqa",
            Example(
                prompts=tuple(
                    ("The sun is responsible for", f" {a}")
                    for a in ("puppies", "plants", "ice", "war")
                ),
                gold=1,
                lengths=(7, 6, 3, 3),
            ),
        ),
        (
            "piqa",
            Example(
                prompts=(
                    ("Question: Open a jar\nAnswer:", " Twist the lid."),
                    ("Question: Open a jar\nAnswer:", " Twist the jar, lid off."),
                ),
                gold=0,
                lengths=(14, 23),
            ),
        ),
        (
            "winogrande",
            Example(
                prompts=(
                    ("The trophy did not fit the case as the trophy", " was too big."),
                    ("The trophy did not fit the case as the case", " was too big."),
                ),
                gold=0,
            ),
        ),
        ("lambada", Example(prompts=(('he said, "go home"  and', " went"),), gold=0)),
    ],
)
def test_prompts_equal_the_harness(task: str, expected: Example) -> None:
    assert TASKS[task].parse(ROWS[task]) == expected


def test_hellaswag_row_without_ctx_a_uses_ctx() -> None:
    row = {"activity_label": "Roof", "ctx": "A man sits.", "endings": ["a", "b"], "label": 1}
    example = TASKS["hellaswag"].parse(row)
    assert example.prompts[0] == ("Roof: A man sits.", " a")
    assert example.raw_prompts[1] == ("A man sits.", " b")
    halves = {
        "activity_label": "Roof",
        "ctx_a": "A man sits.",
        "ctx_b": "",
        "endings": ["a", "b"],
        "label": 1,
    }
    assert TASKS["hellaswag"].parse(halves).prompts[0] == ("Roof: A man sits.", " a")
    assert TASKS["hellaswag"].parse(halves).raw_prompts[0][0] == "A man sits."


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("hellaswag", {"endings": "one"}, "choices are 'one', not at least two strings"),
        ("hellaswag", {"endings": ["one"]}, "not at least two strings"),
        (
            "hellaswag",
            {"endings": ["one", " "]},
            "choices are .'one', ' '., not at least two strings",
        ),
        ("hellaswag", {"label": "4"}, "'label' is '4', not one of 0 to 3"),
        ("hellaswag", {"label": ""}, "invalid literal for int"),
        ("hellaswag", {"ctx_b": None}, "'ctx_b' is None, not a string"),
        ("arc_easy", {"answerKey": "D"}, "'D' is not in list"),
        ("arc_easy", {"choices": ["a", "b"]}, "list indices must be integers"),
        ("piqa", {"label": -1}, "'label' is -1"),
        ("piqa", {"sol1": ""}, r"choices are \['', .*\], not at least two strings"),
        ("winogrande", {"sentence": "no gap"}, "'sentence' has no gap"),
        ("winogrande", {"sentence": "a gap _ "}, "'sentence' has no gap '_' with text behind it"),
        ("winogrande", {"answer": "3"}, "'3' is not in list"),
        ("lambada", {"text": 5}, "'text' is 5, not a string"),
        ("lambada", {"text": "ends in space "}, "does not end with a word"),
    ],
)
def test_malformed_row(task: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        TASKS[task].parse(ROWS[task] | change)


def test_find_tasks() -> None:
    assert [task.name for task in find_tasks("piqa, hellaswag")] == ["piqa", "hellaswag"]
    assert find_tasks(["piqa", "hellaswag"]) == find_tasks("piqa,hellaswag,piqa")
    with pytest.raises(
        MegatokenError, match=r"unknown task 'helaswag' — tasks — did you mean hellaswag\?"
    ) as error:
        find_tasks("piqa,helaswag")
    assert error.value.code == ExitCode.CONFIG
    with pytest.raises(MegatokenError, match="choose among hellaswag, arc_easy"):
        find_tasks("xyz")
    with pytest.raises(MegatokenError, match="unknown task ''"):
        find_tasks(" ,")


PIQA_ROWS = [{"goal": f"goal {n}", "sol1": "a", "sol2": "b", "label": n % 2} for n in range(5)]
PIQA, BOTH = find_tasks("piqa"), find_tasks("piqa,lambada")


def write_rows(folder: Path, name: str) -> Path:
    path = folder / name
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(PIQA_ROWS), path)
    else:
        path.write_text("\n".join(map(json.dumps, PIQA_ROWS)) + "\n\n")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_every_file_format_gives_the_same_examples(tmp_path: Path, suffix: str) -> None:
    path = write_rows(tmp_path, f"piqa{suffix}")
    examples = read_examples(PIQA, path)["piqa"]
    assert [example.prompts[0][0] for example in examples] == [
        f"Question: goal {n}\nAnswer:" for n in range(5)
    ]
    assert [example.gold for example in examples] == [0, 1, 0, 1, 0]
    assert read_examples(PIQA, path, 2)["piqa"] == examples[:2]
    assert read_examples(PIQA, tmp_path)["piqa"] == examples


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"goal": "x"}\n',
            r"malformed example of piqa: KeyError: 'sol1' .*a\.jsonl:1 — correct or remove it",
        ),
        (
            "a.jsonl",
            json.dumps(PIQA_ROWS[0]) + "\n\n{oops\n",
            r"malformed example of piqa: JSONDecodeError: .*a\.jsonl:3 — correct or remove it",
        ),
        (
            "a.jsonl",
            json.dumps(PIQA_ROWS[0]) + "\n[1]\n",
            r"malformed example of piqa: TypeError.* — .*a\.jsonl:2",
        ),
        ("a.jsonl", "", "no examples of piqa — .*a.jsonl"),
        (
            "a.jsonl",
            '{"goal": "half \\ud800", "sol1": "a", "sol2": "b", "label": 0}\n',
            r"surrogates.*a\.jsonl:1",
        ),
        ("a.parquet", "PAR1", r"cannot read: .*a\.parquet"),
        ("a.csv", "goal,sol1", r"malformed example of piqa: JSONDecodeError: .*a\.csv:1"),
    ],
)
def test_malformed_file_is_a_one_line_error(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(MegatokenError, match=message) as error:
        read_examples(PIQA, tmp_path / name)
    assert error.value.code == ExitCode.DATA
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MegatokenError, match=r"no such file — .*nowhere"):
        read_examples(PIQA, tmp_path / "nowhere.jsonl")
    with pytest.raises(MegatokenError, match=r"no such file — .*/piqa\.jsonl"):
        read_examples(PIQA, tmp_path)


def test_one_file_cannot_be_two_tasks(tmp_path: Path) -> None:
    with pytest.raises(
        MegatokenError,
        match=r"one file cannot be 2 tasks.*give a folder with piqa\.jsonl, lambada\.jsonl",
    ):
        read_examples(BOTH, write_rows(tmp_path, "piqa.jsonl"))


def test_hub_needs_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # import fails as if it were not installed
    with pytest.raises(
        MegatokenError,
        match=r"reading baber/piqa from the hub needs `datasets` — piqa — pip install",
    ):
        read_examples(PIQA, None)


def test_unreachable_hub_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        MegatokenError,
        match="cannot get baber/piqa from the Hugging Face hub: ConnectionError — piqa — give a",
    ):
        read_examples(PIQA, None)
