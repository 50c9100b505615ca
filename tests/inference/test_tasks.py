"""Prompts equal lm-evaluation-harness 0.4.13's (benchmarks/harness_race.py), files of examples."""

import json
import sys
from pathlib import Path

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from megatoken.base.errors import DataError
from megatoken.inference.tasks import Example, find_tasks, read_examples

ROWS = yaml.safe_load("""
hellaswag:
  activity_label: "Roof shingle  removal"
  ctx_a: "A man [header] sits [title] on  a   roof."
  ctx_b: "he Looks"
  ctx: "A man [header] sits [title] on  a   roof. he Looks"
  endings: [" is using [substeps] wrap.", "is ripping [title] tiles", "é [x", "starts  up "]
  label: "3"
arc_easy:
  question: "Which gas?"
  choices: {text: ["oxygen", "neon ", "iron"], label: ["1", "2", "3"]}
  answerKey: "2"
openbookqa:
  question_stem: "The sun is responsible for"
  choices: {text: ["puppies", "plants", "ice", "war"], label: ["A", "B", "C", "D"]}
  answerKey: " B"
piqa: {goal: "Open a jar", sol1: "Twist the lid.", sol2: "Twist the jar, lid off.", label: 0}
winogrande:
  sentence: "The trophy did not fit the case as _ was too big."
  option1: "the trophy"
  option2: "the case"
  answer: "1"
lambada: {text: 'he said, "go home"  and went'}
""")
HELLASWAG = "Roof shingle removal: A man sits. on a  roof. He looks"


# Context, choices, the right one, and their lengths in characters.
PROMPTS = yaml.safe_load(f"""
hellaswag: ["{HELLASWAG}", " is using wrap.| is ripping. tiles| é [x| starts up", 3, 14 17 4 9]
arc_easy: ["Question: Which gas?\\nAnswer:", " oxygen| neon | iron", 1, 6 5 4]
openbookqa: [The sun is responsible for, " puppies| plants| ice| war", 1, 7 6 3 3]
piqa: ["Question: Open a jar\\nAnswer:", " Twist the lid.| Twist the jar, lid off.", 0, 14 23]
lambada: ['he said, "go home"  and', " went", 0, ""]
""")


@pytest.mark.parametrize("task", PROMPTS)
def test_prompts_equal_the_harness(task: str):
    context, choices, gold, lengths = PROMPTS[task]
    example = find_tasks(task)[0].parse(ROWS[task])
    assert example.prompts == tuple((context, choice) for choice in choices.split("|"))
    assert (example.gold, example.lengths) == (gold, tuple(map(int, lengths.split())))
    endings = ROWS[task].get("endings", ())
    assert example.raw_prompts == tuple((ROWS[task]["ctx"], f" {ending}") for ending in endings)


def test_winogrande_has_a_context_for_each_choice():
    contexts = [f"The trophy did not fit the case as the {word}" for word in ("trophy", "case")]
    prompts = tuple((context, " was too big.") for context in contexts)
    assert find_tasks("winogrande")[0].parse(ROWS["winogrande"]) == Example(prompts=prompts, gold=0)


def test_hellaswag_row_without_ctx_a_uses_ctx():
    row = {"activity_label": "Roof", "ctx": "A man sits.", "endings": ["a", "b"], "label": 1}
    example = find_tasks("hellaswag")[0].parse(row)
    assert example.prompts[0] == ("Roof: A man sits.", " a")
    assert example.raw_prompts[1] == ("A man sits.", " b")


MALFORMED = """\
hellaswag {"label": "4"}
hellaswag {"label": ""}
arc_easy {"answerKey": "D"}
piqa {"label": -1}
winogrande {"sentence": "no gap"}
winogrande {"answer": "3"}
lambada {"text": "word"}
"""


@pytest.mark.parametrize("line", MALFORMED.splitlines())
def test_malformed_row(line: str):
    task, change = line.split(maxsplit=1)
    with pytest.raises(ValueError):
        find_tasks(task)[0].parse(ROWS[task] | json.loads(change))


PIQA_ROWS = [{"goal": f"goal {n}", "sol1": "a", "sol2": "b", "label": n % 2} for n in range(5)]
PIQA = find_tasks("piqa")


def write_rows(path: Path) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(PIQA_ROWS), path)
    else:
        path.write_text("\n".join(map(json.dumps, PIQA_ROWS)) + "\n\n")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_file_formats_give_the_same_examples(tmp_path: Path, suffix: str):
    path = write_rows(tmp_path / f"piqa{suffix}")
    examples = read_examples(PIQA, path)["piqa"]
    assert [(example.prompts[0][0], example.gold) for example in examples] == [
        (f"Question: goal {n}\nAnswer:", n % 2) for n in range(5)
    ]
    assert read_examples(PIQA, path, 2)["piqa"] == examples[:2]
    assert read_examples(PIQA, tmp_path)["piqa"] == examples


ROW = json.dumps(PIQA_ROWS[0])


MALFORMED_FILES = {
    "a.jsonl:1": '{"goal": "x"}',
    "a.jsonl:3": f"{ROW}\n\n{{oops",
    "a.jsonl:2": f"{ROW}\n[1]",
    "a.jsonl": "",
    "a.parquet": "PAR1",
    "a.csv:1": "goal,sol1",
}


@pytest.mark.parametrize("where", MALFORMED_FILES)
def test_malformed_file(tmp_path: Path, where: str):
    path = tmp_path / where.partition(":")[0]
    path.write_text(MALFORMED_FILES[where])
    with pytest.raises(DataError, match=where):
        read_examples(PIQA, path)


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    with pytest.raises(DataError, match="baber/piqa"):
        read_examples(PIQA, None)
