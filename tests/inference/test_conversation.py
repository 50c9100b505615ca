"""Conversations: answers follow from the messages that fit; the oldest turns are dropped."""

from copy import copy
from functools import partial

import pytest

from megatoken.base.errors import ConfigError
from megatoken.inference.conversation import Answer, Conversation, fit_context
from megatoken.inference.generate import generate_ids
from megatoken.inference.sampling import Sampling
from megatoken.text.chat_template import ChatTemplate, Message
from tests.convert.models import TEMPLATE, draw_chat_model

ENCODE = partial(TEMPLATE.encode, reply=True)
MODEL = draw_chat_model()
SYSTEM = Message("system", "s")
HELLO = Message("user", "hello")
THERE = Message("assistant", "there")
MORE = Message("user", "more")


def make_conversation(template: ChatTemplate = TEMPLATE, **values: object) -> Conversation:
    sampling = Sampling(**{"max_new_tokens": 8, "temperature": 0} | values)
    return Conversation(MODEL, template, sampling, messages=[SYSTEM])


def test_an_answer_follows_from_all_messages():
    conversation = make_conversation()
    parts = []
    first = conversation.ask("hello", parts.append)
    second = conversation.ask("more", str)
    assert "".join(parts) == first.text
    turns = [HELLO, Message("assistant", first.text), MORE, Message("assistant", second.text)]
    assert conversation.messages == [SYSTEM, *turns]
    for answer, n in ((first, 2), (second, 4)):
        ids, _ = ENCODE(conversation.messages[:n])
        [expected] = generate_ids(MODEL, ids, Sampling(max_new_tokens=8, temperature=0))
        text = TEMPLATE.tokenizer.decode(expected)
        assert answer == Answer(text, expected, len(ids), "length")
    conversation.clear()
    assert conversation.messages == [SYSTEM]
    assert conversation.ask("hello", str) == first


def test_variables_reach_the_template():
    jinja = TEMPLATE.jinja + "{{ '<think></think>' if enable_thinking is false }}"
    plain, other = (
        make_conversation(ChatTemplate("own", TEMPLATE.tokenizer, jinja)) for _ in range(2)
    )
    other.variables = {"enable_thinking": False}
    n_more = other.ask("hello", str).prompt_tokens - plain.ask("hello", str).prompt_tokens
    assert n_more == len("<think></think>")


def test_a_stop_token_ends_an_answer():
    template = copy(TEMPLATE)
    template.stop_ids = (make_conversation().ask("hello", str).ids[2], TEMPLATE.tokenizer.eot)
    answer = make_conversation(template).ask("hello", str)
    assert (len(answer.ids), answer.finish_reason) == (2, "stop")


def test_answers_draw_by_their_number():
    conversations = [make_conversation(temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (each.ask("hello", str) for each in conversations)
    assert first == again != other
    second = conversations[0].ask("more", str)
    ids, _ = ENCODE(conversations[0].messages[:-1])
    sampling = Sampling(max_new_tokens=8, seed=2, stop_ids=TEMPLATE.stop_ids)
    assert [second.ids] == generate_ids(MODEL, ids, sampling)


def test_full_turns_are_dropped_from_the_beginning():
    messages = [SYSTEM, HELLO, THERE, MORE, THERE, MORE]
    kept = {first: [SYSTEM, *messages[first:]] for first in (1, 3, 5)}
    ids = {first: ENCODE(kept[first])[0] for first in kept}
    for first in kept:  # 4 new tokens, of which the last is never read
        fitted = fit_context(ENCODE, messages, len(ids[first]) + 3, 4)
        assert fitted == (kept[first], ids[first])
    assert fit_context(ENCODE, messages, len(ids[1]) + 2, 4)[1] == ids[3]
    assert fit_context(ENCODE, messages[1:], len(ids[5]), 1)[0] == [MORE]
    with pytest.raises(ConfigError):
        fit_context(ENCODE, messages, len(ids[5]) + 2, 1000)


def test_the_conversation_continues_beyond_the_context():
    conversation = make_conversation()
    for _ in range(6):
        conversation.ask("x" * 20, str)
    assert conversation.dropped == 8
    with pytest.raises(ConfigError):
        conversation.ask("x" * 120, str)
    assert len(conversation.messages) == 5
    assert conversation.ask("y" * 60, str).finish_reason == "length"


def test_ctrl_c_ends_an_answer():
    full = make_conversation().ask("hello", str)
    conversation = make_conversation()
    parts = iter(range(3))

    def press_ctrl_c(part):
        if next(parts) == 2:
            raise KeyboardInterrupt

    answer = conversation.ask("hello", press_ctrl_c)
    assert (answer.ids, answer.finish_reason) == (full.ids[:3], "interrupted")
    assert conversation.messages[-1] == Message("assistant", answer.text)
    assert conversation.ask("more", str).prompt_tokens > full.prompt_tokens
