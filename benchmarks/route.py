"""Compare a model in another program with ours: numbers, greedy text, tokens and conversations."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatoken.inference.conversation import Conversation
from megatoken.inference.generate import generate_ids
from megatoken.inference.sampling import Sampling
from megatoken.text.chat_template import Message, find_template, template_of
from megatoken.text.exercises import list_exercises
from megatoken.text.load_pretrained import LoadedModel

TEXT = "ROMEO: why, they're 12 cafés\n\nAnd the   rest — is silence.\n"
PROMPT, NEW = 4, 24
ANSWER = 48  # tokens at most, of a conversation


class Reply(NamedTuple):
    """A program's reply: ids of the conversation, the answer, and whether it stopped by itself
    (`stop`) or was cut.
    """

    prompt_ids: list[int]
    text: str
    finish_reason: str


def take_ids(loaded: LoadedModel) -> list[int]:
    """Return the first PROMPT ids of the text, or fewer, so that NEW more fit into the context."""
    return loaded.tokenizer.encode(TEXT).tolist()[: loaded.model.config.seq_len - NEW]


def list_chats(loaded: LoadedModel) -> list[list[dict[str, str]]]:
    """Return conversations that end with the user, or none if the model has no chat template."""
    if template_of(loaded.tokenizer) is None:
        return []
    user, system = ("user", "Spell café, please.\n"), ("system", "Be brief.")
    asked = [[("user", each.question)] for each in list_exercises(held_out=True)[:40]]
    chats = [
        *asked,
        [system, asked[0][0]],
        [system, user, ("assistant", "  c-a-f-é"), asked[1][0]],
        [user],
    ]
    return [[{"role": role, "content": content} for role, content in chat] for chat in chats]


def _answer(loaded: LoadedModel, chat: Sequence[dict[str, str]]) -> Reply:
    """Answer greedily, as `megatoken chat` does."""
    template, messages = find_template(loaded.tokenizer), [Message(**row) for row in chat]
    sampling = Sampling(max_new_tokens=ANSWER, temperature=0)
    answer = Conversation(loaded.model, template, sampling, messages=messages[:-1]).ask(
        messages[-1].content, len
    )
    return Reply(template.encode(messages, reply=True)[0], answer.text, answer.finish_reason)


def report(
    loaded: LoadedModel, found: Tensor, expected: Tensor, greedy: Sequence[int], tokens: Sequence[int],
    replies: Sequence[Reply], **facts: Any,
) -> None:  # fmt: skip
    """Print the comparison as a line of JSON. Raises AssertionError if replies differ."""
    ids = take_ids(loaded)
    result = {
        "model": loaded.source,
        "tokens": len(ids),
        "max_relative_difference": float((found - expected).abs().max() / expected.abs().max()),
        "same_greedy_text": list(greedy)
        == generate_ids(loaded.model, ids[:PROMPT], Sampling(max_new_tokens=NEW, temperature=0))[0],
        "same_tokens": list(tokens) == loaded.tokenizer.encode(TEXT).tolist(),
        **facts,
    }
    if replies:
        ours = [_answer(loaded, chat) for chat in list_chats(loaded)]
        result["conversations"] = len(ours)
        for name in Reply._fields:
            result[f"same_{name}"] = sum(
                getattr(reply, name) == getattr(own, name)
                for reply, own in zip(replies, ours, strict=True)
            )
        result["stopped_by_themselves"] = sum(own.finish_reason == "stop" for own in ours)
    print(json.dumps(result))
    assert result["max_relative_difference"] < 1e-4
    assert result["same_greedy_text"]
    assert result["same_tokens"]
    assert all(result[f"same_{name}"] == len(replies) for name in Reply._fields if replies)
