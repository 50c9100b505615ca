"""Conversations to a dataset: formats, what is trained, packing, the split, and every row that cannot be used."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megatoken.base.errors import DataError
from megatoken.data.dataset import Dataset, load_dataset
from megatoken.text.chat_dataset import open_rows, read_answers
from megatoken.text.chat_formats import peek_format, read_examples
from megatoken.text.chat_template import (
    LLAMA_3,
    WEIGHTS,
    Message,
    add_control_tokens,
    find_template,
    parse_messages,
)
from megatoken.text.prepare import prepare as prepare_text
from megatoken.text.prepare_chats import _pack, prepare_chats
from megatoken.text.sources import Source, find_source
from megatoken.text.tokenizer import load_tokenizer
from tests.tables import read_table

SYSTEM, USER, ANSWER, FIVE = (
    dict(zip(("role", "content"), turn.split(), strict=True))
    for turn in ("system Add.", "user 2+2", "assistant 4", "assistant 5")
)
GOOD = {"messages": [USER, ANSWER]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
BYTES = add_control_tokens(load_tokenizer("bytes"))
TEMPLATE = find_template(BYTES)


def write_rows(path: Path, rows: Sequence[Any]) -> Source:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:  # a file that changes is noticed
        path.write_text(text)
    return find_source(str(path))


def prepare(tmp_path: Path, rows: Sequence[Any], out: str = "data", **options: Any) -> Dataset:
    source = write_rows(tmp_path / "rows.jsonl", rows)
    prepare_chats(source, tmp_path / out, load_tokenizer("bytes"), **{"seq_len": 64, **options})
    return load_dataset(tmp_path / out)


def chats(count: int) -> list[dict[str, Any]]:
    contents = [(f"{n}?", "x" * (1 + n * 7 % 23)) for n in range(count)]
    return [{"messages": [{**USER, "content": q}, {**ANSWER, "content": a}]} for q, a in contents]


# A row, and the messages that it holds.
FORMATS = r"""
{"messages": [SYSTEM, USER, ANSWER], "id": 1} -> Add. 2+2 4
{"conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}]} -> 2+2 4
{"conversations": [{"from": "gpt", "value": "4"}], "system": "Add."} -> Add. 4
{"instruction": "2+2", "input": "", "output": "4"} -> 2+2 4
{"instruction": "2", "input": "+2", "output": "4"} -> 2\n\n+2 4
{"instruction": "2+2", "output": "4", "history": [["2+2", "4"]]} -> 2+2 4 2+2 4
{"prompt": "2+2", "completion": "4"} -> 2+2 4
{"instruction": "2", "context": "+2", "response": "4", "category": "sum"} -> 2\n\n+2 4
{"prompt": [SYSTEM, USER], "completion": [ANSWER], "label": null, "weight": 1.0} -> Add. 2+2 4
{"messages": [USER, ANSWER], "system": "Add."} -> Add. 2+2 4
{"prompt": "2+2", "completion": "4", "system": "Add.", "label": ""} -> Add. 2+2 4
{"instruction": "2+2", "output": "4", "system": "Add."} -> Add. 2+2 4
{"instruction": "2+2", "response": "4", "system": "Add."} -> Add. 2+2 4
{"messages": [USER, {"role": "assistant", "content": "4", "tool_calls": []}]} -> 2+2 4
{"messages": [{"role": "system", "content": null}, ANSWER], "system": "Add."} -> Add. NULL 4
{"prompt": [{"role": "user", "content": [{"text": "2"}, {"text": "+2"}]}], "completion": "4"} -> 2+2 4
{"messages": [USER, {"role": "tool", "content": ""}, ANSWER]} -> 2+2 RESULT 4
"""
ROLES = read_table("""
Add. system
NULL system
RESULT tool
4 assistant
5 assistant
""")


NAMES = {"GOOD": GOOD, "SYSTEM": SYSTEM, "USER": USER, "ANSWER": ANSWER, "FIVE": FIVE}


def fill_in(text: str) -> str:
    for name, value in NAMES.items():
        text = text.replace(name, json.dumps(value))
    return text


@pytest.mark.parametrize("line", FORMATS.strip().splitlines())
def test_formats_of_conversations(line: str, tmp_path: Path):
    row, contents = fill_in(line).split(" -> ")
    (tmp_path / "a.jsonl").write_text(row)
    table = pyarrow.Table.from_pylist([json.loads(row)])
    parquet.write_table(table, tmp_path / "b.parquet")
    texts = [text.replace(r"\n", "\n") for text in contents.split()]
    blank = re.compile("NULL|RESULT")
    messages = [Message(ROLES.get(text, "user"), blank.sub("", text)) for text in texts]
    examples = read_examples(find_source(str(tmp_path)))
    found = [(found.kind, example.conversations) for found, example in examples]
    assert found == [("chat", [messages])] * 2


@pytest.mark.parametrize("shard_tokens", [10**6, 100])
def test_rows_hold_whole_conversations_and_say_what_is_trained(tmp_path: Path, shard_tokens: int):
    *chosen, last = chats(41)
    given = [*chosen, {**last, "weight": 0}]
    dataset = prepare(tmp_path, given, val_fraction=0.2, shard_tokens=shard_tokens)
    assert (len(dataset.manifest.shards) > 4) == (shard_tokens == 100)
    found = []
    for split in ("train", "val"):
        rows = open_rows(dataset, split)
        ids, labels = rows.read(np.arange(len(rows)))
        assert ids.shape == (len(rows), 65)
        assert ids.size == len(getattr(dataset, split))
        # A conversation starts in front, and its first token is not trained.
        assert (labels[:, 0] == 2).all()
        assert (ids[labels >= 4] == BYTES.eot).all()
        ids, labels = ids[labels < 4], labels[labels < 4]
        for at in np.split(np.arange(len(ids)), np.flatnonzero(labels & 2)[1:]):
            found.append((ids[at].tolist(), (labels[at] & 1 == 1).tolist()))
    expected = [TEMPLATE.encode([Message(**m) for m in row["messages"]]) for row in chosen]
    assert sorted(found) == sorted(expected)
    manifest = dataset.manifest
    assert (manifest.documents["val"], manifest.source["template"]) == (5, "chatml")
    assert manifest.source["counts"] == {"skipped": 1}
    assert dataset.vocabulary.fingerprint == BYTES.fingerprint


def test_the_fullest_row_takes_a_conversation():
    sizes = [3, 9, 2, 5, 5, 1, 7, 10]
    sequences = [(np.zeros(n, np.uint32), np.zeros(n, np.uint8)) for n in sizes]
    rows = [[len(ids) for ids, _ in row] for row in _pack(sequences, 10)]
    assert rows == [[10], [9, 1], [3, 7], [5, 5], [2]]


def test_the_same_prompt_is_in_one_split(tmp_path: Path):
    rows = [{"prompt": f"question {n % 10}", "completion": f"answer {n}"} for n in range(200)]
    documents = prepare(tmp_path, rows, val_fraction=0.3).manifest.documents
    assert all(count % 20 == 0 and count for count in documents.values())
    few = prepare(tmp_path, rows[:3], "few", val_fraction=0.01)
    assert few.manifest.documents == {"train": 2, "val": 1}


# Kind and rows; the contents of each sequence, whose last answer alone is trained on.
SEQUENCES = r"""
preference: {"prompt": "2+2", "chosen": "4", "rejected": "5"} -> 2+2 4, 2+2 5
preference: {"prompt": [USER, ANSWER, USER], "chosen": "4", "rejected": [FIVE]} -> 2+2 4 2+2 4, 2+2 4 2+2 5
preference: {"messages": [], "prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, FIVE]} -> 2+2 4, 2+2 5
preference: {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER, USER, FIVE]} -> 2+2 4 2+2 4, 2+2 4 2+2 5
preference: {"chosen": "\n\nHuman: 2+2\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2\n\nAssistant: 5"} -> 2+2 4, 2+2 5
preference: {"conversations": [{"from": "human", "value": "2+2"}], "chosen": {"from": "gpt", "value": "4"}, \
"rejected": {"from": "gpt", "value": "5"}} -> 2+2 4, 2+2 5
kto: {"prompt": "2+2", "completion": "4", "label": true} | \
{"prompt": "2+2", "completion": "5", "label": "False"} -> 2+2 4, 2+2 5
kto: {"messages": [USER, FIVE, USER, ANSWER], "kto_tag": 1} | {"messages": [USER, FIVE], "kto_tag": 0} -> 2+2 5 2+2 4, 2+2 5
kto: {"prompt": "2+2", "completion": "4", "label": 1.0} | \
{"prompt": "2+2", "completion": "5", "label": "0.0"} -> 2+2 4, 2+2 5
chat: {"prompt": [USER, ANSWER, USER], "completion": [FIVE]} -> 2+2 4 2+2 5
chat: {"prompt": [USER, ANSWER], "completion": [FIVE]} -> 2+2 4 5
prompt: {"question": "2+2", "answer": "3+1=4\n#### 1,4"} -> 2+2
"""


@pytest.mark.parametrize("line", SEQUENCES.replace("\\\n", "").strip().splitlines())
def test_sequences_of_each_kind(line: str, tmp_path: Path):
    kind, text = fill_in(line).split(": ", 1)
    rows, contents = text.split(" -> ")
    for system in ("", "Add."):
        given = [json.loads(row) | {"system": system or None} for row in rows.split(" | ")]
        dataset = prepare(tmp_path, given, f"data{system}", val_fraction=0)
        found = open_rows(dataset, "train")
        dataset.require_kind(kind, "a test")
        for number, texts in enumerate(contents.split(", ")):
            texts = f"{system} {texts}".split()
            messages = [Message(ROLES.get(text, "user"), text, 0) for text in texts]
            messages[-1] = replace(messages[-1], weight=1)
            assert found.sequence(number) == TEMPLATE.encode(messages, reply=kind == "prompt")
            assert kind != "kto" or found.is_desirable(number) == (number == 0)
        assert kind != "prompt" or read_answers(dataset, "train")[0]["answer"] == "1,4"


def test_prompts_keep_their_answers(tmp_path: Path):
    rows = [{"prompt": f"{n}+1", "answer": n + 1, "level": "easy"} for n in range(20)]
    dataset = prepare(tmp_path, rows, val_fraction=0.2)
    found = []
    for split in ("train", "val"):
        prompts, answers = open_rows(dataset, split), read_answers(dataset, split)
        assert dataset.manifest.documents[split] == len(prompts) > 0
        questions = [[Message("user", row["prompt"])] for row in answers]
        expected = [TEMPLATE.encode(messages, reply=True) for messages in questions]
        assert [*map(prompts.sequence, range(len(prompts)))] == expected
        found += answers
    assert sorted(found, key=lambda row: row["answer"]) == rows
    with pytest.raises(DataError):
        dataset.require_kind("chat", "objective.name=sft")


def test_keys_that_change_nothing_are_counted(tmp_path: Path):
    """Those that are set, except an id or a source, in the first format that all rows share."""
    extra = {"margin": 0.5, "images": [], "score_chosen": 0, "prompt_id": "7", "note": None}
    manifest = prepare(tmp_path, [{**PAIR, **extra}, {**PAIR, "prompt": "d"}]).manifest
    expected = {f"rows with unused {key}": 1 for key in ("margin", "score_chosen")}
    assert manifest.source["counts"] == {"skipped": 0, **expected}
    user = {**USER, "mask": 0, "name": "n"}
    tool = {"role": "tool", "content": "4", "name": "n", "tool_call_id": "1"}
    chat = {"messages": [user, tool, {**ANSWER, "reasoning": "2", "id": "a"}]}
    for number, row in enumerate((chat, {"prompt": [user], "answer": "4"})):
        counts = prepare(tmp_path, [row], f"messages-{number}").manifest.source["counts"]
        assert counts == {"skipped": 0, "rows with unused mask": 1}


def test_damaged_labels_are_noticed(tmp_path: Path):
    dataset = prepare(tmp_path, chats(9))
    (tmp_path / "data/train_000000.marks").write_bytes(bytes(65))
    with pytest.raises(DataError, match=r"train_000000\.marks"):
        open_rows(dataset, "train")


def test_an_answer_of_weight_0_is_context(tmp_path: Path):
    for flag in WEIGHTS:
        turns = [USER, {**ANSWER, flag: False}, USER, {**FIVE, flag: 1.0}]
        other = [{"from": turn["role"], "value": turn["content"], **turn} for turn in turns]
        for row in ({"messages": turns}, {"conversations": other}):
            ((_, example),) = read_examples(write_rows(tmp_path / "a.jsonl", [row]))
            assert [message.weight for message in example.conversations[0]] == [1, 0, 1, 1]


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.*")}


def test_preparing_again_changes_nothing(tmp_path: Path):
    first, rows = tmp_path / "a", chats(9)
    for name in ("a", "b", "a"):
        prepare(tmp_path, rows, name)
    expected = read_files(tmp_path / "b")
    assert read_files(first) == expected
    manifest = first / "manifest.json"
    time = manifest.stat().st_mtime_ns
    prepare(tmp_path, rows, "a")
    assert manifest.stat().st_mtime_ns == time
    manifest.unlink()
    with pytest.raises(DataError):
        prepare(tmp_path, rows, "a")
    # As a killed preparation leaves it.
    state = {"recipe": {}, "listing": "", "position": [0, 0, ""], "counts": {}}
    state["tokens"] = {"train": 0, "val": 0}
    (first / "progress.json").write_text(json.dumps(state))
    prepare(tmp_path, rows, "a")
    assert read_files(first) == expected


def test_an_interrupted_preparation_of_text_is_kept(tmp_path: Path):
    text, out = tmp_path / "a.txt", tmp_path / "data"
    text.write_text("0123456789" * 200)
    prepare_numbers = partial(prepare_text, text, out, tokenizer="bytes", shard_tokens=100)
    with pytest.raises(ZeroDivisionError):
        prepare_numbers(on_progress=lambda _: 1 / 0)
    expected = read_files(out)
    assert len(expected) > 10
    with pytest.raises(DataError):
        prepare(tmp_path, chats(9))
    assert read_files(out) == expected
    assert prepare_numbers().resumed


def test_a_row_longer_than_the_context_is_refused_or_skipped(tmp_path: Path):
    n_other = len(TEMPLATE.encode(parse_messages([USER, ANSWER], ""))[0]) - len("2+2")

    def row(length):
        return {"messages": [{**USER, "content": "u" * (length - n_other)}, ANSWER]}

    assert len(open_rows(prepare(tmp_path, [row(65)]), "train")) == 1
    rows = [row(60), row(70), row(66)]
    with pytest.raises(DataError, match=r"rows.jsonl:2"):  # the longest
        prepare(tmp_path, rows, "other")
    manifest = prepare(tmp_path, rows, "other", long="skip").manifest
    assert manifest.documents == {"train": 1, "val": 0}
    assert manifest.source["counts"] == {"skipped": 2}


# The number of the line that cannot be used, and lines.
BAD_ROWS = """\
2: GOOD | {"messages": [USER]}
2: GOOD | {"messages": [{"role": "tool", "content": "x"}]}
2: GOOD | {"prompt": "a", "completion": "b"}
2: GOOD | {"chat": 1}
2: GOOD | 3
2: GOOD | {broken
1: {"conversations": [{"from": "function_call", "value": "x"}]}
1: {"conversations": ["a"]}
1: {"messages": [USER, {"role": "assistant", "content": "4", "weight": 0}]}
1: {"messages": [USER, ANSWER], "weight": 0.5}
1: {"messages": [USER, ANSWER, USER], "kto_tag": true}
2: {"prompt": "a", "completion": "b", "label": true} | {"prompt": "a", "completion": "b"}
1: {"instruction": " ", "output": "x"}
1: {"instruction": "a", "output": "b", "history": ["a"]}
1: {"instruction": "a", "output": "b", "input": ["a"]}
1: {"chosen": "Hi", "rejected": "Ho"}
1: {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}
2: {"prompt": "a", "chosen": "b", "rejected": "c"} | {"prompt": "a", "chosen": "c", "rejected": "c"}
1: {"prompt": "a", "chosen": [USER, USER], "rejected": "c"}
2: {"prompt": "a", "answer": "1"} | {"prompt": "b"}
1: {"prompt": "a", "answer": "c", "completion": ""}
1: {"prompt": [USER, ANSWER], "answer": "1"}
1: {"prompt": "a", "answer": ""}
1: {"prompt": "a", "answer": null}
1: {"prompt": "a", "answer": [4]}
1: {"question": "a", "choices": ["b", "c"], "answer": 1}
1: {"prompt": "a", "completion": "b", "label": "yes"}
2: {"messages": [USER, ANSWER], "label": 1.0} | {"messages": [USER, ANSWER], "label": "good"}
1: {"system": "a", "question": "b", "chosen": "c", "rejected": "d"}
1: {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, ANSWER]}
1: {"messages": [USER, ANSWER], "chat_template_kwargs": [1]}
1: {"messages": "\udce9"}
1: {"messages": "text"}
1: {"messages": []}
1: {"messages": [USER, USER]}
1: {"messages": ["x", ANSWER]}
1: {"messages": [{"content": "x"}, ANSWER]}
1: {"messages": [{"role": "critic", "content": "x"}, ANSWER]}
1: {"messages": [{"role": [], "content": "x"}, ANSWER]}
1: {"messages": [{"role": "user", "content": null}, ANSWER]}
1: {"messages": [{"role": "user", "content": 2}, ANSWER]}
1: {"messages": [{"role": "user", "content": " "}, ANSWER]}
1: {"messages": [USER, {"role": "assistant", "content": " "}]}
1: {"messages": [USER, {"role": "assistant", "content": null}]}
1: {"messages": [USER, {"role": "assistant", "content": ""}, USER, ANSWER]}
1: {"messages": [USER, {"role": "assistant", "content": "4", "weight": 0.5}]}
1: {"messages": [USER, {"role": "assistant", "content": "4", "tool_calls": 1}]}
1: {"prompt": [USER, ANSWER], "completion": [{"role": "assistant", "content": " "}]}
"""


@pytest.mark.parametrize("row", BAD_ROWS.splitlines())
def test_rows_that_cannot_be_used_are_refused(row: str, tmp_path: Path):
    line, text = row.split(": ", 1)
    path = tmp_path / "rows.jsonl"
    path.write_text(fill_in(text).replace(" | ", "\n"), errors="surrogateescape")
    with pytest.raises(DataError, match=rf"rows\.jsonl:{line}\b"):
        prepare_chats(find_source(str(path)), tmp_path / "data", BYTES, seq_len=64)
    assert not (tmp_path / "data/manifest.json").exists()


def test_a_pair_is_compared_after_the_template(tmp_path: Path):
    llama = load_tokenizer("bytes").add_special_tokens([*LLAMA_3, "<|begin_of_text|>"], "llama")
    source = write_rows(tmp_path / "rows.jsonl", [PAIR, {**PAIR, "rejected": "b "}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):  # its template strips
        prepare_chats(source, tmp_path / "data", llama, seq_len=64)


def test_bad_rows_are_skipped_and_counted(tmp_path: Path):
    bad = [3, {"messages": [USER]}, {"prompt": "a"}, {"text": "a"}]
    bad.append({"messages": [USER, {**ANSWER, "role": "bot"}]})
    for number, rows in enumerate(([bad[0], GOOD, *bad[1:], GOOD], [*bad[::-1], GOOD, GOOD])):
        manifest = prepare(tmp_path, rows, str(number), invalid="skip").manifest
        assert manifest.documents == {"train": 2, "val": 0}
        assert manifest.source["counts"] == {"skipped": 5}
    with pytest.raises(DataError):
        prepare(tmp_path, bad, "none", invalid="skip")


def test_the_first_rows_identify_the_format(tmp_path: Path):
    def peek(row):
        write_rows(tmp_path / "rows.jsonl", [row])
        found = peek_format(find_source(str(tmp_path)), "text")
        return found and found.name

    (tmp_path / "README.md").write_text("# Rows")  # a dataset card
    names = [peek(row) for row in ({"text": "a"}, GOOD, {"title": "a"})]
    assert names == [None, "messages", None]
    with pytest.raises(DataError, match=r"output.*response"):
        peek({"instruction": "a", "input": ""})
