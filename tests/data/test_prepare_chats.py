"""Conversations to a dataset: formats, what is trained, packing, the split, and every row that cannot be used."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megatoken.data.chat_dataset import find_kind, open_rows, read_answers, require_kind
from megatoken.data.chat_formats import peek_format, read_examples
from megatoken.data.chat_template import LLAMA_3, Message, add_control_tokens, find_template
from megatoken.data.dataset import load_dataset
from megatoken.data.prepare import prepare as prepare_text
from megatoken.data.prepare_chats import _pack, prepare_chats
from megatoken.data.sources import find_source
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import DataError

SYSTEM, USER, ANSWER = (
    {"role": r, "content": c} for r, c in (("system", "Add."), ("user", "2+2"), ("assistant", "4"))
)
GOOD = {"messages": [USER, ANSWER]}
BYTES = add_control_tokens(load_tokenizer("bytes"))
TEMPLATE = find_template(BYTES)


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:  # a file that changes is noticed
        path.write_text(text)
    return str(path)


def prepare(tmp_path: Path, rows: Sequence[Any], out: str = "data", **options: Any) -> Path:
    source = find_source(write_rows(tmp_path / "rows.jsonl", rows))
    prepare_chats(source, tmp_path / out, load_tokenizer("bytes"), **{"seq_len": 64, **options})
    return tmp_path / out


def chats(count: int) -> list[dict[str, Any]]:
    answers = ["x" * (1 + n * 7 % 23) for n in range(count)]
    return [
        {"messages": [{**USER, "content": f"{n}?"}, {**ANSWER, "content": answer}]}
        for n, answer in enumerate(answers)
    ]


PLAIN = [Message("user", "2+2"), Message("assistant", "4")]


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
"""
ROLES = {"Add.": "system", "NULL": "system", "4": "assistant"}


def fill_in(text: str) -> str:
    for name, value in (("GOOD", GOOD), ("SYSTEM", SYSTEM), ("USER", USER), ("ANSWER", ANSWER)):
        text = text.replace(name, json.dumps(value))
    return text


@pytest.mark.parametrize("line", FORMATS.strip().splitlines())
def test_formats_of_conversations(line: str, tmp_path: Path):
    row, contents = fill_in(line).split(" -> ")
    (tmp_path / "a.jsonl").write_text(row)
    ((found, example),) = read_examples(find_source(f"{tmp_path}/a.jsonl"))
    texts = [text.replace(r"\n", "\n") for text in contents.split()]
    messages = [Message(ROLES.get(text, "user"), text.replace("NULL", "")) for text in texts]
    assert (found.kind, example.answers) == ("chat", [messages])


OTHER_KINDS = """
{"prompt": "2+2", "chosen": "4", "rejected": "5"}
{"conversations": [{"from": "human", "value": "2+2"}], "chosen": {"from": "gpt", "value": "4"}, \
"rejected": {"from": "gpt", "value": "5"}}
{"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "5"}]}
{"prompt": "2+2", "completion": "4", "label": true}
{"messages": [USER, ANSWER], "kto_tag": false}
{"prompt": "2+2", "answer": "4"}
{"question": "2+2", "answer": "4"}
"""


@pytest.mark.parametrize("line", OTHER_KINDS.replace("\\\n", "").strip().splitlines())
def test_the_system_message_comes_first(line: str, tmp_path: Path):
    row = json.loads(fill_in(line))
    for number, system in enumerate((None, "Add.")):
        path = write_rows(tmp_path / f"{number}.jsonl", [{**row, "system": system}])
        ((_, example),) = read_examples(find_source(path))
        first = [Message("system", "Add.")] if system else []
        assert example.prompt == [*first, PLAIN[0]]
        assert all(answer[:-1] == example.prompt for answer in example.answers)


def test_rows_hold_whole_conversations_and_say_what_is_trained(tmp_path: Path):
    dataset = load_dataset(prepare(tmp_path, chats(40), val_fraction=0.2))
    found = []
    for split in ("train", "val"):
        rows = open_rows(dataset, split)
        ids, marks = rows.read(np.arange(len(rows)))
        assert ids.shape == (len(rows), 65)
        assert (
            marks[:, 0] == 2
        ).all()  # a conversation starts in front, and its first token is not trained
        for row_ids, row_marks in zip(ids, marks, strict=True):
            kept = row_marks < 4
            assert (row_ids[~kept] == BYTES.eot).all()
            pieces = np.split(np.arange(kept.sum()), np.flatnonzero(row_marks[kept] & 2)[1:])
            found += [
                (row_ids[at].tolist(), (row_marks[at] & 1).astype(bool).tolist()) for at in pieces
            ]
        assert len(rows) * 65 == len(getattr(dataset, split))
    expected = [TEMPLATE.encode([Message(**m) for m in row["messages"]]) for row in chats(40)]
    assert sorted(found) == sorted(expected)
    assert dataset.manifest.documents["val"] == 5
    assert dataset.manifest.source["template"] == "chatml"
    assert dataset.tokenizer.fingerprint == BYTES.fingerprint


def test_shards_have_marks_of_their_own(tmp_path: Path):
    whole = load_dataset(prepare(tmp_path, chats(30), "whole"))
    parts = load_dataset(prepare(tmp_path, chats(30), "parts", shard_tokens=100))
    assert len(parts.shards) > 4
    for split in ("train", "val"):
        rows = [open_rows(each, split) for each in (whole, parts)]
        for one, other in zip(*(each.read(np.arange(len(each))) for each in rows), strict=True):
            assert np.array_equal(one, other)


def test_the_fullest_row_takes_a_conversation():
    sizes = [3, 9, 2, 5, 5, 1, 7, 10]
    sequences = [(np.zeros(n, np.uint32), np.zeros(n, np.uint8)) for n in sizes]
    rows = [[len(ids) for ids, _ in row] for row in _pack(sequences, 10)]
    assert rows == [[10], [9, 1], [3, 7], [5, 5], [2]]


def test_the_same_prompt_is_in_one_split(tmp_path: Path):
    rows = [{"prompt": f"question {n % 10}", "completion": f"answer {n}"} for n in range(200)]
    dataset = load_dataset(prepare(tmp_path, rows, val_fraction=0.3))
    assert all(count % 20 == 0 and count for count in dataset.manifest.documents.values())
    few = load_dataset(prepare(tmp_path, rows[:3], "few", val_fraction=0.01))
    assert few.manifest.documents == {"train": 2, "val": 1}


PREFERENCES = [
    '{"prompt": "2+2", "chosen": "4", "rejected": "5"}',
    '{"prompt": [USER, ANSWER, USER], "chosen": "6", "rejected": [{"role": "assistant", "content": "7"}]}',
    '{"messages": [], "prompt": [USER], "chosen": [USER, ANSWER], '  # as in UltraFeedback
    '"rejected": [USER, {"role": "assistant", "content": "no"}]}',
]
IMPLICIT_PROMPTS = [
    '{"chosen": [USER, ANSWER, USER, ANSWER], '
    '"rejected": [USER, ANSWER, USER, {"role": "assistant", "content": "5"}]}',
    r'{"chosen": "\n\nHuman: 2+2\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2\n\nAssistant: 5"}',
]


def test_preferences_are_pairs_of_rows(tmp_path: Path):
    rows = [json.loads(fill_in(row)) for row in PREFERENCES]
    dataset = load_dataset(prepare(tmp_path, rows, val_fraction=0))
    pairs = open_rows(dataset, "train")
    texts = []
    for row in range(len(pairs)):
        ids, trained = pairs.sequence(row)
        texts.append(BYTES.decode([id for id, mark in zip(ids, trained, strict=True) if mark]))
    assert texts == [f"{answer}<|im_end|>" for answer in ("4", "5", "6", "7", "4", "no")]
    assert BYTES.decode(pairs.sequence(3)[0]).count("assistant") == 2
    assert find_kind(dataset.manifest) == "preference"


def test_prompts_keep_their_answers(tmp_path: Path):
    rows = [{"prompt": f"{n}+1", "answer": n + 1, "level": "easy"} for n in range(20)]
    dataset = load_dataset(prepare(tmp_path, rows, val_fraction=0.2))
    found = []
    for split in ("train", "val"):
        prompts, answers = open_rows(dataset, split), read_answers(dataset, split)
        assert len(prompts) == len(answers) == dataset.manifest.documents[split] > 0
        for number, row in enumerate(answers):
            expected = TEMPLATE.encode([Message("user", row["prompt"])], reply=True)
            assert prompts.sequence(number) == expected
        found += answers
    assert sorted(found, key=lambda row: row["answer"]) == rows
    with pytest.raises(DataError):
        require_kind(dataset, "chat", "objective.name=sft")


def test_the_common_beginning_of_a_pair_is_its_prompt(tmp_path: Path):
    rows = [json.loads(fill_in(row)) for row in IMPLICIT_PROMPTS]
    explicit = [
        {"prompt": [USER, ANSWER, USER], "chosen": "4", "rejected": "5"},
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
    ]
    found, expected = (
        open_rows(load_dataset(prepare(tmp_path, each, out, val_fraction=0)), "train")
        for each, out in ((rows, "implicit"), (explicit, "explicit"))
    )
    assert [found.sequence(n) for n in range(4)] == [expected.sequence(n) for n in range(4)]


def test_preferences_of_llama_factory(tmp_path: Path):
    turns = [{"from": role, "value": text} for role, text in (("human", "2+2"), ("gpt", "4"))]
    rows = [
        {"conversations": turns[:1], "chosen": turns[1], "rejected": {**turns[1], "value": "5"}}
    ]
    found = open_rows(load_dataset(prepare(tmp_path, rows, val_fraction=0)), "train")
    for number, answer in enumerate("45"):
        messages = [Message("user", "2+2"), Message("assistant", answer)]
        assert found.sequence(number) == TEMPLATE.encode(messages)


def test_the_verifier_compares_the_number_of_gsm8k(tmp_path: Path):
    rows = [{"question": f"{n}+1?", "answer": f"{n}+1=1{n}\n#### 1,{n}"} for n in range(3)]
    dataset = load_dataset(prepare(tmp_path, rows, val_fraction=0))
    assert [row["answer"] for row in read_answers(dataset, "train")] == ["1,0", "1,1", "1,2"]
    assert open_rows(dataset, "train").sequence(0) == TEMPLATE.encode(
        [Message("user", "0+1?")], reply=True
    )


# Rows of prompt/completion and of messages, and what is rated.
RATED = [
    [
        {"prompt": "2+2", "completion": "4", "label": True},
        {"prompt": "2+2", "completion": "5", "label": "False"},
    ],
    [
        {"messages": [USER, {**ANSWER, "content": "no"}, USER, ANSWER], "kto_tag": 1},
        {"messages": [USER, {**ANSWER, "content": "5"}], "kto_tag": 0},
    ],
    [  # as pandas writes a column with gaps
        {"prompt": "2+2", "completion": "4", "label": 1.0},
        {"prompt": "2+2", "completion": "5", "label": "0.0"},
    ],
]


def decode_trained(ids: Sequence[int], trained: Sequence[bool]) -> str:
    return BYTES.decode([id for id, mark in zip(ids, trained, strict=True) if mark])


@pytest.mark.parametrize("rows", RATED)
def test_labels_are_marks_and_only_the_last_answer_is_rated(rows: list[Any], tmp_path: Path):
    dataset = load_dataset(prepare(tmp_path, rows, val_fraction=0))
    rated = open_rows(dataset, "train")
    assert find_kind(dataset.manifest) == "kto"
    assert [rated.is_desirable(row) for row in range(2)] == [True, False]
    for row, answer in enumerate("45"):
        assert decode_trained(*rated.sequence(row)) == f"{answer}<|im_end|>"


def test_keys_that_change_nothing_are_counted(tmp_path: Path):
    """Those that are set, except an id or a source, in the first door that all rows share."""
    extra = {"margin": 0.5, "images": [], "score_chosen": 0, "prompt_id": "7", "note": None}
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", **extra}, {**PAIR, "prompt": "d"}]
    manifest = load_dataset(prepare(tmp_path, rows)).manifest
    expected = {f"rows with unused {key}": 1 for key in ("margin", "score_chosen")}
    assert manifest.source["counts"] == {"skipped": 0, **expected}


def test_a_row_of_weight_0_is_left_out(tmp_path: Path):
    rows = [*chats(3), {**chats(4)[3], "weight": 0}]
    manifest = load_dataset(prepare(tmp_path, rows)).manifest
    assert sum(manifest.documents.values()) == 3
    assert manifest.source["counts"] == {"skipped": 1}


def test_damaged_marks_are_noticed(tmp_path: Path):
    folder = prepare(tmp_path, chats(9))
    (folder / "train_000000.marks").write_bytes(bytes(65))
    with pytest.raises(DataError, match=r"train_000000\.marks"):
        open_rows(load_dataset(folder), "train")


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize("flag", ["weight", "train", "trainable", "loss", "loss_mask"])
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_an_answer_of_weight_0_is_context(key: str, flag: str, tmp_path: Path):
    is_weight = "weight" in flag or "mask" in flag
    off, on = (0, 1.0) if is_weight else (False, True)
    turns = [
        USER,
        {**ANSWER, flag: off},
        {"role": "user", "content": "3+3"},
        {**ANSWER, "content": "6", flag: on},
    ]
    if key == "conversations":
        turns = [
            {"from": row.pop("role"), "value": row.pop("content"), **row}
            for row in map(dict, turns)
        ]
    dataset = load_dataset(prepare(tmp_path, [{key: turns}]))
    ids, trained = open_rows(dataset, "train").sequence(0)
    assert decode_trained(ids, trained) == "6<|im_end|>"
    assert "4<|im_end|>" in BYTES.decode(ids)


@pytest.mark.parametrize("earlier", [[USER, ANSWER, USER], [USER, ANSWER]])
def test_answers_in_a_prompt_are_context(earlier: list[Any], tmp_path: Path):
    """As in trl, which trains on the completion alone."""
    rows = [{"prompt": earlier, "completion": [{**ANSWER, "content": "6"}]}]
    ids, trained = open_rows(load_dataset(prepare(tmp_path, rows)), "train").sequence(0)
    assert decode_trained(ids, trained) == "6<|im_end|>"
    assert "4<|im_end|>" in BYTES.decode(ids)
    rows[0]["completion"][0]["content"] = " "  # "4" is no answer to train on
    with pytest.raises(DataError):
        prepare(tmp_path, rows, "blank")


def test_parquet_of_messages(tmp_path: Path):
    parquet.write_table(
        pyarrow.table({"messages": [[USER, ANSWER]], "id": [1]}), tmp_path / "a.parquet"
    )
    ((_, example),) = read_examples(find_source(str(tmp_path)))
    assert example.answers == [PLAIN]


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.*")}


def test_preparing_again_changes_nothing(tmp_path: Path):
    first, second = (prepare(tmp_path, chats(9), out) for out in ("a", "b"))
    assert read_files(first) == read_files(second)
    time = (first / "manifest.json").stat().st_mtime_ns
    prepare(tmp_path, chats(9), "a")
    assert (first / "manifest.json").stat().st_mtime_ns == time
    (first / "manifest.json").unlink()
    with pytest.raises(DataError):
        prepare(tmp_path, chats(9), "a")
    state = {"recipe": {}, "listing": "", "position": [0, 0, 1, ""], "counts": {}}
    state["tokens"] = {"train": 0, "val": 0}
    (first / "progress.json").write_text(json.dumps(state))  # as a killed preparation leaves it
    prepare(tmp_path, chats(9), "a")
    assert read_files(first) == read_files(second)


def test_an_interrupted_preparation_of_text_is_kept(tmp_path: Path):
    text = tmp_path / "a.txt"
    out = tmp_path / "data"
    text.write_text("0123456789" * 200)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_text(text, out, tokenizer="bytes", shard_tokens=100, on_progress=interrupt)
    expected = read_files(out)
    assert len(expected) > 10
    with pytest.raises(DataError):
        prepare(tmp_path, chats(9))
    assert read_files(out) == expected
    assert prepare_text(text, out, tokenizer="bytes", shard_tokens=100).resumed


def test_a_row_longer_than_the_context_is_refused_or_skipped(tmp_path: Path):
    n_other = len(TEMPLATE.encode(PLAIN)[0]) - len("2+2")

    def row(length: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "u" * (length - n_other)}, ANSWER]}

    assert len(open_rows(load_dataset(prepare(tmp_path, [row(65)])), "train")) == 1
    rows = [row(60), row(70), row(66)]
    with pytest.raises(DataError, match=r"rows.jsonl:2"):  # the longest
        prepare(tmp_path, rows, "other")
    manifest = load_dataset(prepare(tmp_path, rows, "other", long="skip")).manifest
    assert (manifest.documents, manifest.source["counts"]) == (
        {"train": 1, "val": 0},
        {"skipped": 2},
    )


# The number of the line that cannot be used, and lines.
BAD_ROWS = """
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
"""


@pytest.mark.parametrize("row", BAD_ROWS.strip().splitlines())
def test_rows_that_cannot_be_used_are_refused(row: str, tmp_path: Path):
    line, text = row.split(": ", 1)
    path = tmp_path / "rows.jsonl"
    path.write_text(fill_in(text).replace(" | ", "\n"), errors="surrogateescape")
    with pytest.raises(DataError, match=rf"rows\.jsonl:{line}\b"):
        prepare_chats(find_source(str(path)), tmp_path / "data", BYTES, seq_len=64)
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_pair_is_compared_after_the_template(tmp_path: Path):
    llama = load_tokenizer("bytes").add_special_tokens([*LLAMA_3, "<|begin_of_text|>"], "llama")
    source = find_source(write_rows(tmp_path / "rows.jsonl", [PAIR, {**PAIR, "rejected": "b "}]))
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):  # its template strips
        prepare_chats(source, tmp_path / "data", llama, seq_len=64)


def test_bad_rows_are_skipped_and_counted(tmp_path: Path):
    bad = [3, {"messages": [USER]}, {"prompt": "a"}, {"text": "a"}]
    bad.append({"messages": [USER, {**ANSWER, "role": "bot"}]})
    for number, rows in enumerate(([bad[0], GOOD, *bad[1:], GOOD], [*bad[::-1], GOOD, GOOD])):
        manifest = load_dataset(prepare(tmp_path, rows, str(number), invalid="skip")).manifest
        assert manifest.documents == {"train": 2, "val": 0}
        assert manifest.source["counts"] == {"skipped": 5}
    with pytest.raises(DataError):
        prepare(tmp_path, bad, "none", invalid="skip")


def test_the_first_rows_identify_the_format(tmp_path: Path):
    def peek(rows: list[Any], text_key: str = "text") -> str | None:
        found = peek_format(find_source(write_rows(tmp_path / "rows.jsonl", rows)), text_key)
        return found and found.name

    assert peek([{"text": "a"}]) is None
    assert peek([GOOD]) == "messages"
    (tmp_path / "README.md").write_text("# Rows")  # a dataset card
    assert peek_format(find_source(str(tmp_path)), "text") is not None
    peek([{"text": "a"}])
    assert peek_format(find_source(str(tmp_path)), "text") is None
    assert peek([{"title": "a"}]) is None
    with pytest.raises(DataError, match=r"output.*response"):
        peek([{"instruction": "a", "input": ""}])
