"""Test chat templates: ids equal to transformers', and no control token from a content."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megatoken.data.chat_template import (
    CHATML,
    LLAMA_3,
    ChatTemplate,
    Message,
    add_control_tokens,
    find_template,
    parse_messages,
    template_of,
)
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.errors import ConfigError, DataError

PROSE = (
    "The cat sat on the mat; it didn't purr. user system assistant\n\nIl était une fois 12 chats.  "
    * 40
)
WORD_LIST = "cat, the,12,\n,  ,été,?!,日本,\t,it's,user\n,🙂, ,<|im_end|"
WORDS = tuple(WORD_LIST.split(","))


@pytest.fixture(scope="module")
def chatml() -> ChatTemplate:
    return find_template(add_control_tokens(load_tokenizer("bpe:400", lambda: iter([PROSE]))))


@pytest.fixture(scope="module")
def llama3() -> ChatTemplate:
    """A tokenizer with Llama-3's tokens, which puts begin-of-text before every text."""
    inner = tokenizers.Tokenizer.from_str(
        load_tokenizer("bpe:400", lambda: iter([PROSE])).to_json()
    )
    inner.add_special_tokens(["<|begin_of_text|>", *LLAMA_3])
    bos = inner.token_to_id("<|begin_of_text|>")
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    return find_template(Tokenizer(inner, "small", inner.token_to_id("<|endoftext|>")))


def make_text(rng: random.Random, parts: tuple[str, ...] = WORDS) -> str:
    return "".join(rng.choices(parts, k=rng.randrange(12))) + rng.choice(("x", "cat", "12"))


def make_conversation(rng: random.Random, parts: tuple[str, ...] = WORDS) -> list[Message]:
    roles = ["system"] * rng.randrange(2) + ["user", "assistant"] * rng.randrange(1, 4)
    return [Message(role, make_text(rng, parts)) for role in roles]


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_ids_and_mask_are_those_of_transformers(name: str, request: pytest.FixtureRequest):
    transformers = pytest.importorskip("transformers")
    template: ChatTemplate = request.getfixturevalue(name)
    inner = tokenizers.Tokenizer.from_str(template.tokenizer.to_json())
    oracle = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=template.jinja
    )
    rng = random.Random(0)
    n_trained = 0
    for number in range(1000):
        messages = make_conversation(rng)
        rows = [{"role": message.role, "content": message.content} for message in messages]
        ids, trained = template.encode(messages)
        expected = oracle.apply_chat_template(
            rows, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == expected["input_ids"]
        assert trained == [bool(mark) for mark in expected["assistant_masks"]]
        if number % 10 == 0:
            prompt = oracle.apply_chat_template(
                rows[:-1], tokenize=True, add_generation_prompt=True, return_dict=True
            )
            assert template.encode(messages[:-1], reply=True)[0] == prompt["input_ids"]
        n_trained += sum(trained)
    assert n_trained > 10_000


def test_chatml_as_it_is_written(chatml: ChatTemplate):
    ids, trained = chatml.encode([Message("user", "2 cats?"), Message("assistant", "the cat")])
    text = "<|im_start|>user\n2 cats?<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n"
    decode = chatml.tokenizer.decode
    assert decode(ids) == text
    assert (
        decode([id for id, mark in zip(ids, trained, strict=True) if mark]) == "the cat<|im_end|>"
    )
    assert chatml.stop_ids == (chatml.tokenizer.special_ids["<|im_end|>"], chatml.tokenizer.eot)
    prompt, marks = chatml.encode([Message("user", "2 cats?")], reply=True)
    assert (ids[: len(prompt)], any(marks)) == (prompt, False)


def test_control_tokens_follow_the_last_id():
    plain = load_tokenizer("bytes")
    chat = add_control_tokens(plain)
    assert chat.special_ids == {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    assert (chat.vocab_size, chat.name, chat.eot) == (259, "bytes-chatml", 256)
    assert chat.split_points == "anywhere"
    assert chat.encode("<|im_end|>").tolist() == list(b"<|im_end|>")
    assert chat.fingerprint != plain.fingerprint
    assert add_control_tokens(chat) is chat
    assert chat.count_bytes(np.zeros((1, 3), int), np.array([[256, 257, 258]])) == 0


USER = {"role": "user", "content": "2+2"}
ANSWER = {"role": "assistant", "content": "4"}


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": [2, 2]}'}}


@pytest.mark.parametrize(
    "rows",
    [
        *([], "text", [USER], [USER, USER], [{"role": "critic", "content": "x"}]),
        *([{"content": "x"}], ["x"], [{"role": [], "content": "x"}], [USER, {"role": "assistant"}]),
        *([{"role": "user", "content": content}, ANSWER] for content in (None, 2, " ", "a\ud800")),
        *([USER, {**ANSWER, **row}] for row in ({"weight": 0.5}, {"weight": 0}, {"content": " "})),
        *([USER, {**ANSWER, **row}] for row in ({"tool_calls": 1}, {"name": "a\ud800"})),
    ],
)
def test_rows_that_are_not_a_conversation_are_refused(rows: object):
    with pytest.raises(DataError):
        parse_messages(rows, "f:3")


def test_messages_keep_their_order_and_other_keys():
    roles = ("developer", "user", "user", "assistant", "tool", "assistant", "system", "assistant")
    rows = [{"role": role, "content": role[0], "name": "n"} for role in roles]
    expected = [Message(role, role[0], fields={"name": "n"}) for role in roles]
    assert parse_messages(rows, "f:1") == expected
    calls = [{**CALL, "function": {"name": "add", "arguments": {"a": [2, 2]}}}]
    row = {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 1}
    assert parse_messages([USER, row], "f:1")[1] == Message(
        "assistant", "", 1, {"tool_calls": calls}
    )
    parts = [{"type": "text", "text": text} for text in ("2", "+2")]
    assert parse_messages([{**USER, "content": parts}, ANSWER], "f:1")[0] == Message("user", "2+2")


def test_messages_to_answer_do_not_end_with_an_answer():
    expected = [Message("user", "2+2"), Message("assistant", "4")]
    assert parse_messages([USER, ANSWER], "f:1") == expected
    assert parse_messages([USER], "body", reply=True) == expected[:1]
    tool = {"role": "tool", "content": "", "tool_call_id": "c1"}
    assert parse_messages([USER, tool], "body", reply=True)[1].content == ""
    with pytest.raises(DataError):
        parse_messages([USER, ANSWER], "body", reply=True)


def write_own(folder: Path, tokens: list[str], jinja: str) -> Tokenizer:
    """Return a tokenizer loaded from a Hugging Face folder that has a chat template."""
    base = load_tokenizer("bpe:400", lambda: iter([PROSE]))
    inner = tokenizers.Tokenizer.from_str(base.to_json())
    inner.add_special_tokens(["<s>", *tokens])
    folder.mkdir(exist_ok=True)
    inner.save(f"{folder}/tokenizer.json")
    begin = {"__type": "AddedToken", "content": "<s>"}
    config = {"bos_token": begin, "eos_token": "<|endoftext|>"}
    config["chat_template"] = jinja
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_no_control_token_comes_from_a_content(name: str, request: pytest.FixtureRequest):
    """5,000 messages made of control tokens, parts of them, placeholders, jinja and text."""
    template: ChatTemplate = request.getfixturevalue(name)
    rng = random.Random(1)
    tokens = (*CHATML, *LLAMA_3, *template.tokenizer.special_ids, "<|begin_of_text|>", "<s>")
    parts = (*tokens, *(token[:-1] for token in tokens), "|>", "<", *WORDS)
    parts += ("\ue000", "\ue001", "{{ bos_token }}", "{% endfor %}")
    control = set(template.tokenizer.special_ids.values())
    roles = [["user"], ["user", "assistant"]]

    def count(messages: list[Message]) -> int:
        return sum(id in control for id in template.encode(messages)[0])

    expected = [count([Message(role, "x") for role in order]) for order in roles]
    for _ in range(2500):
        for order, number in zip(roles, expected, strict=True):
            messages = [Message(role, make_text(rng, parts)) for role in order]
            assert count(messages) == number, messages


BAD = {
    "no control token after an answer": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "control token of parts": "{% for m in messages %}{{ m.content }}<end>{{ '<' ~ 's>' }}{% endfor %}",
    "contents dropped": "{{ messages[-1].content }}<end>",
    "contents out of order": "{% for m in messages | reverse %}{{ m.content }}<end>{% endfor %}",
    "rejects": "{{ raise_exception('no') }}",
    "does not parse": "{% for %}",
    "attributes": "{{ ''.__class__.__mro__ }}{% for m in messages %}{{ m.content }}<end>{% endfor %}",
}


@pytest.mark.parametrize("name", BAD)
def test_an_unusable_template_is_refused(tmp_path: Path, name: str):
    tokenizer = write_own(tmp_path, ["<end>"], BAD[name])
    for function in (find_template, add_control_tokens):
        with pytest.raises(ConfigError):
            function(tokenizer)
    assert template_of(tokenizer) is None


def test_tokenizers_without_a_usable_template_are_refused():
    with pytest.raises(ConfigError):
        find_template(load_tokenizer("bytes"))
    vocabulary = {token: id for id, token in enumerate(["<|im_start|>", "a", "<|endoftext|>"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    with pytest.raises(DataError):  # a control token that is ordinary text
        add_control_tokens(Tokenizer(inner, "words", 2))
