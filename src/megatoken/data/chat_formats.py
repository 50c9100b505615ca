"""Rows to conversations, preferences and prompts; a row's keys say which program's format it is.

| keys | what | source |
|---|---|---|
| messages | a conversation | OpenAI, trl |
| conversations | a conversation (ShareGPT) | LLaMA-Factory, axolotl |
| instruction, output; perhaps input, system, history | a conversation (alpaca) | Taori et al. 2023, LLaMA-Factory |
| prompt, completion | a conversation | trl |
| prompt, chosen, rejected | a preference | trl |
| prompt, answer | a prompt with its answer | GSM8K, verl |

A prompt or an answer of these is text, or a list of messages. A row has the keys of one format; beside a preference
`messages` may stand, the chosen conversation once more, as in UltraFeedback (Tunstall et al. 2023).
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

from megatoken.data.chat_template import Message, parse_messages
from megatoken.data.documents import FIX_ROW
from megatoken.data.sources import ROW_FORMATS, Source
from megatoken.data.text_files import read_rows
from megatoken.errors import DataError

Kind = Literal["chat", "preference", "prompt"]
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
PEEKED_ROWS = 1000  # searched for one that shows the format
_KTO_LABELS = ("label", "kto_tag")  # trl's, LLaMA-Factory's


@dataclass(frozen=True, slots=True)
class Example:
    """A row. where: file:line. prompt: the messages before the answers, of a chat those before its first one.

    answers: whole conversations: of a chat one, of a preference the chosen and the rejected one, of a prompt none.
    row: the row of a prompt, its `answer` among the rest.
    """

    where: str
    prompt: list[Message]
    answers: list[list[Message]] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)


class Format(NamedTuple):
    """A format by the keys that every row has."""

    name: str
    keys: tuple[str, ...]
    kind: Kind
    read: Callable[[dict[str, Any], str], Example]


def detect_format(row: Any) -> Format | None:
    """The format of a row of JSON; None for a row of none."""
    return next(
        (each for each in FORMATS if isinstance(row, dict) and row.keys() >= set(each.keys)), None
    )


def peek_format(source: Source, text_key: str) -> Format | None:
    """Return the format of a corpus by its first row; None for text, also in rows under `text_key`.

    Raises DataError for a prompt without an answer, and for rows of conversations next to files of text.
    """
    row_files = tuple(file for file in source.files if file.format in ROW_FORMATS.values())
    row_format = _peek_row(replace(source, files=row_files), text_key)
    if row_format and (others := [file for file in source.files if file not in row_files]):
        fix = "name the rows alone, such as 'FOLDER/*.jsonl'"
        raise DataError(
            f"{row_format.name} in {row_files[0].name}, text next to them", others[0].path, fix
        )
    return row_format


def _peek_row(source: Source, text_key: str) -> Format | None:
    for where, line in islice(read_rows(source), PEEKED_ROWS):
        try:
            row = json.loads(line.decode(errors="replace"))  # invalid UTF-8 is an error of its row
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and text_key in row:
            return None
        _refuse_prompt_alone(row, where)
        if row_format := detect_format(row):
            return row_format
    return None


def _refuse_prompt_alone(row: Any, where: str) -> None:
    if isinstance(row, dict) and "prompt" in row and detect_format(row) is None:
        fix = "give each row an `answer`, a `completion`, or `chosen` and `rejected`"
        raise DataError("no answer beside the prompt", where, fix)


def _refuse_two_formats(row: Any, where: str) -> None:
    names = [
        each.name for each in FORMATS if isinstance(row, dict) and row.keys() >= set(each.keys)
    ]
    if len(names) > 1 and names != ["prompt/chosen/rejected", "messages"]:
        raise DataError(
            f"a row of two formats, {names[0]} and {names[1]}", where, "leave out the keys of one"
        )


def read_examples(source: Source) -> Iterator[tuple[Format, Example]]:
    """Yield every row of a corpus. Raises DataError, naming file:line, for a row that cannot be used."""
    first: Format | None = None
    for where, line in read_rows(source):
        first, example = parse_row(line, where, first)
        yield first, example


def parse_row(line: bytes, where: str, expected: Format | None) -> tuple[Format, Example]:
    """Return the format and the content of a row. Raises DataError unless it has the expected format, if any."""
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a row of JSON: {error!s:.100}", where, FIX_ROW) from error
    row_format = detect_format(row)
    _refuse_prompt_alone(row, where)
    _refuse_two_formats(row, where)
    if row_format is None:
        keys = ", ".join(list(row)[:8]) if isinstance(row, dict) else type(row).__name__
        known = "; ".join(" + ".join(each.keys) for each in FORMATS)
        raise DataError(
            f"a row of no known format, its keys are {keys or 'none'}", where, f"formats: {known}"
        )
    if expected not in (None, row_format):
        what = f"two formats in one dataset: {row_format.name} here, {expected.name} before"
        raise DataError(what, where, "prepare them as two datasets")
    if any(
        str(row.get(key)).lower() in ("true", "false", "0", "1") for key in _KTO_LABELS
    ):  # CSV has text alone
        what = "a row for KTO, whose label says whether the answer is good: no objective trains on those"
        raise DataError(
            what,
            where,
            "keep the good answers and leave out the label, or pair good with bad for DPO",
        )
    return row_format, row_format.read(row, where)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _to_rows(value: Any, role: str) -> list[Any]:
    """Text as one message of `role`; a list of messages as it is."""
    return list(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _read_messages(row: dict[str, Any], where: str) -> Example:
    return _make_chat(row["messages"], where)


def _read_sharegpt(row: dict[str, Any], where: str) -> Example:
    turns = row["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(
            "conversations is no list of turns", where, 'write {"from": ..., "value": ...} for each'
        )
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    rows = []
    for turn in turns:
        role = turn.get("from", turn.get("role"))
        role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        rows.append({**turn, "role": role, "content": turn.get("value", turn.get("content"))})
    return _make_chat(system + rows, where)


def _read_alpaca(row: dict[str, Any], where: str) -> Example:
    rows = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for turn in row.get("history") or ():
        if not isinstance(turn, list) or len(turn) != 2:
            raise DataError(
                "a turn of history is no pair", where, "write [instruction, output] for each"
            )
        rows += [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
    question = row["instruction"]
    if isinstance(question, str) and isinstance(row.get("input"), str) and row["input"].strip():
        question += "\n\n" + row["input"]
    rows += [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return _make_chat(rows, where)


def _read_completion(row: dict[str, Any], where: str) -> Example:
    return _make_chat(
        _to_rows(row["prompt"], "user") + _to_rows(row["completion"], "assistant"), where
    )


def _make_chat(rows: Any, where: str) -> Example:
    messages = parse_messages(rows, where)
    end = next(number for number, message in enumerate(messages) if message.role == "assistant")
    return Example(where, messages[:end], [messages])


def _read_preference(row: dict[str, Any], where: str) -> Example:
    prompt = _to_rows(row["prompt"], "user")
    answers = []
    for key in ("chosen", "rejected"):
        rows = _to_rows(row[key], "assistant")
        whole = rows if rows[: len(prompt)] == prompt else prompt + rows  # trl has both
        answers.append(parse_messages(whole, f"{where}, {key}"))
        if answers[-1][-1].role != "assistant":
            raise DataError(
                f"{key} does not end with the assistant's answer", where, "leave the pair out"
            )
    return Example(where, parse_messages(prompt, f"{where}, prompt", reply=True), answers)


def _read_prompt(row: dict[str, Any], where: str) -> Example:
    answer = row["answer"]
    is_number = (
        isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    )
    if not is_number and not (isinstance(answer, str) and answer.strip()):
        raise DataError(
            "no answer beside the prompt", where, "give each row an `answer`, text or a number"
        )
    return Example(
        where, parse_messages(_to_rows(row["prompt"], "user"), where, reply=True), row=row
    )


FORMATS = (
    Format(
        "prompt/chosen/rejected", ("prompt", "chosen", "rejected"), "preference", _read_preference
    ),
    Format("prompt/completion", ("prompt", "completion"), "chat", _read_completion),
    Format("prompt/answer", ("prompt", "answer"), "prompt", _read_prompt),
    Format("messages", ("messages",), "chat", _read_messages),
    Format("conversations (ShareGPT)", ("conversations",), "chat", _read_sharegpt),
    Format("instruction/output (alpaca)", ("instruction", "output"), "chat", _read_alpaca),
)
