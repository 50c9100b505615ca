"""Read rows of conversations, preferences and prompts. A row's keys identify its format.

| keys | kind | source |
|---|---|---|
| messages | conversation | OpenAI, trl |
| conversations | conversation (ShareGPT) | LLaMA-Factory, axolotl |
| instruction, output; optional input, system, history | conversation (alpaca) | Taori et al. 2023, LLaMA-Factory |
| instruction, response; optional context | conversation | Dolly (Conover et al. 2023) |
| prompt, completion | conversation | trl |
| one of the above; label or kto_tag | a rated answer, for KTO | trl, LLaMA-Factory |
| prompt, chosen, rejected | preference | trl |
| chosen, rejected | preference; what they have in common is the prompt | trl, Bai et al. 2022 |
| prompt, answer | prompt with its answer | verl |
| question, answer | prompt; the answer is what follows the last #### | GSM8K (Cobbe et al. 2021) |

Prompts and answers are text or a list of messages. If a row has the keys of several formats, the
first match in FORMATS wins. Any row can have a `weight` of 0, which drops it, or 1, and `tools`, a
list of OpenAI's function schemas or its JSON.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megatoken.data.chat_template import Message, parse_messages
from megatoken.data.documents import FIX_ROW
from megatoken.data.sources import ROW_FORMATS, Source
from megatoken.data.text_files import read_rows
from megatoken.errors import DataError
from megatoken.system.atomic_write import MALFORMED

FIX_KEYS = "rename the keys, or skip such rows with --invalid skip; for plain text, set --text-key"
Row = dict[str, Any]  # as read
Kind = Literal["chat", "preference", "kto", "prompt"]
_LABELS = {"true": True, "1": True, "false": False, "0": False}  # values in CSV are text
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")


@dataclass(frozen=True, slots=True)
class Example:
    """A parsed row.

    where: file:line. prompt: the messages before the answer or, in a chat, before the first answer.
    answers: complete conversations, each with the prompt; a chat has one, a preference has two
    (chosen, rejected), a prompt has none. row: the input row, for prompts only. is_desirable: the
    label of a row for KTO. weight: 0 if the row is not trained on. tools: JSON schemas of functions.
    """

    where: str
    prompt: list[Message]
    answers: list[list[Message]] = field(default_factory=list)
    row: Row = field(default_factory=dict)
    is_desirable: bool = False
    weight: int = 1
    tools: list[dict[str, Any]] | None = None


class Format(NamedTuple):
    """A row format and the keys that identify it."""

    name: str
    keys: tuple[str, ...]
    kind: Kind
    read: Callable[[Row, str], Example]


def peek_format(source: Source, text_key: str) -> Format | None:
    """Return the row format of a corpus, judged by its first row, or None if it holds plain text.

    text_key: a first row with this key means plain text. Raises DataError if the first row has some
    keys of a format, but not all.
    """
    if source.files[0].format in ROW_FORMATS.values():
        for where, line in read_rows(source):
            try:
                row = json.loads(line)
                if text_key in row or not any(row.keys() & {*each.keys} for each in FORMATS):
                    break
            except MALFORMED:
                break
            return _match_format(row, where)
    return None


def read_examples(source: Source) -> Iterator[tuple[Format, Example]]:
    """Yield the format and the parsed content of every row.

    Raises DataError, naming file:line, for an unusable row.
    """
    row_format: Format | None = None
    for where, line in read_rows(source):
        row_format, example = parse_row(line, where, row_format)
        yield row_format, example


def parse_row(line: bytes, where: str, expected: Format | None) -> tuple[Format, Example]:
    """Parse a JSON row; return its format and content.

    expected: the required format, or None for any. Raises DataError, naming `where`, if the row is
    unusable or has another format.
    """
    try:
        row = json.loads(line)
        row_format = _match_format(row, where)
        if expected not in (None, row_format):
            raise ValueError(f"{row_format.name} after rows of {expected.name}")
        if row.get("weight") not in (None, 0, 1):
            raise ValueError(f"the weight is {row['weight']}, only 0 and 1 are supported")
        example = row_format.read(row, where)
        if row_format.kind == "kto":
            example = _rate(example, row)
        tools = row.get("tools")
        tools = json.loads(tools or "null") if isinstance(tools, str) else tools
        weight = 0 if row.get("weight") == 0 else 1
        return row_format, replace(example, tools=tools, weight=weight)
    except MALFORMED as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        raise DataError(f"unusable row: {reason:.200}", where, FIX_ROW) from error


def _match_format(row: Row, where: str) -> Format:
    """Return the first format whose keys a row has.

    Raises DataError, naming the closest formats and the keys they lack, if no format matches.
    """
    for row_format in FORMATS:
        if row.keys() >= {*row_format.keys}:
            is_rated = row_format.kind == "chat" and _read_label(row) is not None
            return _make_kto(row_format) if is_rated else row_format
    similar = [each for each in FORMATS if row.keys() & {*each.keys}] or FORMATS
    missing = {each.name: [key for key in each.keys if key not in row] for each in similar}
    fewest = min(map(len, missing.values()))
    closest = "; ".join(
        f"{name} needs {', '.join(keys)}" for name, keys in missing.items() if len(keys) == fewest
    )
    what = f"no row format has the keys {', '.join(row):.200}; closest: {closest}"
    raise DataError(what, where, FIX_KEYS)


def _make_kto(row_format: Format) -> Format:
    return row_format._replace(name=f"{row_format.name}/label", kind="kto")


def _read_label(row: Row) -> bool | None:
    label = row.get("label", row.get("kto_tag"))  # trl's key, LLaMA-Factory's key
    return _LABELS.get(str(label).lower())


def _rate(example: Example, row: Row) -> Example:
    """Return an example for KTO: the last answer is rated, what precedes it is its prompt."""
    (messages,) = example.answers
    if messages[-1].role != "assistant":
        raise ValueError("the conversation does not end with an answer")
    return replace(example, prompt=messages[:-1], is_desirable=bool(_read_label(row)))


def _to_rows(value: Any, role: str) -> list[Any]:
    """Convert text to a list of one message of `role`; return a list of messages unchanged."""
    return list(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _system_rows(row: Row) -> list[Any]:
    return _to_rows(row["system"], "system") if row.get("system") else []


def _read_messages(row: Row, where: str) -> Example:
    return _make_chat(row["messages"], where)


def _read_sharegpt(row: Row, where: str) -> Example:
    rows = _system_rows(row)
    for turn in row["conversations"]:
        turn = dict(turn)
        role = turn.pop("from", turn.get("role"))
        content = turn.pop("value", turn.get("content"))
        rows.append({**turn, "role": _SHAREGPT_ROLES.get(role, role), "content": content})
    return _make_chat(rows, where)


def _read_alpaca(row: Row, where: str) -> Example:
    rows = _system_rows(row)
    question = row["instruction"]
    context = row.get("input") or row.get("context") or ""
    if context.strip():
        question += "\n\n" + context
    answer = row["output"] if "output" in row else row["response"]
    for user, assistant in [*(row.get("history") or []), (question, answer)]:
        rows += _to_rows(user, "user") + _to_rows(assistant, "assistant")
    return _make_chat(rows, where)


def _read_completion(row: Row, where: str) -> Example:
    rows = _to_rows(row["prompt"], "user") + _to_rows(row["completion"], "assistant")
    return _make_chat(rows, where)


def _make_chat(rows: Any, where: str) -> Example:
    messages = parse_messages(rows, where)
    first_answer = [message.role for message in messages].index("assistant")
    return Example(where, messages[:first_answer], [messages])


def _read_preference(row: Row, where: str) -> Example:
    prompt = _to_rows(row["prompt"], "user")
    answers = []
    for key in ("chosen", "rejected"):
        rows = _to_rows(row[key], "assistant")
        rows = rows if rows[: len(prompt)] == prompt else prompt + rows  # trl allows both
        messages = parse_messages(rows, f"{where}, {key}")
        if messages[-1].role != "assistant":
            raise ValueError(f"{key} does not end with an answer")
        answers.append(messages)
    return Example(where, parse_messages(prompt, f"{where}, prompt", reply=True), answers)


def _read_implicit(row: Row, where: str) -> Example:
    """Read a preference whose prompt is the beginning that both conversations share."""
    chosen, rejected = (_parse_hh(row[key]) for key in ("chosen", "rejected"))
    n_prompt = min(len(chosen), len(rejected)) - 1
    while chosen[:n_prompt] != rejected[:n_prompt]:
        n_prompt -= 1
    prompt = chosen[:n_prompt]
    return _read_preference({"prompt": prompt, "chosen": chosen, "rejected": rejected}, where)


def _parse_hh(value: Any) -> list[Any]:
    """Split the text of Anthropic's HH into messages; return a list of messages unchanged."""
    if isinstance(value, list):
        return value
    start, *parts = _HH_TURN.split(value)
    if start.strip() or not parts:
        raise ValueError("neither messages nor text that starts with Human:")
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": roles[name], "content": content} for name, content in turns]


def _read_question(row: Row, where: str) -> Example:
    answer = row["answer"]
    if isinstance(answer, str):
        answer = answer.rpartition("####")[2].strip()
    return _read_prompt({**row, "prompt": row["question"], "answer": answer}, where)


def _read_prompt(row: Row, where: str) -> Example:
    answer = row["answer"]
    is_number = type(answer) in (int, float) and math.isfinite(answer)
    if not is_number and not (isinstance(answer, str) and answer.strip()):
        raise ValueError("the answer is not text or a number")
    prompt = parse_messages(_to_rows(row["prompt"], "user"), where, reply=True)
    return Example(where, prompt, row=row)


FORMATS = (
    Format(
        "prompt/chosen/rejected", ("prompt", "chosen", "rejected"), "preference", _read_preference
    ),
    Format("chosen/rejected", ("chosen", "rejected"), "preference", _read_implicit),
    Format("prompt/completion", ("prompt", "completion"), "chat", _read_completion),
    Format("prompt/answer", ("prompt", "answer"), "prompt", _read_prompt),
    Format("question/answer (GSM8K)", ("question", "answer"), "prompt", _read_question),
    Format("messages", ("messages",), "chat", _read_messages),
    Format("conversations (ShareGPT)", ("conversations",), "chat", _read_sharegpt),
    Format("instruction/output (alpaca)", ("instruction", "output"), "chat", _read_alpaca),
    Format("instruction/response (Dolly)", ("instruction", "response"), "chat", _read_alpaca),
)
