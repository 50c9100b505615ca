"""The table of tasks: how a row of each becomes contexts, choices and the right one, as lm-evaluation-harness does it.

In: rows as their authors publish them. Out: Examples, plain text. Absent: reading files (rows.py), tokens, scores.
Source: the YAML files and functions of lm_eval/tasks, version 0.4.13; an answer follows its context after one space.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatoken.errors import Exit, Fault

Row = Mapping[str, Any]
Prompt = tuple[str, str]  # a context, and the text whose probability after it is asked for


@dataclass(frozen=True, slots=True)
class Example:
    """One question. prompts: one a choice; gold: the index of the right one.

    lengths: characters of every choice, by which acc_norm divides; empty where the harness reports no acc_norm.
    raw: what build-nanogpt and llm.c score instead of `prompts`, context and choice tokenized apart; empty: the same.
    place: where it was read.
    """

    prompts: tuple[Prompt, ...]
    gold: int
    lengths: tuple[int, ...] = ()
    raw: tuple[Prompt, ...] = ()
    place: str = "an example"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A row of the table. read: a row to an Example, ValueError when it is malformed; hub, config, split: its home.

    cloze: there is one choice, and what counts is whether the model would write it word for word.
    """

    name: str
    read: Callable[[Row], Example]
    hub: str
    config: str | None = None
    split: str
    cloze: bool = False


def read_hellaswag(row: Row) -> Example:
    """Zellers et al. 2019. Rows without ctx_a and ctx_b have the harness's own preparation of them as `ctx`."""
    endings = _texts(row, "endings")
    if "ctx_a" in row:
        first, second = _text(row, "ctx_a"), _text(row, "ctx_b")
        context = f"{first} {second.capitalize()}"
        raw = _text(row, "ctx") if "ctx" in row else f"{first} {second}" if second else first
    else:
        context = raw = _text(row, "ctx")
    query = _tidy(f"{_text(row, 'activity_label')}: {context}")
    choices = [_tidy(ending) for ending in endings]
    return Example(
        prompts=tuple((query, f" {choice}") for choice in choices),
        gold=_index(row, "label", len(choices)),
        lengths=tuple(map(len, choices)),
        raw=tuple((raw, f" {ending}") for ending in endings),
    )


def _tidy(text: str) -> str:
    """Without what WikiHow left in HellaSwag's texts."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def read_arc(row: Row) -> Example:
    """Clark et al. 2018, both parts."""
    return _ask(f"Question: {_text(row, 'question')}\nAnswer:", *_lettered(row))


def read_openbookqa(row: Row) -> Example:
    """Mihaylov et al. 2018."""
    return _ask(_text(row, "question_stem"), *_lettered(row))


def read_piqa(row: Row) -> Example:
    """Bisk et al. 2020."""
    query = f"Question: {_text(row, 'goal')}\nAnswer:"
    return _ask(query, [_filled(row, "sol1"), _filled(row, "sol2")], _index(row, "label", 2))


def read_winogrande(row: Row) -> Example:
    """Sakaguchi et al. 2020: the choices stand in the context, what follows them is the same."""
    before, gap, after = _text(row, "sentence").partition("_")
    if not gap or not after.strip():
        raise ValueError("'sentence' has no gap '_' with text behind it")
    answer = _text(row, "answer")
    if answer not in ("1", "2"):
        raise ValueError(f"'answer' is {answer!r}, not '1' or '2'")
    options = _filled(row, "option1"), _filled(row, "option2")
    return Example(prompts=tuple((before + option, f" {after.strip()}") for option in options), gold=int(answer) - 1)


def read_lambada(row: Row) -> Example:
    """Paperno et al. 2016, in OpenAI's version: the last word after all others."""
    context, _, word = _text(row, "text").rpartition(" ")
    if not word.strip():
        raise ValueError("'text' does not end with a word")
    return Example(prompts=((context, f" {word}"),), gold=0)


def _ask(query: str, choices: list[str], gold: int) -> Example:
    return Example(
        prompts=tuple((query, f" {choice}") for choice in choices), gold=gold, lengths=tuple(map(len, choices))
    )


def _lettered(row: Row) -> tuple[list[str], int]:
    """Choices with labels such as A to E, and the index of the one that answerKey names."""
    choices = row.get("choices")
    if not isinstance(choices, Mapping):
        raise ValueError("'choices' is not an object with 'text' and 'label'")
    texts, labels, key = _texts(choices, "text"), _texts(choices, "label"), _text(row, "answerKey").lstrip()
    if len(texts) != len(labels) or key not in labels:
        raise ValueError(f"'answerKey' {key!r} is none of the labels {labels} of {len(texts)} choices")
    return texts, labels.index(key)


def _text(row: Row, key: str) -> str:
    if key not in row:
        raise ValueError(f"no key {key!r} (it has: {', '.join(sorted(map(str, row))) or 'none'})")
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {value!r:.40}, not a string")
    value.encode()  # half a surrogate pair is no text: a ValueError, too
    return value


def _filled(row: Row, key: str) -> str:
    value = _text(row, key)
    if not value.strip():
        raise ValueError(f"{key!r} is empty")
    return value


def _texts(row: Row, key: str) -> list[str]:
    value = row.get(key)
    if not isinstance(value, list | tuple) or len(value) < 2 or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{key!r} is {value!r:.40}, not a list of at least two strings")
    if not all(map(str.strip, value)):
        raise ValueError(f"string {[bool(item.strip()) for item in value].index(False) + 1} of {key!r} is empty")
    "".join(value).encode()
    return list(value)


def _index(row: Row, key: str, count: int) -> int:
    """A choice's number, which some files write as a string."""
    value = row.get(key)
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
        raise ValueError(f"{key!r} is {value!r:.40}, not one of 0 to {count - 1}")
    return number


TASKS = {
    task.name: task
    for task in (
        Task(name="hellaswag", read=read_hellaswag, hub="Rowan/hellaswag", split="validation"),
        Task(name="arc_easy", read=read_arc, hub="allenai/ai2_arc", config="ARC-Easy", split="test"),
        Task(name="arc_challenge", read=read_arc, hub="allenai/ai2_arc", config="ARC-Challenge", split="test"),
        Task(name="piqa", read=read_piqa, hub="baber/piqa", split="validation"),
        Task(
            name="winogrande",
            read=read_winogrande,
            hub="allenai/winogrande",
            config="winogrande_xl",
            split="validation",
        ),
        Task(name="openbookqa", read=read_openbookqa, hub="allenai/openbookqa", config="main", split="test"),
        Task(
            name="lambada",
            read=read_lambada,
            hub="EleutherAI/lambada_openai",
            config="default",
            split="test",
            cloze=True,
        ),
    )
}


def find_tasks(names: str) -> list[Task]:
    """The tasks that a list such as `hellaswag,piqa` names. Raises Fault(CONFIG) with the nearest names."""
    found = []
    for name in dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))):
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, 1, 0.5)
            fix = f"did you mean {near[0]}?" if near else f"choose among {', '.join(TASKS)}"
            raise Fault(Exit.CONFIG, f"unknown task {name!r}", "tasks", f"{fix} (any other task: --harness)")
        found.append(TASKS[name])
    if not found:
        raise Fault(Exit.CONFIG, "no task named", "tasks", f"choose among {', '.join(TASKS)}")
    return found
