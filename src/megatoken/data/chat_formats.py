"""Read rows of conversations, preferences and prompts. A row's keys identify its format.

| keys | kind | source |
|---|---|---|
| messages | conversation | OpenAI, trl |
| conversations | conversation (ShareGPT) | LLaMA-Factory, axolotl |
| instruction, output; optional input, system, history | conversation (alpaca) | Taori et al. 2023, LLaMA-Factory |
| prompt, completion | conversation | trl |
| prompt, chosen, rejected | preference | trl |
| prompt, answer | prompt with its answer | GSM8K, verl |

Prompts and answers are text or a list of messages. A row has the keys of one format, but a
preference can also have `messages`, a copy of the chosen conversation (Tunstall et al. 2023).
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
PEEKED_ROWS = 1000  # searched for one that identifies the format
_KTO_LABELS = ("label", "kto_tag")  # of trl and LLaMA-Factory


@dataclass(frozen=True, slots=True)
class Example:
    """A parsed row.

    where: file:line. prompt: the messages before the first answer. answers: full conversations: one
    of a chat, chosen and rejected of a preference, none of a prompt. row: the row of a prompt.
    """

    where: str
    prompt: list[Message]
    answers: list[list[Message]] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)


class Format(NamedTuple):
    """A row format and the keys that identify it."""

    name: str
    keys: tuple[str, ...]
    kind: Kind
    read: Callable[[dict[str, Any], str], Example]


def peek_format(source: Source, text_key: str) -> Format | None:
    """Return the format of a corpus by its first rows; None for text, which `text_key` can hold.

    Raises DataError for prompts without answers, and for conversations next to files of text.
    """
    row_files = tuple(file for file in source.files if file.format in ROW_FORMATS.values())
    row_format = _peek_rows(replace(source, files=row_files), text_key)
    if row_format and len(row_files) < len(source.files):
        where = row_files[0].path
        raise DataError(f"{row_format.name} next to files of text", where, "name the rows alone")
    return row_format


def _peek_rows(source: Source, text_key: str) -> Format | None:
    prompt_alone = ""
    for where, line in islice(read_rows(source), PEEKED_ROWS):
        try:
            row = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict):
            continue
        if text_key in row:
            return None
        formats = _match_formats(row)
        if formats:
            return formats[0]
        if "prompt" in row:
            prompt_alone = prompt_alone or where
    if prompt_alone:
        raise _missing_answer(prompt_alone)
    return None


def read_examples(source: Source) -> Iterator[tuple[Format, Example]]:
    """Yield every row of a corpus. Raises DataError, naming file:line, for an unusable row."""
    row_format: Format | None = None
    for where, line in read_rows(source):
        row_format, example = parse_row(line, where, row_format)
        yield row_format, example


def parse_row(line: bytes, where: str, expected: Format | None) -> tuple[Format, Example]:
    """Return the format and content of a row. Raises DataError if it is not as expected."""
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a row of JSON: {error!s:.100}", where, FIX_ROW) from error
    formats = _match_formats(row)
    if not formats:
        if isinstance(row, dict) and "prompt" in row:
            raise _missing_answer(where)
        fix = "use the keys " + " or ".join("+".join(it.keys) for it in FORMATS)
        raise DataError("a row of unknown format", where, fix)
    row_format = formats[0]
    names = [it.name for it in formats]
    if len(names) > 1 and names != ["prompt/chosen/rejected", "messages"]:
        raise DataError(f"a row of two formats: {', '.join(names)}", where, "remove one's keys")
    if expected not in (None, row_format):
        what = f"two formats: {row_format.name} here, {expected.name} before"
        raise DataError(what, where, "prepare them as two datasets")
    labels = {str(row.get(key)).lower() for key in _KTO_LABELS}  # CSV has text only
    if labels & {"true", "false", "0", "1"}:
        fix = "remove the bad answers and the label, or pair good and bad answers for DPO"
        raise DataError("a row for KTO, which is not supported", where, fix)
    return row_format, row_format.read(row, where)


def _match_formats(row: Any) -> list[Format]:
    keys = set(row) if isinstance(row, dict) else set()
    return [row_format for row_format in FORMATS if keys >= set(row_format.keys)]


def _missing_answer(where: str) -> DataError:
    fix = "give each row an `answer`, a `completion`, or `chosen` and `rejected`"
    return DataError("no usable answer to the prompt", where, fix)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _to_rows(value: Any, role: str) -> list[Any]:
    """Return text as one message of `role`, and a list of messages as it is."""
    return list(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _system_rows(row: dict[str, Any]) -> list[Any]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _read_messages(row: dict[str, Any], where: str) -> Example:
    return _make_chat(row["messages"], where)


def _read_sharegpt(row: dict[str, Any], where: str) -> Example:
    turns = row["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        fix = 'write [{"from": ..., "value": ...}]'
        raise DataError("conversations is not a list of turns", where, fix)
    rows = _system_rows(row)
    for turn in turns:
        role = turn.get("from", turn.get("role"))
        role = _SHAREGPT_ROLES.get(str(role), role)
        rows.append({**turn, "role": role, "content": turn.get("value", turn.get("content"))})
    return _make_chat(rows, where)


def _read_alpaca(row: dict[str, Any], where: str) -> Example:
    rows = _system_rows(row)
    question = row["instruction"]
    context = row.get("input") or ""
    turns = row.get("history") or []
    is_valid = isinstance(context, str) and isinstance(question, str) and isinstance(turns, list)
    if not is_valid or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        fix = "instruction and input are text, history is a list of [instruction, output]"
        raise DataError("not a row of alpaca", where, fix)
    if context.strip():
        question += "\n\n" + context
    for user, assistant in [*turns, [question, row["output"]]]:
        rows += _to_rows(user, "user") + _to_rows(assistant, "assistant")
    return _make_chat(rows, where)


def _read_completion(row: dict[str, Any], where: str) -> Example:
    rows = _to_rows(row["prompt"], "user") + _to_rows(row["completion"], "assistant")
    return _make_chat(rows, where)


def _make_chat(rows: Any, where: str) -> Example:
    messages = parse_messages(rows, where)
    first_answer = [message.role for message in messages].index("assistant")
    return Example(where, messages[:first_answer], [messages])


def _read_preference(row: dict[str, Any], where: str) -> Example:
    prompt = _to_rows(row["prompt"], "user")
    answers = []
    for key in ("chosen", "rejected"):
        rows = _to_rows(row[key], "assistant")
        rows = rows if rows[: len(prompt)] == prompt else prompt + rows  # trl has both
        messages = parse_messages(rows, f"{where}, {key}")
        if messages[-1].role != "assistant":
            raise DataError(f"{key} does not end with an answer", where, "leave the pair out")
        answers.append(messages)
    return Example(where, parse_messages(prompt, f"{where}, prompt", reply=True), answers)


def _read_prompt(row: dict[str, Any], where: str) -> Example:
    answer = row["answer"]
    is_number = type(answer) in (int, float) and math.isfinite(answer)
    if not is_number and not (isinstance(answer, str) and answer.strip()):
        raise _missing_answer(where)
    prompt = parse_messages(_to_rows(row["prompt"], "user"), where, reply=True)
    return Example(where, prompt, row=row)


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
