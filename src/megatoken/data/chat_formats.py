"""Rows of JSON to conversations, preferences and prompts; a row's keys say which program's format it is.

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
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megatoken.data.chat_template import Message, parse_messages
from megatoken.data.corpus_reader import decompress
from megatoken.data.sources import File, Source
from megatoken.errors import DataError

Kind = Literal["chat", "preference", "prompt"]
ARRAY_HEAD_BYTES = 1 << 20  # of a file, in which its first row ends
TO_LINES = (
    "python -c \"import json, pyarrow.parquet as p; [print(json.dumps(row)) for row in p.read_table('FILE.parquet')"
    '.to_pylist()]" > FILE.jsonl'
)
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


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
    return next((each for each in FORMATS if isinstance(row, dict) and row.keys() >= set(each.keys)), None)


def peek_format(source: Source, text_key: str) -> Format | None:
    """The format of the first row of a corpus of JSON lines; None for text, which stands below `text_key`.

    Raises DataError for conversations in another form, which as text would be trained with their punctuation, and for a
    prompt without an answer.
    """
    if source.files and all(re.search(r"\.(json|jsonl|ndjson)(\.|$)", file.name) for file in source.files):
        _refuse_other_json(source, source.files[0], text_key)
    if source.files and all(file.format == "rows" for file in source.files):
        _refuse_parquet(source, source.files[0], text_key)
    lines = tuple(file for file in source.files if file.format == "lines")
    found = _peek_row(replace(source, files=lines), text_key)
    if found and (others := [file for file in source.files if file.format != "lines"]):
        fix = "name the rows alone, such as 'FOLDER/*.jsonl'"
        raise DataError(f"{found.name} in {lines[0].name}, text beside them", others[0].path, fix)
    return found


def _peek_row(source: Source, text_key: str) -> Format | None:
    for where, line in _read_lines(source):
        try:
            row = json.loads(line.decode(errors="replace"))  # what is no UTF-8 is an error of its row
        except (ValueError, RecursionError):
            return None
        if isinstance(row, dict) and text_key in row:
            return None
        _refuse_prompt_alone(row, where)
        return detect_format(row)
    return None


def _refuse_prompt_alone(row: Any, where: str) -> None:
    if isinstance(row, dict) and "prompt" in row and detect_format(row) is None:
        fix = "give each row an `answer`, a `completion`, or `chosen` and `rejected`"
        raise DataError("no answer beside the prompt", where, fix)


def _refuse_two_formats(row: Any, where: str) -> None:
    names = [each.name for each in FORMATS if isinstance(row, dict) and row.keys() >= set(each.keys)]
    if len(names) > 1 and names != ["prompt/chosen/rejected", "messages"]:
        raise DataError(f"a row of two formats, {names[0]} and {names[1]}", where, "leave out the keys of one")


def _refuse_other_json(source: Source, file: File, text_key: str) -> None:
    """Raise DataError for an array of rows, but of text, and for conversations in a file of another suffix than lines'.

    An array of anything in a file that is not one of lines is text.
    """
    head = ""
    with source.open(file) as raw, suppress(OSError, EOFError, zlib.error):  # the reader reports it
        head = decompress(raw, file).read(ARRAY_HEAD_BYTES).decode("utf-8-sig", errors="replace")
    start = re.match(r"\s*(\[?)\s*(?=\{)", head)
    if start is None or (file.format == "lines" and not start[1]):
        return
    try:
        row, _ = json.JSONDecoder().raw_decode(head, start.end())
    except (ValueError, RecursionError):
        return
    found = detect_format(row)
    if start[1] and (found or (file.format == "lines" and text_key not in row)):
        keys = ", ".join(row) or "none"
        what = found.name if found else f"rows of no known format, the first has the keys {keys:.80}"
        fix = "write a row a line, such as by: jq -c '.[]' FILE.json > FILE.jsonl"
        raise DataError(f"an array of {what}, not a line of JSON for each row", file.path, fix)
    if found:
        fix = "write a row a line, such as by: jq -c . FILE.json > FILE.jsonl"
        raise DataError(f"{found.name} in a file that is not named .jsonl", file.path, fix)


def _refuse_parquet(source: Source, file: File, text_key: str) -> None:
    """Raise DataError for conversations in parquet, of which text alone is read."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:  # which the reader reports
        return
    with source.open(file) as raw, suppress(ArrowException, OSError):  # so does it damage
        names = parquet.read_schema(raw).names
        if text_key not in names and (found := detect_format(dict.fromkeys(names))):
            raise DataError(
                f"{found.name} in parquet, of which text alone is read", file.path, f"write lines: {TO_LINES}"
            )


def read_examples(source: Source) -> Iterator[tuple[Format, Example]]:
    """Every row of a corpus, checked. Raises DataError, naming file:line, for a row that cannot be used."""
    first: tuple[Format, str] | None = None
    for where, line in _read_lines(source):
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise DataError(f"not a line of JSON: {error!s:.100}", where, "mend it or leave it out") from error
        found = detect_format(row)
        _refuse_prompt_alone(row, where)
        _refuse_two_formats(row, where)
        if found is None:
            keys = ", ".join(list(row)[:8]) if isinstance(row, dict) else type(row).__name__
            known = "; ".join(" + ".join(each.keys) for each in FORMATS)
            raise DataError(f"a row of no known format, its keys are {keys or 'none'}", where, f"formats: {known}")
        first = first or (found, where)
        if found is not first[0]:
            what = f"two formats in one dataset: {found.name} here, {first[0].name} at {first[1]}"
            raise DataError(what, where, "prepare them as two datasets")
        yield found, found.read(row, where)


def _read_lines(source: Source) -> Iterator[tuple[str, bytes]]:
    for file in source.files:
        number = 0
        with source.open(file) as raw:
            try:
                for number, line in enumerate(decompress(raw, file), start=1):
                    if line.strip():
                        yield f"{file.path}:{number}", line
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"cannot read: {error}", f"{file.path}:{number + 1}", "copy the file again") from error


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
        raise DataError("conversations is no list of turns", where, 'write {"from": ..., "value": ...} for each')
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    rows = [
        {"role": _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, "content": content}
        for turn in turns
        for role, content in [(turn.get("from", turn.get("role")), turn.get("value", turn.get("content")))]
    ]
    return _make_chat(system + rows, where)


def _read_alpaca(row: dict[str, Any], where: str) -> Example:
    rows = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for turn in row.get("history") or ():
        if not isinstance(turn, list) or len(turn) != 2:
            raise DataError("a turn of history is no pair", where, "write [instruction, output] for each")
        rows += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turn, strict=True)]
    question = row["instruction"]
    if isinstance(question, str) and isinstance(row.get("input"), str) and row["input"].strip():
        question += "\n\n" + row["input"]
    rows += [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return _make_chat(rows, where)


def _read_completion(row: dict[str, Any], where: str) -> Example:
    return _make_chat(_to_rows(row["prompt"], "user") + _to_rows(row["completion"], "assistant"), where)


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
            raise DataError(f"{key} does not end with the assistant's answer", where, "leave the pair out")
    if answers[0] == answers[1]:
        raise DataError("chosen equals rejected", where, "leave the pair out: it says nothing")
    return Example(where, parse_messages(prompt, f"{where}, prompt", reply=True), answers)


def _read_prompt(row: dict[str, Any], where: str) -> Example:
    answer = row["answer"]
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if not is_number and not (isinstance(answer, str) and answer.strip()):
        raise DataError("no answer beside the prompt", where, "give each row an `answer`, text or a number")
    return Example(where, parse_messages(_to_rows(row["prompt"], "user"), where, reply=True), row=row)


FORMATS = (
    Format("prompt/chosen/rejected", ("prompt", "chosen", "rejected"), "preference", _read_preference),
    Format("prompt/completion", ("prompt", "completion"), "chat", _read_completion),
    Format("prompt/answer", ("prompt", "answer"), "prompt", _read_prompt),
    Format("messages", ("messages",), "chat", _read_messages),
    Format("conversations (ShareGPT)", ("conversations",), "chat", _read_sharegpt),
    Format("instruction/output (alpaca)", ("instruction", "output"), "chat", _read_alpaca),
)
