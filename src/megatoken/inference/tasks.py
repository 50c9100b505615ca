"""Multiple-choice tasks: where their rows come from, and how a row becomes prompts.

They are entries of the kind "task". Prompts are the same as in lm_eval/tasks 0.4.13, with one space
between context and choice.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatoken.base.errors import ConfigError, DataError, install_extras
from megatoken.base.rooms import list_entries, load_entry
from megatoken.base.suggest import suggest
from megatoken.base.system.atomic_write import MALFORMED
from megatoken.base.system.metrics_log import Row

Prompt = tuple[str, str]  # context, continuation

# Each score is the share of examples whose result has the right choice in this attribute.
SCORES = {"acc": "pred", "acc_norm": "pred_norm", "acc_token_mean": "pred_token_mean"}
CORE = "core"  # --tasks core: the 22 tasks of DCLM's CORE (inference/dclm_core.py)
GIVE_FILE = "give a local file with --data FILE (.jsonl or .parquet)"


@dataclass(frozen=True)
class Example:
    """One prompt per choice, and the index of the correct choice. A single choice is a cloze.

    lengths: characters per choice, for acc_norm; empty if lm-evaluation-harness has no acc_norm for
    the task. raw_prompts: prompts for acc_token_mean, made from the text as published; empty if
    equal to `prompts`. where: file and line, for error messages.
    """

    prompts: tuple[Prompt, ...]
    gold: int
    lengths: tuple[int, ...] = ()
    raw_prompts: tuple[Prompt, ...] = ()
    where: str = "an example"


def parse_hellaswag(row: Row) -> Example:
    """Parse a row of HellaSwag (Zellers et al. 2019).

    If the row has no ctx_a, its `ctx` must be the context as cleaned by lm-evaluation-harness.
    """

    def clean(text: str) -> str:
        """Remove the markup of WikiHow."""
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = row["ctx"]
    raw_prompts = tuple((context, f" {ending}") for ending in row["endings"])
    if "ctx_a" in row:
        context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    context = clean(f"{row['activity_label']}: {context}")
    return _example(
        context, [clean(ending) for ending in row["endings"]], row["label"], raw_prompts
    )


def parse_lettered(
    row: Row, *, key: str = "question", template: str = "Question: {}\nAnswer:"
) -> Example:
    """Parse a row whose choices are labeled A, B, ...

    Such tasks are ARC (Clark et al. 2018) and OpenBookQA (Mihaylov et al. 2018).
    """
    gold = row["choices"]["label"].index(row["answerKey"].lstrip())
    return _example(template.format(row[key]), row["choices"]["text"], gold)


def parse_piqa(row: Row) -> Example:
    """Parse a row of PIQA (Bisk et al. 2020)."""
    context = f"Question: {row['goal']}\nAnswer:"
    return _example(context, [row["sol1"], row["sol2"]], row["label"])


def parse_winogrande(row: Row) -> Example:
    """Parse a row of WinoGrande (Sakaguchi et al. 2020).

    Each context ends with one of the two options; the continuation is the same.
    """
    context, continuation = row["sentence"].split("_", 1)
    options = row["option1"], row["option2"]
    prompts = tuple((context + option, f" {continuation.strip()}") for option in options)
    return Example(prompts, gold=["1", "2"].index(row["answer"]))


def parse_lambada(row: Row) -> Example:
    """Parse a row of OpenAI's LAMBADA (Paperno et al. 2016); the last word is the continuation."""
    context, word = row["text"].rsplit(" ", 1)
    return Example(((context, f" {word}"),), gold=0)


def _example(
    context: str, choices: list[str], gold: str | int, raw_prompts: tuple[Prompt, ...] = ()
) -> Example:
    """Build an example from a context and its choices.

    gold: the index of the correct choice, which some files store as a string.
    """
    if int(gold) not in range(len(choices)):
        raise ValueError(f"label {gold!r} of {len(choices)} choices")
    prompts = tuple((context, f" {choice}") for choice in choices)
    return Example(prompts, int(gold), tuple(map(len, choices)), raw_prompts)


class Task(NamedTuple):
    """A task and its dataset on the Hugging Face hub.

    parse: may raise any of MALFORMED for a bad row.
    """

    name: str
    parse: Callable[[Row], Example]
    hub: str
    config: str | None
    split: str


HELLASWAG = Task("hellaswag", parse_hellaswag, "Rowan/hellaswag", None, "validation")
ARC_EASY = Task("arc_easy", parse_lettered, "allenai/ai2_arc", "ARC-Easy", "test")
ARC_CHALLENGE = Task("arc_challenge", parse_lettered, "allenai/ai2_arc", "ARC-Challenge", "test")
PIQA = Task("piqa", parse_piqa, "baber/piqa", None, "validation")
WINOGRANDE = Task(
    "winogrande", parse_winogrande, "allenai/winogrande", "winogrande_xl", "validation"
)
OPENBOOKQA = Task(
    "openbookqa",
    partial(parse_lettered, key="question_stem", template="{}"),
    "allenai/openbookqa",
    "main",
    "test",
)
LAMBADA = Task("lambada", parse_lambada, "EleutherAI/lambada_openai", "default", "test")


def find_tasks(names: str | Sequence[str]) -> list[Task]:
    """Return the tasks with these names, given as a list or as text such as "hellaswag,piqa".

    Raises ConfigError for an unknown name.
    """
    if isinstance(names, str):
        names = names.split(",")
    known = list_entries("task")
    tasks = {}
    for name in map(str.strip, names):
        if name not in known:
            near = suggest(name, known)
            fix = f"did you mean {near}?" if near else f"choose among {', '.join(known)}"
            fix += f" ({CORE} alone; any other task: --harness)"
            raise ConfigError(f"unknown task {name!r}", "tasks", fix)
        tasks[name] = load_entry("task", name)
    return list(tasks.values())


def read_examples(
    tasks: Sequence[Task], data: Path | None, limit: int = 0
) -> dict[str, list[Example]]:
    """Return the first `limit` examples (0 for all) of each task, by task name, in file order.

    data: the file of a single task (.jsonl or .parquet), a folder with a file named after each
    task, or None for the dataset on the Hugging Face hub. Raises ConfigError if one file is given
    for several tasks, and DataError, naming file and line, for missing or malformed examples.
    """
    if len(tasks) > 1 and data and data.is_file():
        fix = f"give a folder with {', '.join(f'{task.name}.jsonl' for task in tasks)}"
        raise ConfigError(f"one file cannot be {len(tasks)} tasks", data, fix)
    examples: dict[str, list[Example]] = {}
    for task in tasks:
        rows = _read_file(task, data) if data else _read_hub(task)
        examples[task.name] = [
            _parse(task, row, where) for where, row in itertools.islice(rows, limit or None)
        ]
        if not examples[task.name]:
            raise DataError(f"no examples of {task.name}", data or task.hub, GIVE_FILE)
    return examples


def _parse(task: Task, row: bytes | Row, where: str) -> Example:
    try:
        example = task.parse(json.loads(row) if isinstance(row, bytes) else row)
    except MALFORMED as error:
        what = f"malformed example of {task.name}: {type(error).__name__}: {error}"
        raise DataError(what, where, f"use the columns of {task.hub} on the hub") from None
    return dataclasses.replace(example, where=where)


def _read_file(task: Task, data: Path) -> Iterator[tuple[str, bytes | Row]]:
    """Yield (file:line, row) for each row; a row is a line of JSON or, from parquet, a dict."""
    path = data
    if data.is_dir():
        path = data / f"{task.name}.parquet"
        if not path.is_file():
            path = path.with_suffix(".jsonl")
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
        else:
            rows = path.read_bytes().splitlines()
    except (ImportError, OSError, ValueError) as error:
        raise DataError(f"cannot read: {error}", path, GIVE_FILE) from error
    yield from ((f"{path}:{number}", row) for number, row in enumerate(rows, start=1) if row)


def _read_hub(task: Task) -> Iterator[tuple[str, Row]]:
    try:
        from datasets import load_dataset

        rows = load_dataset(task.hub, task.config, split=task.split)
    except Exception as error:  # the hub, its cache and the network raise many types
        what = f"cannot load {task.hub} from the Hugging Face hub: {type(error).__name__}: {error}"
        fix = f"{install_extras('eval')}, or {GIVE_FILE}"
        raise DataError(what, task.name, fix) from error
    for number, row in enumerate(rows, start=1):
        yield f"{task.hub} {task.split}, row {number}", dict(row)
