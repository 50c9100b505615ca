"""Check which tokens of a conversation are trained on, for public chat templates.

    python -m benchmarks.templates [FOLDER ...]

Reads the *.jinja files in the folders; without folders, those of the installed trl. llama.cpp has
them in vendor/llama.cpp/models/templates of llama-cpp-python's source. For each template it makes a
byte-level tokenizer with the template's control tokens, and encodes conversations with turns, tool
calls, results and reasoning. The ids must equal those of transformers; only the end of the last
answer may follow them. Exactly the words of answers must be trained on, and each answer must end
with a control token that is trained on. If there is a NAME_training.jinja, as in trl, its
{% generation %} tags must agree about every word. Prints a row per template, and one JSON line.
"""

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from megatoken.base.errors import ConfigError, DataError
from megatoken.text.chat_template import ChatTemplate, find_template, parse_messages
from megatoken.text.tokenizer import load_tokenizer

CONTROL = re.compile(
    r"<[|｜][^<>|｜\s'\"{}]+[|｜]?>|｜DSML｜|<[a-z_]+\|>|<\|\"\|>|\[/?[A-Z_]{2,}\]|</?s>"
    r"|</?\w+_of_\w+>|<seed:[be]os>|\]~!?b[\]\[]|\[e~\[|<SPECIAL_\d+>|<sep>|</?assistant>"
    r"|\[gMASK\]|<sop>|<extra_id_\d+>|\]<\]|<role_end>"
)
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
TRAINING = "_training.jinja"
Message = dict[str, Any]


def call(city: str, id: str = "call00001") -> Message:
    function = {"name": "weather", "arguments": {"city": city}}
    return {"id": id, "type": "function", "function": function}


def tool(text: str, id: str = "call00001") -> Message:
    return {"role": "tool", "tool_call_id": id, "name": "weather", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


# Words of the assistant begin with A.
CALLING = [user("qone"), answer("", tool_calls=[call("Aoslo")]), tool("rone")]
THINKING = answer("", tool_calls=[call("Aoslo")], reasoning_content="Athink")
REASONED = [user("qone"), answer("Aone", reasoning_content="Athink")]
CONVERSATIONS: dict[str, list[Message]] = {
    "turn": [user("qone"), answer("Aone")],
    "turns": [user("qone"), answer("Aone"), user("qtwo"), answer("Atwo")],
    "system": [system("sone"), user("qone"), answer("Aone")],
    "system, turn": [user("qone"), answer("Aone"), system("sone"), user("qtwo"), answer("Atwo")],
    "system, last": [system("sone"), user("qone"), answer("Aone"), system("stwo")],
    "call": CALLING[:2],
    "result": [*CALLING, answer("Aone")],
    "result, turn": [*CALLING, answer("Aone"), user("qtwo"), answer("Atwo")],
    "results, turn": [*CALLING, *CALLING[1:], answer("Aone"), user("qtwo"), answer("Atwo")],
    "two calls": [
        *(user("qone"), answer("", tool_calls=[call("Aoslo"), call("Arome", "call00002")])),
        *(tool("rone"), tool("rtwo", "call00002"), answer("Aone")),
    ],
    "text and call": [
        *(user("qone"), answer("Alook", tool_calls=[call("Aoslo")])),
        *(tool("rone"), answer("Aone")),
    ],
    "reasoning": REASONED,
    "reasoning, turn": [*REASONED, user("qtwo"), answer("Atwo", reasoning_content="Amuse")],
    "reasoning, call": [user("qone"), THINKING, tool("rone"), answer("Aone")],
    "reasoning, calls, turn": [
        *(user("qone"), THINKING, tool("rone"), THINKING, tool("rtwo")),
        *(answer("Aone", reasoning_content="Amuse"), user("qtwo"), answer("Atwo")),
    ],
}
WORD = re.compile("[qsr](?:one|two)|A(?:one|two|oslo|rome|look|think|muse)")
PLACE = {"type": "string", "description": "place"}
PARAMETERS = {"type": "object", "properties": {"city": PLACE}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Weather of a place", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]


def list_tools(name: str) -> list[Message] | None:
    """Return the tools of a conversation."""
    return TOOLS if any("tool_calls" in row for row in CONVERSATIONS[name]) else None


@cache
def byte_tokenizer() -> str:
    """Return the tokenizer.json of a byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={one: id for id, one in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return str(inner.to_str())


class Oracle:
    """A template in transformers."""

    def __init__(self, jinja: str, tokens: Sequence[str] = ()) -> None:
        """Make a tokenizer with these control tokens."""
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        inner = Tokenizer.from_str(byte_tokenizer())
        inner.add_special_tokens(["<|endoftext|>", "<s>", "</s>", *tokens])
        inner.add_tokens(list(NOT_SPECIAL))
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=jinja
        )

    def apply(self, name: str, **options: Any) -> Any:
        """Return what transformers makes of a conversation, or "" if the template rejects it."""
        try:
            return self.tokenizer.apply_chat_template(
                CONVERSATIONS[name], tools=list_tools(name), **options
            )
        except Exception:  # a template can fail in any way
            return ""

    def open(self) -> ChatTemplate:
        """Return megatoken's template of the same folder."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            return find_template(load_tokenizer(folder))


def make_oracles(path: Path) -> tuple[Oracle, Oracle | None]:
    """Return transformers' version of a template, and that of NAME_training.jinja if it exists."""
    jinja = path.read_text(encoding="utf-8")
    bare = Oracle(jinja)
    texts = [jinja, *(bare.apply(name, tokenize=False) for name in CONVERSATIONS)]
    tokens = sorted({token for text in texts for token in CONTROL.findall(text)})
    twin = path.with_name(path.stem + TRAINING)
    training = Oracle(twin.read_text(encoding="utf-8"), tokens) if twin.is_file() else None
    return Oracle(jinja, tokens), training


def list_words(pieces: Sequence[str], mask: Sequence[bool]) -> list[tuple[str, bool]]:
    """Return the words of the messages, each with the mask of its letters."""
    letters = [is_trained for piece, is_trained in zip(pieces, mask, strict=True) for _ in piece]
    words = []
    for word in WORD.finditer("".join(pieces)):
        found = set(letters[word.start() : word.end()])
        words.append((word[0], found == {True} if word[0][0] == "A" else True in found))
    return words


def judge(name: str, oracle: Oracle, training: Oracle | None, template: ChatTemplate) -> str:
    """Return "right", "right, as in training", "not rendered", "refused: ..." or "wrong: ..."."""
    rows = CONVERSATIONS[name]
    text = oracle.apply(name, tokenize=False)
    written = {row["content"] for row in rows} | ({"Aoslo"} if list_tools(name) else set())
    if not text or any(word not in text for word in written):
        return "not rendered"
    try:
        ids, trained = template.encode(parse_messages(rows, name), tools=list_tools(name))
    except DataError as error:
        return f"refused: {error!s:.150}"
    expected = oracle.tokenizer(text, add_special_tokens=False)["input_ids"]
    if ids[: len(expected)] != expected or not all(trained[len(expected) :]):
        return "wrong: other ids"
    pieces = [template.tokenizer.decode([id]) for id in ids]
    words = list_words(pieces, trained)
    for word, is_trained in words:
        if is_trained != (word[0] == "A"):
            return f"wrong: {word} is {'trained' if is_trained else 'not trained'}"
    special = template.tokenizer.special_ids
    runs = groupby(zip(pieces, trained, strict=True), key=lambda pair: pair[1])
    spans = [[piece for piece, _ in run if piece.strip()] for is_trained, run in runs if is_trained]
    if len(spans) != sum(row["role"] == "assistant" for row in rows):
        return f"wrong: {len(spans)} spans"
    if not all(span[-1] in special for span in spans):
        return "wrong: an end is not trained"
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    twin = training.apply(name, **options) if training else ""
    if twin:
        pieces = [template.tokenizer.decode([id]) for id in twin["input_ids"]]
        theirs = list_words(pieces, list(map(bool, twin["assistant_masks"])))
        if [word for word, _ in theirs] == [word for word, _ in words]:  # some keep more reasoning
            return "right, as in training" if theirs == words else "wrong: not as in training"
    return "right"


def check(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, str] | str]]:
    """Yield the name of each template and its verdicts by conversation, or why it is refused."""
    for path in paths:
        oracle, training = make_oracles(path)
        try:
            template = oracle.open()
        except ConfigError as error:
            yield path.name, str(error).partition(" — ")[0]
            continue
        yield path.name, {name: judge(name, oracle, training, template) for name in CONVERSATIONS}


def find_templates(folders: Sequence[str]) -> list[Path]:
    """Return the templates in the folders, without training twins; by default trl's."""
    spec = None if folders else find_spec("trl")
    if spec and spec.origin:
        folders = [str(Path(spec.origin).parent / "chat_templates")]
    paths = [path for folder in folders for path in sorted(Path(folder).glob("*.jinja"))]
    return [path for path in paths if not path.name.endswith(TRAINING)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    total: Counter[str] = Counter()
    refused_templates: dict[str, str] = {}
    others: dict[str, dict[str, str]] = {}
    print(f"{'template':52} rendered right refused wrong")
    for name, verdicts in check(find_templates(parser.parse_args().folders)):
        total["templates"] += 1
        if isinstance(verdicts, str):
            refused_templates[name] = verdicts
            print(f"{name:52} {verdicts}")
            continue
        counts = Counter(verdict.partition(":")[0] for verdict in verdicts.values())
        right = counts["right"] + counts["right, as in training"]
        n_rendered = len(verdicts) - counts["not rendered"]
        print(f"{name:52} {n_rendered:8} {right:5} {counts['refused']:7} {counts['wrong']:5}")
        total.update(counts)
        total["all that is rendered is right"] += right == n_rendered
        bad = {key: verdict for key, verdict in verdicts.items() if ":" in verdict}
        others |= {name: bad} if bad else {}
    print(json.dumps({"total": total, "refused": refused_templates, "others": others}))


if __name__ == "__main__":
    main()
