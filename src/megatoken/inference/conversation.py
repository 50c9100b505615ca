"""A conversation with a model. The oldest turns are dropped when the context is full."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from megatoken.base.errors import ConfigError
from megatoken.base.system.device import Device
from megatoken.inference.batch import Request, decode
from megatoken.inference.generate import TextStream
from megatoken.inference.sampling import Sampling
from megatoken.model.gpt import GPT
from megatoken.text.chat_template import ChatTemplate, Message

ANSWER_SHARE = 4  # reserve at most 1/4 of the context for the answer


@dataclass(frozen=True)
class Answer:
    """An answer of the model. ids: its tokens, without the stop token."""

    text: str
    ids: list[int]
    prompt_tokens: int
    finish_reason: Literal["stop", "length", "interrupted"]


@dataclass
class Conversation:
    """A conversation. Answer number n is sampled with seed `sampling.seed` + n.

    dropped: number of messages that were dropped to fit the context. variables: of the template.
    """

    model: GPT
    template: ChatTemplate
    sampling: Sampling
    device: Device | None = None
    messages: list[Message] = field(default_factory=list)
    dropped: int = 0
    variables: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, text: str, on_text: Callable[[str], object]) -> Answer:
        """Add the user's message, generate the answer, and add it.

        on_text: called with each new piece of the answer's text. A KeyboardInterrupt ends the
        answer early. Raises ConfigError for a message that is too long.
        """
        context = self.model.config.seq_len
        tokenizer = self.template.tokenizer
        number = (self.dropped + len(self.messages)) // 2
        messages = [*self.messages, Message("user", text)]
        max_new_tokens = self.sampling.max_new_tokens
        encode = partial(self.template.encode, reply=True, variables=self.variables)
        self.messages, ids = fit_context(encode, messages, context, max_new_tokens)
        self.dropped += len(messages) - len(self.messages)
        sampling = replace(
            self.sampling,
            max_new_tokens=min(max_new_tokens, context - len(ids) + 1),
            seed=self.sampling.seed + number,
            stop_ids=self.template.stop_ids,
        )
        stream = TextStream(tokenizer, ids)
        new_ids: list[int] = []
        reason: Literal["stop", "length", "interrupted"] = "interrupted"
        try:
            for token in decode(self.model, Request(ids, sampling), self.device):
                reason = token.finish_reason or reason
                if token.finish_reason != "stop":
                    new_ids.append(token.id)
                    on_text(stream.push(token.id))
            on_text(stream.push(None))
        except KeyboardInterrupt:
            reason = "interrupted"
        answer = Answer(tokenizer.decode_after(ids, new_ids), new_ids, len(ids), reason)
        self.messages.append(Message("assistant", answer.text))
        return answer

    def clear(self) -> None:
        """Drop all messages except the system message."""
        self.messages = [message for message in self.messages if message.role == "system"]
        self.dropped = 0


def fit_context(
    encode: Callable[[Sequence[Message]], tuple[list[int], list[bool]]],
    messages: Sequence[Message],
    context: int,
    new_tokens: int,
) -> tuple[list[Message], list[int]]:
    """Drop the oldest turns until the others fit the context; return (messages, their ids).

    A turn is a user's message and all messages before the next user's. The system message is never
    dropped. Space for `new_tokens`, but at most a quarter of the context, is reserved for the
    answer. encode: `ChatTemplate.encode` with the assistant's header. Raises ConfigError if the last
    turn does not fit.
    """
    messages = list(messages)
    reserved = min(new_tokens, context // ANSWER_SHARE)
    first = int(messages[0].role in ("system", "developer"))
    while True:
        ids, _ = encode(messages)
        if len(ids) + reserved <= context + 1:  # the last new token is not fed to the model
            return messages, ids
        turns = [i for i, message in enumerate(messages) if message.role == "user" and i > first]
        if not turns:
            what = f"the message has {len(ids):,} tokens and the answer {reserved:,}"
            raise ConfigError(what, "chat", f"shorten it to fit the context of {context:,}")
        del messages[first : turns[0]]
