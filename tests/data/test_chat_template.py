"""Chat templates: ids and masks equal to transformers', control tokens from the template alone, what is refused."""

import random

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
)
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.errors import MegatokenError

PROSE = (
    "The cat sat on the mat; it didn't purr. user system assistant\n\nIl était une fois 12 chats.  "
    * 40
)
WORDS = (
    "cat",
    " the",
    "12",
    "\n",
    "  ",
    "été",
    "?!",
    "日本",
    "\t",
    "it's",
    "user\n",
    "<|im_end|",
    "🙂",
    " ",
)


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
def test_ids_and_mask_are_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
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


def test_chatml_as_it_is_written(chatml: ChatTemplate) -> None:
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


def test_no_control_token_comes_from_content(chatml: ChatTemplate, llama3: ChatTemplate) -> None:
    """10,000 messages made of control tokens, parts of them and text."""
    rng = random.Random(1)
    special = (*CHATML, *LLAMA_3, "<|endoftext|>", "<|begin_of_text|>")
    parts = (*special, *(token[:-1] for token in special), "|>", "<", *WORDS)
    for template in (chatml, llama3):
        control = set(template.tokenizer.special_ids.values())
        count = {
            role: sum(id in control for id in template.encode([Message(role, "x")])[0])
            for role in ("user", "assistant")
        }
        for _ in range(5000):
            message = Message(rng.choice(("user", "assistant")), make_text(rng, parts))
            ids, _ = template.encode([message])
            assert sum(id in control for id in ids) == count[message.role], message


def test_control_tokens_follow_the_last_id() -> None:
    plain = load_tokenizer("bytes")
    chat = add_control_tokens(plain)
    assert chat.special_ids == {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    assert (chat.vocab_size, chat.name, chat.eot) == (259, "bytes-chatml", 256)
    assert chat.split_points == "anywhere"
    assert chat.encode("<|im_end|>").tolist() == list(b"<|im_end|>")
    assert chat.fingerprint != plain.fingerprint
    assert add_control_tokens(chat) is chat
    assert chat.count_bytes(np.zeros((1, 3), int), np.array([[256, 257, 258]])) == 0


def test_a_tokenizer_without_a_known_template_is_refused() -> None:
    with pytest.raises(
        MegatokenError, match="bytes has no chat template — give the model one: megatoken train sft"
    ):
        find_template(load_tokenizer("bytes"))
    other = load_tokenizer("bytes").add_special_tokens(["<start_of_turn>"], "mine")
    for function in (find_template, add_control_tokens):
        with pytest.raises(MegatokenError, match="tokenizer mine has the chat template of Gemma"):
            function(other)


def test_control_tokens_that_are_text_of_the_vocabulary_are_refused() -> None:
    vocabulary = {
        character: id for id, character in enumerate(["<|im_start|>", "a", "<|endoftext|>"])
    }
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    with pytest.raises(MegatokenError, match="cannot be added as special tokens"):
        add_control_tokens(Tokenizer(inner, "words", 2))


USER, ANSWER = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "a conversation is a list of messages — f:3"),
        ("text", "a conversation is a list of messages — f:3"),
        ([USER], "no message of the assistant to train on — f:3"),
        ([USER, USER, ANSWER], "two messages of the user in a row — f:3, message 2"),
        ([USER, ANSWER, ANSWER], "two messages of the assistant in a row — f:3, message 3"),
        ([USER, {"role": "system", "content": "x"}, ANSWER], "a system message is not the first — f:3, message 2"),
        ([{"role": "tool", "content": "x"}], "unknown role 'tool' — f:3, message 1 — roles are system, user"),
        ([{"content": "x"}], "unknown role None — f:3, message 1"),
        (["x"], "unknown role None"),
        ([{"role": [], "content": "x"}], r"unknown role \[\]"),
        ([{"role": "user", "content": " \n"}, ANSWER], "the user's content is empty — f:3, message 1"),
        ([{"role": "user", "content": None}, ANSWER], "the content is no text — f:3, message 1"),
        ([USER, {"role": "assistant", "content": "a\ud800"}], "half of a surrogate pair, which is no text — f:3"),
    ],
)  # fmt: skip
def test_what_is_no_conversation(rows: object, message: str) -> None:
    with pytest.raises(MegatokenError, match=message):
        parse_messages(rows, "f:3")


def test_messages_to_answer() -> None:
    assert parse_messages([USER, ANSWER], "f:1") == [
        Message("user", "2+2"),
        Message("assistant", "4"),
    ]
    assert parse_messages([USER], "body", reply=True) == [Message("user", "2+2")]
    with pytest.raises(
        MegatokenError,
        match="the last message is the assistant's — body — end with one of the user",
    ):
        parse_messages([USER, ANSWER], "body", reply=True)
