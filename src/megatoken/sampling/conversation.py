"""A conversation with a model: what was said, kept within the context, and the next answer as it comes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megatoken.data.chat_template import ChatTemplate, Message
from megatoken.errors import ConfigError
from megatoken.model.gpt import GPT
from megatoken.sampling.batch import BatchDecoder, Request
from megatoken.sampling.generate import TextStream
from megatoken.system.device import Device

ANSWER_SHARE = 4  # a quarter of the context is kept for the answer, unless it may only be shorter


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, ids without its stop token. finish_reason: it ended itself, it was cut, or Ctrl-C was pressed."""

    text: str
    ids: list[int]
    prompt_tokens: int
    finish_reason: Literal["stop", "length", "interrupted"]


@dataclass(slots=True)
class Conversation:
    """settings: how answers are drawn, whatever its prompt and stop_ids; the seed of answer n is n above its own.

    dropped: how many of the oldest messages the context has had no more room for.
    """

    model: GPT
    template: ChatTemplate
    settings: Request
    device: Device | None = None
    messages: list[Message] = field(default_factory=list)
    dropped: int = 0

    def ask(self, text: str, on_text: Callable[[str], object]) -> Answer:
        """Add the user's message, and the model's answer to it; on_text is called with its parts as they come.

        A KeyboardInterrupt ends the answer. Raises ConfigError, with nothing added, for a message that is too long.
        """
        context, tokenizer = self.model.config.seq_len, self.template.tokenizer
        number = (self.dropped + len(self.messages)) // 2
        asked = [*self.messages, Message("user", text)]
        kept, ids = fit_context(self.template, asked, context, self.settings.max_new_tokens)
        self.messages, self.dropped = kept, self.dropped + len(asked) - len(kept)
        request = replace(
            self.settings,
            prompt_ids=ids,
            max_new_tokens=min(self.settings.max_new_tokens, context - len(ids) + 1),
            seed=self.settings.seed + number,
            stop_ids=self.template.stop_ids,
        )
        stream, new_ids = TextStream(tokenizer, ids), list[int]()
        reason: Literal["stop", "length", "interrupted"] = "interrupted"
        try:
            with BatchDecoder(
                self.model, rows=1, capacity=request.capacity, device=self.device
            ) as decoder:
                decoder.add(0, request)
                while decoder.rows:
                    for token in decoder.step():
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
        """Forget all but the system's message."""
        self.messages, self.dropped = (
            [message for message in self.messages if message.role == "system"],
            0,
        )


def fit_context(
    template: ChatTemplate, messages: Sequence[Message], context: int, new_tokens: int
) -> tuple[list[Message], list[int]]:
    """The messages without the oldest turns that do not fit, and their ids, which end with the assistant's header.

    The system's message stays. Room is kept for an answer of `new_tokens`, of the context's quarter at most. Raises
    ConfigError when the last message does not fit alone.
    """
    kept, room = list(messages), min(new_tokens, context // ANSWER_SHARE)
    first = int(kept[0].role == "system")
    while (
        len(ids := template.encode(kept, reply=True)[0]) + room > context + 1
    ):  # the last new token is not read
        if len(kept) <= first + 2:
            what = f"the message makes {len(ids):,} tokens of a context of {context:,}, {room:,} are for the answer"
            raise ConfigError(what, "chat", "send a shorter one")
        del kept[first : first + 2]
    return kept, ids
