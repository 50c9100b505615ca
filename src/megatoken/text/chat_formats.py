"""Read conversations, preferences and prompts from rows. A row's keys identify its format.

| keys | kind | source |
|---|---|---|
| messages | conversation | OpenAI, trl |
| conversations | conversation (ShareGPT) | LLaMA-Factory, axolotl |
| instruction, output; optional input, system, history | conversation (alpaca) | Taori et al. 2023, LLaMA-Factory |
| instruction, response; optional context | conversation | Dolly (Conover et al. 2023) |
| prompt, completion | conversation | trl |
| one of the above; label or kto_tag | a rated answer, for KTO | trl, LLaMA-Factory |
| prompt, chosen, rejected | preference | trl |
| conversations, chosen, rejected | preference | LLaMA-Factory |
| chosen, rejected | preference; what they have in common is the prompt | trl, Bai et al. 2022 |
| prompt, answer | prompt with its answer | verl |
| question, answer | prompt; the answer is what follows the last #### | GSM8K (Cobbe et al. 2021) |

Prompts and answers are text or a list of messages; answers in a prompt are context. If a row has
the keys of several formats, the first match in FORMATS wins. Any row can have a `weight` of 0, which
drops it, or 1; `system`, a message that is put first; `tools`, a list of OpenAI's function schemas;
and `chat_template_kwargs`, variables of the template. The last two can also be JSON. All other keys
that are not in HARMLESS are counted as unused, and so are keys of messages that the template does
not read.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatoken.base.errors import DataError
from megatoken.base.rooms import list_own, load_entry
from megatoken.base.system.atomic_write import MALFORMED
from megatoken.base.system.metrics_log import Row
from megatoken.text.chat_template import Message, parse_messages
from megatoken.text.documents import FIX_ROW
from megatoken.text.sources import Source
from megatoken.text.text_files import read_rows

FIX_KEYS = "rename the keys, or skip such rows with --invalid skip; for plain text, set --text-key"
Conversations = tuple[
    Any, ...
]  # lists of messages: the prompt or None, then complete conversations
Kind = Literal["chat", "preference", "kto", "prompt"]
# Values in CSV are text, and pandas writes a column with gaps as floats.
_LABELS = dict.fromkeys(("true", "1", "1.0"), True) | dict.fromkeys(("false", "0", "0.0"), False)
_NOT_SET: tuple[Any, ...] = (None, "", [], {})
_RATED = ("label", "kto_tag")  # trl's key, LLaMA-Factory's key
_OPTIONS = {"tools": "tools", "chat_template_kwargs": "variables"}  # of ChatTemplate.encode
_COMMON = {"system", "weight", *_OPTIONS, *_RATED}
HARMLESS = {
    "id",
    "prompt_id",
    "idx",
    "index",
    "uuid",
    "source",
    "dataset",
    "category",
    "name",
    "tool_call_id",
}
_ROLES = {"human": "user", "Human": "user", "gpt": "assistant", "Assistant": "assistant"}
_HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")


@dataclass(frozen=True, slots=True)
class Example:
    """A parsed row.

    where: file:line. prompt: the messages before the answer or, in a chat, before the first answer
    to train on. conversations: the complete conversations, which begin with the prompt; a chat has
    one, a preference has two (chosen, rejected), a prompt has none. row: the row, for prompts only.
    is_desirable: for KTO, the label of the answer. weight: 0 if the example is not trained on.
    options: arguments of ChatTemplate.encode. unused: keys of the row that are set and change
    nothing.
    """

    where: str
    prompt: list[Message]
    conversations: list[list[Message]]
    row: Row
    is_desirable: bool
    weight: int
    options: dict[str, Any]
    unused: list[str]


class RowFormat(NamedTuple):
    """A row format.

    name: the keys that identify it, joined by slashes; a remark in parentheses may follow. read:
    returns a row's conversations; for a prompt, it also sets the row's `prompt` and `answer`.
    optional: further keys that `read` uses.
    """

    name: str
    kind: Kind
    read: Callable[[Row], Conversations]
    optional: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        return self.name.partition(" ")[0].split("/")


def list_formats() -> list[RowFormat]:
    """Return the row formats, users' first: their entries are sequences, as FORMATS is."""
    names = [*list_own("row_format"), "megatoken"]
    return [each for name in names for each in load_entry("row_format", name)]


def peek_format(source: Source, text_key: str) -> RowFormat | None:
    """Return the row format of a corpus, judged by its first row, or None if it holds plain text.

    text_key: a first row with this key means plain text. Raises DataError if the first row has some
    keys of a format, but not all.
    """
    if source.files[0].format not in ("separated", "whole"):
        for where, line, _ in read_rows(source):
            try:
                row = json.loads(line)
                if text_key in row or not any(row.keys() & {*each.keys} for each in list_formats()):
                    break
            except MALFORMED:
                break
            return _match_format(row, where)
    return None


def read_examples(source: Source) -> Iterator[tuple[RowFormat, Example]]:
    """Yield the format and the example of every row.

    Raises DataError, naming file:line, for an unusable row.
    """
    row_format: RowFormat | None = None
    for where, line, _ in read_rows(source):
        row_format, example = parse_row(line, where, row_format)
        yield row_format, example


def parse_row(line: bytes, where: str, expected: RowFormat | None) -> tuple[RowFormat, Example]:
    """Parse a JSON row; return its format and the example.

    expected: the required format, or None for any. Raises DataError, naming `where`, if the row is
    unusable or has another format.
    """
    try:
        row = json.loads(line)
        row_format = _match_format(row, where)
        if expected not in (None, row_format):
            raise ValueError(f"{row_format.name} after rows of {expected.name}")
        return row_format, _parse(row, row_format, where)
    except MALFORMED as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        raise DataError(f"unusable row: {reason:.200}", where, FIX_ROW) from error


def _match_format(row: Row, where: str) -> RowFormat:
    """Return the first format whose keys a row has.

    Raises DataError, naming the closest formats and the keys they lack, if no format matches.
    """
    formats = list_formats()
    for row_format in formats:
        if row.keys() >= {*row_format.keys}:
            if row_format.kind == "chat" and _read_label(row) is not None:
                return row_format._replace(name=f"{row_format.name}/label", kind="kto")
            return row_format
    similar = [each for each in formats if row.keys() & {*each.keys}] or formats
    missing = {each.name: [key for key in each.keys if key not in row] for each in similar}
    fewest = min(map(len, missing.values()))
    closest = "; ".join(
        f"{name} needs {', '.join(keys)}" for name, keys in missing.items() if len(keys) == fewest
    )
    what = f"no row format has the keys {', '.join(row):.200}; closest: {closest}"
    raise DataError(what, where, FIX_KEYS)


def _read_label(row: Row) -> Any:
    return next((row[key] for key in _RATED if row.get(key) not in _NOT_SET), None)


def _parse(row: Row, row_format: RowFormat, where: str) -> Example:
    kind = row_format.kind
    used = {*row_format.keys, *row_format.optional, *_COMMON, *HARMLESS}
    unused = [key for key, value in row.items() if key not in used and value not in _NOT_SET]
    weight = row.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"the weight is {weight}, only 0 and 1 are supported")
    label = _LABELS.get(str(_read_label(row)).lower())
    if kind == "kto" and label is None:
        raise ValueError(f"the label is {_read_label(row)!r}, neither true nor false")
    system = _to_messages(row["system"], "system") if row.get("system") else []
    prompt_rows, *complete = (each and [*system, *each] for each in row_format.read(row))
    n_context = len(complete[0]) - 1 if kind == "kto" else len(prompt_rows or ())
    conversations = [parse_messages(each, where, n_context=n_context) for each in complete]
    if kind in ("preference", "kto") and any(it[-1].role != "assistant" for it in conversations):
        raise ValueError("a conversation does not end with an answer")
    if kind in ("chat", "kto"):
        first = conversations[0]
        is_trained = [message.role == "assistant" and message.weight for message in first]
        prompt = first[: is_trained.index(1)]
    else:
        prompt = parse_messages(prompt_rows, where, reply=True)
    options = {name: row[key] for key, name in _OPTIONS.items() if row.get(key) not in _NOT_SET}
    return Example(
        where,
        prompt,
        conversations,
        row=row if kind == "prompt" else {},
        is_desirable=kind == "kto" and bool(label),
        weight=int(weight != 0),
        options={
            name: json.loads(value) if isinstance(value, str) else value
            for name, value in options.items()
        },
        unused=unused,
    )


def _to_messages(value: Any, role: str) -> list[Any]:
    """Convert text to a list of one message of `role`; return a list of messages unchanged."""
    return list(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _read_sharegpt(row: Row) -> Conversations:
    return None, list(map(_parse_turn, row["conversations"]))


def _read_rated_turns(row: Row) -> Conversations:
    _, prompt = _read_sharegpt(row)
    return prompt, *([*prompt, _parse_turn(row[key])] for key in ("chosen", "rejected"))


def _parse_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Convert a message of ShareGPT to OpenAI's keys."""
    turn = dict(turn)
    role = turn.pop("from", turn.get("role"))
    content = turn.pop("value", turn.get("content"))
    return {**turn, "role": _ROLES.get(role, role), "content": content}


def _read_alpaca(row: Row) -> Conversations:
    messages: list[Any] = []
    question = row["instruction"]
    context = row.get("input") or row.get("context") or ""
    if context.strip():
        question += "\n\n" + context
    answer = row.get("output", row.get("response"))
    for user, assistant in [*(row.get("history") or []), (question, answer)]:
        messages += _to_messages(user, "user") + _to_messages(assistant, "assistant")
    return None, messages


def _read_completion(row: Row) -> Conversations:
    prompt = _to_messages(row["prompt"], "user")
    return prompt, prompt + _to_messages(row["completion"], "assistant")


def _read_preference(row: Row) -> Conversations:
    prompt = _to_messages(row["prompt"], "user")
    answers = [_to_messages(row[key], "assistant") for key in ("chosen", "rejected")]
    # trl allows answers with and without the prompt.
    return prompt, *(each if each[: len(prompt)] == prompt else prompt + each for each in answers)


def _read_implicit(row: Row) -> Conversations:
    """Read a preference whose prompt is the beginning that both conversations share."""
    chosen, rejected = (_parse_hh(row[key]) for key in ("chosen", "rejected"))
    n_prompt = min(len(chosen), len(rejected)) - 1
    while chosen[:n_prompt] != rejected[:n_prompt]:
        n_prompt -= 1
    return chosen[:n_prompt], chosen, rejected


def _parse_hh(value: Any) -> list[Any]:
    """Split the text of Anthropic's HH into messages; return a list of messages unchanged."""
    if isinstance(value, list):
        return value
    start, *parts = _HH_TURN.split(value)
    if start.strip() or not parts:
        raise ValueError("chosen has no prompt: rename the key of the prompt to `prompt`")
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[name], "content": content} for name, content in turns]


def _read_question(row: Row) -> Conversations:
    if "choices" in row:  # as in MMLU, whose answer is the number of a choice
        raise ValueError("a multiple-choice question")
    row["prompt"] = row["question"]
    if isinstance(row["answer"], str):
        row["answer"] = row["answer"].rpartition("####")[2].strip()
    return _read_prompt(row)


def _read_prompt(row: Row) -> Conversations:
    answer = row["answer"]
    if not isinstance(answer, (str, int, float)) or not str(answer).strip():
        raise ValueError("the answer is not text or a number")
    return (_to_messages(row["prompt"], "user"),)


FORMATS = (
    RowFormat("prompt/chosen/rejected", "preference", _read_preference),
    RowFormat("conversations/chosen/rejected (LLaMA-Factory)", "preference", _read_rated_turns),
    RowFormat("chosen/rejected", "preference", _read_implicit),
    RowFormat("prompt/completion", "chat", _read_completion),
    RowFormat("prompt/answer", "prompt", _read_prompt),
    RowFormat("question/answer (GSM8K)", "prompt", _read_question),
    RowFormat("messages", "chat", lambda row: (None, row["messages"])),
    RowFormat("conversations (ShareGPT)", "chat", _read_sharegpt),
    RowFormat("instruction/output (alpaca)", "chat", _read_alpaca, ("input", "history")),
    RowFormat("instruction/response (Dolly)", "chat", _read_alpaca, ("context",)),
)
