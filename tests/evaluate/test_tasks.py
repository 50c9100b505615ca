"""Rows to questions: the very strings that lm-evaluation-harness 0.4.13 asks (tests/soak/harness_race.py compares)."""

from typing import Any

import pytest

from megatoken.errors import Exit, Fault
from megatoken.evaluate.tasks import TASKS, Example, find_tasks

ROWS: dict[str, dict[str, Any]] = {
    "hellaswag": {
        "activity_label": "Roof shingle  removal",
        "ctx_a": "A man [header] sits [title] on  a   roof.",
        "ctx_b": "he Looks",
        "ctx": "A man [header] sits [title] on  a   roof. he Looks",
        "endings": [" is using [substeps] wrap.", "is ripping [title] tiles", "é [x", "starts  up "],
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
    "piqa": {"goal": "Open a jar", "sol1": "Twist the lid.", "sol2": "Twist the jar, lid off.", "label": 0},
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
                raw=tuple((ROWS["hellaswag"]["ctx"], f" {ending}") for ending in ROWS["hellaswag"]["endings"]),
            ),
        ),
        (
            "arc_easy",
            Example(
                prompts=tuple(("Question: Which gas?\nAnswer:", f" {gas}") for gas in ("oxygen", "neon ", "iron")),
                gold=1,
                lengths=(6, 5, 4),
            ),
        ),
        (
            "openbookqa",
            Example(
                prompts=tuple(("The sun is responsible for", f" {a}") for a in ("puppies", "plants", "ice", "war")),
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
def test_rows_become_what_the_harness_asks(task: str, expected: Example) -> None:
    assert TASKS[task].read(ROWS[task]) == expected


def test_hellaswag_without_its_halves_takes_the_prepared_context() -> None:
    row = {"activity_label": "Roof", "ctx": "A man sits.", "endings": ["a", "b"], "label": 1}
    example = TASKS["hellaswag"].read(row)
    assert example.prompts[0] == ("Roof: A man sits.", " a")
    assert example.raw[1] == ("A man sits.", " b")
    halves = {"activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "", "endings": ["a", "b"], "label": 1}
    assert TASKS["hellaswag"].read(halves).prompts[0] == ("Roof: A man sits.", " a")
    assert TASKS["hellaswag"].read(halves).raw[0][0] == "A man sits."


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("hellaswag", {"endings": "one"}, "'endings' is 'one', not a list"),
        ("hellaswag", {"endings": ["one"]}, "not a list of at least two strings"),
        ("hellaswag", {"endings": ["one", " "]}, "string 2 of 'endings' is empty"),
        ("hellaswag", {"label": "4"}, "'label' is '4', not one of 0 to 3"),
        ("hellaswag", {"label": ""}, "'label' is ''"),
        ("hellaswag", {"ctx_b": None}, "'ctx_b' is None, not a string"),
        ("arc_easy", {"answerKey": "D"}, "'answerKey' 'D' is none of the labels"),
        ("arc_easy", {"choices": ["a", "b"]}, "'choices' is not an object"),
        ("piqa", {"label": -1}, "'label' is -1"),
        ("piqa", {"label": True}, "'label' is True"),
        ("piqa", {"sol1": ""}, "'sol1' is empty"),
        ("piqa", {"sol1": "half \ud800"}, "surrogates"),
        ("winogrande", {"sentence": "no gap"}, "'sentence' has no gap"),
        ("winogrande", {"sentence": "a gap _ "}, "'sentence' has no gap '_' with text behind it"),
        ("winogrande", {"answer": "3"}, "'answer' is '3', not '1' or '2'"),
        ("lambada", {"text": 5}, "'text' is 5, not a string"),
        ("lambada", {"text": "ends in space "}, "does not end with a word"),
    ],
)
def test_malformed_rows_say_what_is_wrong(task: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TASKS[task].read(ROWS[task] | change)


def test_a_missing_key_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match=r"no key 'text' \(it has: word\)"):
        TASKS["lambada"].read({"word": "x"})


def test_tasks_are_found_by_name() -> None:
    assert [task.name for task in find_tasks("piqa, hellaswag")] == ["piqa", "hellaswag"]
    with pytest.raises(Fault, match=r"unknown task 'helaswag' — tasks — did you mean hellaswag\?") as caught:
        find_tasks("piqa,helaswag")
    assert caught.value.code == Exit.CONFIG
    with pytest.raises(Fault, match="choose among hellaswag, arc_easy"):
        find_tasks("xyz")
    with pytest.raises(Fault, match="no task named"):
        find_tasks(" ,")
