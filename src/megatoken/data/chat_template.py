"""Conversations as token ids, and which of them are trained: ChatML, and Llama-3 for a tokenizer that has its tokens.

A template's control tokens come from the template alone: content is encoded as text, whatever it spells. The trained
tokens are the content of the assistant and the stop token after it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import ConfigError, DataError

ROLES = ("system", "user", "assistant")
CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# Tokens by which a tokenizer of another program shows a template that we do not have.
OTHER_TEMPLATES = {
    "[INST]": "Mistral",
    "<start_of_turn>": "Gemma",
    "<|header_start|>": "Llama-4",
    "<|start_of_role|>": "Granite",
    "<|START_OF_TURN_TOKEN|>": "Command R",
    "<|user|>": "Zephyr or Phi",
    "<|start|>": "Harmony",
    "<｜User｜>": "DeepSeek",
}
TRAIN_SFT = "megatoken train sft --init RUN --out OUT data.path=DATA"

_CHATML = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA_3 = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ (message['content'] | trim) + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ (message['content'] | trim) + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. role: system, user or assistant; weight: 0 for an answer that is context only."""

    role: str
    content: str
    weight: int = 1


class _Frame(NamedTuple):
    """What stands around the content of a role's message: ids, then text encoded together with it; then ids."""

    opening: list[int]
    header: str
    closing: list[int]  # the stop token first


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How a tokenizer writes conversations.

    name: chatml or llama-3. stop_ids: tokens that end an answer, first the one that is trained to. jinja: the template
    for transformers, with the marks of its assistant masks.
    """

    name: str
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    jinja: str

    def encode(
        self, messages: Sequence[Message], *, reply: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Ids of a conversation and whether each is trained.

        reply: append the assistant's header, so that a model continues with the answer. A token that begins in the
        header and ends in the content, as some tokenizers make of white space, counts as content.
        """
        ids = list(self.tokenizer.bos_ids)
        trained = [False] * len(ids)
        for message in messages:
            opening, header, closing = self._frame(message.role)
            content = message.content.strip() if self.name == "llama-3" else message.content
            text = self.tokenizer.encode(header + content).tolist()
            first = self._count_header(header, header + content, text)
            ids += [*opening, *text, *closing]
            is_trained = message.role == "assistant" and message.weight > 0
            trained += [False] * (len(opening) + first) + [is_trained] * (len(text) - first + 1)
            trained += [False] * (len(closing) - 1)
        if reply:
            opening, header, _ = self._frame("assistant")
            ids += [*opening, *self.tokenizer.encode(header).tolist()]
            trained += [False] * (len(ids) - len(trained))
        return ids, trained

    def _frame(self, role: str) -> _Frame:
        encode, special = self.tokenizer.encode, self.tokenizer.special_ids
        if self.name == "chatml":
            start, end = (special[token] for token in CHATML)
            return _Frame([start], f"{role}\n", [end, *encode("\n").tolist()])
        start, end, stop = (special[token] for token in LLAMA_3)
        return _Frame([start, *encode(role).tolist(), end], "\n\n", [stop])

    def _count_header(self, header: str, text: str, ids: list[int]) -> int:
        """The number of ids that belong to the header alone."""
        own = self.tokenizer.encode(header).tolist()
        return (
            len(own)
            if ids[: len(own)] == own
            else self.tokenizer.count_tokens_within(text, len(header))
        )


def find_template(tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a tokenizer, by its special tokens.

    Raises ConfigError for a tokenizer without one, naming the command that gives one, and for a template that is not
    known here.
    """
    special = tokenizer.special_ids
    for name, tokens, jinja in (("chatml", CHATML, _CHATML), ("llama-3", LLAMA_3, _LLAMA_3)):
        if all(token in special for token in tokens):
            stop_ids = dict.fromkeys((special[tokens[-1]], tokenizer.eot, *tokenizer.end_ids))
            begin = "".join(
                f"{{{{ {json.dumps(tokenizer.decode([id]))} }}}}" for id in tokenizer.bos_ids
            )
            return ChatTemplate(name, tokenizer, tuple(stop_ids), begin + jinja)
    _refuse_other_templates(tokenizer)
    what = f"tokenizer {tokenizer.name} has no chat template"
    raise ConfigError(what, "", f"give the model one: {TRAIN_SFT}")


def template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Its chat template, if it has one that is known here."""
    try:
        return find_template(tokenizer)
    except ConfigError:
        return None


def find_stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a generation: those its files name, or end of text and the template's end of turn."""
    template = template_of(tokenizer)
    return tokenizer.end_ids or (template.stop_ids if template else (tokenizer.eot,))


def add_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer itself where it has a known template, else with ChatML's tokens after its last id.

    Raises ConfigError for a template that is not known here, DataError as `Tokenizer.add_special_tokens`.
    """
    special = tokenizer.special_ids
    if any(all(token in special for token in tokens) for tokens in (CHATML, LLAMA_3)):
        return tokenizer
    _refuse_other_templates(tokenizer)
    return tokenizer.add_special_tokens(CHATML, f"{tokenizer.name}-chatml")


def parse_messages(rows: Any, where: str, *, reply: bool = False) -> list[Message]:
    """The messages of rows of {"role": ..., "content": ...}.

    reply: for a model to answer, so that the last one is the user's; else one of the assistant must be among them.
    where: of the rows, for errors. Raises DataError for what is no conversation.
    """
    if not isinstance(rows, list) or not rows:
        raise DataError(
            "a conversation is a list of messages",
            where,
            'write {"role": ..., "content": ...} for each',
        )
    messages: list[Message] = []
    for number, row in enumerate(rows, start=1):
        place = f"{where}, message {number}"
        role, content = (
            (row.get("role"), row.get("content")) if isinstance(row, dict) else (None, None)
        )
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(f"unknown role {role!r:.40}", place, f"roles are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise DataError("the content is no text", place, "give it as one string")
        if not content.strip():
            raise DataError(
                f"the {role}'s content is empty", place, "write some, or leave the conversation out"
            )
        if any("\ud800" <= character <= "\udfff" for character in content):
            raise DataError(
                "the content holds half of a surrogate pair, which is no text", place, "repair it"
            )
        if messages and role in (messages[-1].role, "system"):
            what = (
                "a system message is not the first"
                if role == "system"
                else f"two messages of the {role} in a row"
            )
            raise DataError(
                what, place, "user and assistant take turns, after one system message or none"
            )
        weight = 1 if row.get("weight") is None else row["weight"]
        if weight not in (0, 1):
            raise DataError(
                f"weight is {weight!r:.40}",
                place,
                "give 1 to train on the message, 0 to use it as context",
            )
        messages.append(Message(role, content, int(weight)))
    if reply and messages[-1].role != "user":
        raise DataError(
            f"the last message is the {messages[-1].role}'s", where, "end with one of the user"
        )
    if not reply and not any(
        message.role == "assistant" and message.weight for message in messages
    ):
        raise DataError("no message of the assistant to train on", where, "leave it out")
    return messages


def _refuse_other_templates(tokenizer: Tokenizer) -> None:
    for token, name in OTHER_TEMPLATES.items():
        if token in tokenizer.special_ids:
            what = f"tokenizer {tokenizer.name} has the chat template of {name} ({token}), which is not known here"
            raise ConfigError(what, "", "chat templates are ChatML and Llama-3")
