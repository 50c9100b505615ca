"""The built-in multiple-choice tasks: where their examples come from, and the prompts that a row becomes.

Prompts are those of the YAML files and functions of lm_eval/tasks 0.4.13: a choice follows its context after one space.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatoken.errors import ConfigError, DataError
from megatoken.suggest import suggest
from megatoken.system.atomic_write import MALFORMED

Row = Mapping[str, Any]
Prompt = tuple[str, str]  # context, continuation

# Scores of a task, and which prediction of an example each is the share of.
SCORES = {"acc": "pred", "acc_norm": "pred_norm", "acc_token_mean": "pred_token_mean"}
GIVE_FILE = "give a local file with --data FILE (.jsonl or .parquet)"


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt per choice, and the index of the correct choice; with a single choice, a cloze.

    lengths: characters per choice, the divisors of acc_norm; empty where the harness has no acc_norm.
    raw_prompts: the text as published, for acc_token_mean; empty where it is `prompts`.
    where: file and line, for error messages.
    """

    prompts: tuple[Prompt, ...]
    gold: int
    lengths: tuple[int, ...] = ()
    raw_prompts: tuple[Prompt, ...] = ()
    where: str = "an example"


def parse_hellaswag(row: Row) -> Example:
    """Zellers et al. 2019. A row without ctx_a and ctx_b has the harness's joined and cleaned context in `ctx`."""

    def clean(text: str) -> str:  # of WikiHow's markup
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    if "ctx_a" in row:
        first, second = _text(row, "ctx_a"), _text(row, "ctx_b")
        context = f"{first} {second.capitalize()}"
        raw = _text(row, "ctx") if "ctx" in row else f"{first} {second}" if second else first
    else:
        context = raw = _text(row, "ctx")
    choices = _choices(row["endings"])
    raw_prompts = tuple((raw, f" {choice}") for choice in choices)
    context = clean(f"{_text(row, 'activity_label')}: {context}")
    return _example(context, list(map(clean, choices)), row["label"], raw_prompts)


def parse_lettered(
    row: Row, *, key: str = "question", template: str = "Question: {}\nAnswer:"
) -> Example:
    """ARC (Clark et al. 2018), OpenBookQA (Mihaylov et al. 2018): choices with labels A, B, ...; answerKey is one."""
    answer = row["choices"]["label"].index(_text(row, "answerKey").lstrip())
    return _example(template.format(_text(row, key)), _choices(row["choices"]["text"]), answer)


def parse_piqa(row: Row) -> Example:
    """Bisk et al. 2020."""
    return _example(
        f"Question: {_text(row, 'goal')}\nAnswer:",
        _choices([row["sol1"], row["sol2"]]),
        row["label"],
    )


def parse_winogrande(row: Row) -> Example:
    """Sakaguchi et al. 2020: the choices are in the context, the scored continuation is the same."""
    before, _, after = _text(row, "sentence").partition("_")
    if not after.strip():
        raise ValueError("'sentence' has no gap '_' with text behind it")
    options = _choices([row["option1"], row["option2"]])
    prompts = tuple((before + option, f" {after.strip()}") for option in options)
    return Example(prompts, gold=["1", "2"].index(row["answer"]))


def parse_lambada(row: Row) -> Example:
    """Paperno et al. 2016, OpenAI's version: the last word after all others."""
    context, _, word = _text(row, "text").rpartition(" ")
    if not word.strip():
        raise ValueError("'text' does not end with a word")
    return Example(((context, f" {word}"),), gold=0)


def _example(
    context: str, choices: list[str], gold: str | int, raw_prompts: tuple[Prompt, ...] = ()
) -> Example:
    """gold: the number of a choice, a string in some files."""
    if int(gold) not in range(len(choices)):
        raise ValueError(f"'label' is {gold!r}, not one of 0 to {len(choices) - 1}")
    prompts = tuple((context, f" {choice}") for choice in choices)
    return Example(prompts, int(gold), tuple(map(len, choices)), raw_prompts)


def _text(row: Row, key: str) -> str:
    if not isinstance(row[key], str):
        raise TypeError(f"{key!r} is {row[key]!r:.40}, not a string")
    return str(row[key])


def _choices(texts: Any) -> list[str]:
    has_text = isinstance(texts, list) and all(
        isinstance(text, str) and text.strip() for text in texts
    )
    if not has_text or len(texts) < 2:
        raise TypeError(f"choices are {texts!r:.80}, not at least two strings with text")
    return list(texts)


class Task(NamedTuple):
    """A task and its dataset on the Hugging Face hub. `parse` raises KeyError, TypeError, ValueError for a bad row."""

    name: str
    parse: Callable[[Row], Example]
    hub: str
    config: str | None
    split: str


parse_openbookqa = partial(parse_lettered, key="question_stem", template="{}")
TASKS = {
    task.name: task
    for task in (
        Task("hellaswag", parse_hellaswag, "Rowan/hellaswag", None, "validation"),
        Task("arc_easy", parse_lettered, "allenai/ai2_arc", "ARC-Easy", "test"),
        Task("arc_challenge", parse_lettered, "allenai/ai2_arc", "ARC-Challenge", "test"),
        Task("piqa", parse_piqa, "baber/piqa", None, "validation"),
        Task("winogrande", parse_winogrande, "allenai/winogrande", "winogrande_xl", "validation"),
        Task("openbookqa", parse_openbookqa, "allenai/openbookqa", "main", "test"),
        Task("lambada", parse_lambada, "EleutherAI/lambada_openai", "default", "test"),
    )
}


def find_tasks(names: str | Sequence[str]) -> list[Task]:
    """Tasks by name, from a list or a string such as `hellaswag,piqa`. Raises ConfigError with the nearest name."""
    names = names.split(",") if isinstance(names, str) else names
    names = [name for name in dict.fromkeys(map(str.strip, names)) if name]
    for name in names or [""]:
        if name not in TASKS:
            near = suggest(name, TASKS)
            fix = f"did you mean {near}?" if near else f"choose among {', '.join(TASKS)}"
            raise ConfigError(
                f"unknown task {name!r}", "tasks", f"{fix} (any other task: --harness)"
            )
    return [TASKS[name] for name in names]


def read_examples(
    tasks: Sequence[Task], data: Path | None, limit: int = 0
) -> dict[str, list[Example]]:
    """The first `limit` examples of each task (0: all), by task name, in the order of the file.

    data: the file of a single task (.jsonl or .parquet), or a folder with a file named after each task; None: the
    dataset that lm-evaluation-harness reads from the hub, from its cache if it is there. Raises ConfigError for one
    file and several tasks, DataError with file and line for missing or malformed examples.
    """
    if len(tasks) > 1 and data and data.is_file():
        fix = f"give a folder with {', '.join(f'{task.name}.jsonl' for task in tasks)}"
        raise ConfigError(f"one file cannot be {len(tasks)} tasks", str(data), fix)
    examples: dict[str, list[Example]] = {task.name: [] for task in tasks}
    for task in tasks:
        rows = _read_file(task, data) if data else _read_hub(task)
        for where, row in itertools.islice(rows, limit or None):
            try:
                example = task.parse(json.loads(row) if isinstance(row, bytes) else row)
                "".join(
                    map("".join, example.prompts)
                ).encode()  # ValueError for half a surrogate pair
            except MALFORMED as error:
                what = f"malformed example of {task.name}: {type(error).__name__}: {error}"
                fix = (
                    f"correct or remove it; {task.name} needs the columns of {task.hub} on the hub"
                )
                raise DataError(what, where, fix) from None
            examples[task.name].append(dataclasses.replace(example, where=where))
        if not examples[task.name]:
            raise DataError(f"no examples of {task.name}", str(data or task.hub), GIVE_FILE)
    return examples


def _read_file(task: Task, data: Path) -> Iterator[tuple[str, Any]]:
    """(where, row or line of JSON) of every row."""
    files = (
        [data / f"{task.name}.jsonl", data / f"{task.name}.parquet"] if data.is_dir() else [data]
    )
    path = next(filter(Path.is_file, files), None)
    if path is None:
        raise DataError("no such file", str(files[0]), GIVE_FILE)
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
        else:
            rows = path.read_bytes().splitlines()
    except (ImportError, OSError, ValueError) as error:
        fix = 'correct or replace it; .parquet needs pip install "megatoken[data]"'
        raise DataError(f"cannot read: {error}", str(path), fix) from error
    yield from ((f"{path}:{number}", row) for number, row in enumerate(rows, start=1) if row)


def _read_hub(task: Task) -> Iterator[tuple[str, Row]]:
    try:
        from datasets import load_dataset
    except ImportError:
        fix = f'pip install "megatoken[eval]", or {GIVE_FILE}'
        raise ConfigError(
            f"reading {task.hub} from the hub needs `datasets`", task.name, fix
        ) from None
    try:
        rows = load_dataset(task.hub, task.config, split=task.split)
    except Exception as error:  # the hub, its cache and the network raise many types
        what = f"cannot get {task.hub} from the Hugging Face hub: {type(error).__name__}"
        raise DataError(what, task.name, GIVE_FILE) from error
    for number, row in enumerate(rows, start=1):
        yield f"{task.hub} {task.split}, row {number}", dict(row)
