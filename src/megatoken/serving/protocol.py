"""OpenAI's requests and answers as JSON objects, chat and completions: what is computed, and what is refused by name.

A parameter that would change the answer and is not known here is an error: nothing is left out in silence.
"""

import json
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatoken.data.chat_template import ChatTemplate, find_stop_ids, parse_messages
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import ConfigError, DataError
from megatoken.sampling.batch import FinishReason, Request, Token
from megatoken.sampling.conversation import fit_context
from megatoken.sampling.generate import TextStream

MAX_MESSAGES, MAX_STOPS, MAX_STOP_LENGTH = 512, 4, 200
SHOWN_DIGITS = 24  # of a number that is out of range
COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as at OpenAI
COMMON = {
    "model",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "max_tokens",
    "stream",
    "stream_options",
    "n",
}
IGNORED = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"}
# Parameters that are taken where they ask for what is done anyway.
AS_IT_IS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
}


class ApiError(Exception):
    """An answer other than 200: HTTP status, a line for people, and OpenAI's type, parameter and code."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served: the name that requests give, the context in tokens, and no template where there is none, with
    the line that says so. created: seconds since 1970."""

    name: str
    context: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    without_template: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def describe(self) -> dict[str, Any]:
        """Its entry in /v1/models."""
        about = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "megatoken",
        }
        return about | {"context": self.context, "chat": self.template is not None}


@dataclass(frozen=True, slots=True)
class Question:
    """A request as it is decoded. stops: texts that end the answer."""

    request: Request
    stops: tuple[str, ...]
    is_chat: bool
    is_streamed: bool
    has_usage: bool  # in a stream
    dropped: int = 0  # messages that the context had no room for


def parse_json(body: bytes) -> dict[str, Any]:
    """The object of a request's body. Raises ApiError."""
    try:
        content = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is no JSON text in UTF-8") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body is no JSON object")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def parse_chat(body: dict[str, Any], model: ServedModel) -> Question:
    """A request to /v1/chat/completions. Raises ApiError.

    truncation "auto", as OpenAI's newer interface has it, leaves out the oldest turns that do not fit the context.
    """
    _check_names(body, model, COMMON | {"messages", "max_completion_tokens", "truncation"})
    if model.template is None:
        raise ApiError(400, model.without_template, param="model", code="no_chat_template")
    rows = _take(body, "messages", list)
    if rows is None:
        raise ApiError(400, "messages are missing", param="messages")
    if len(rows) > MAX_MESSAGES:
        raise ApiError(
            400, f"{len(rows)} messages, at most {MAX_MESSAGES} are taken", param="messages"
        )
    if (truncation := body.get("truncation")) not in (None, "auto", "disabled"):
        raise ApiError(400, "truncation is neither auto nor disabled", param="truncation")
    names = [name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if len(names) == 2:
        raise ApiError(400, "give one of max_tokens and max_completion_tokens", param="max_tokens")
    limit_name = names[0] if names else "max_tokens"
    try:
        messages = kept = parse_messages([_join_parts(row) for row in rows], "messages", reply=True)
        if truncation == "auto":
            wanted = int(_take_number(body, limit_name, int, model.context, 1, math.inf)) + 1
            kept, ids = fit_context(model.template, messages, model.context, wanted)
            body = body | {limit_name: min(wanted - 1, max(model.context - len(ids), 1))}
        else:
            ids, _ = model.template.encode(messages, reply=True)
    except ConfigError as error:
        raise ApiError(400, str(error), param="messages", code="context_length_exceeded") from None
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from None
    question = _build(body, model, ids, limit_name, 0, model.template.stop_ids, is_chat=True)
    return replace(question, dropped=len(messages) - len(kept))


def _join_parts(row: Any) -> Any:
    """A message whose content is a list of text parts with one text."""
    if not isinstance(row, dict) or not isinstance(parts := row.get("content"), list):
        return row
    for part in parts:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise ApiError(
                400, 'a part of the content is not {"type": "text", "text": ...}', param="messages"
            )
    return row | {"content": "".join(part["text"] for part in parts)}


def parse_completion(body: dict[str, Any], model: ServedModel) -> Question:
    """A request to /v1/completions: prompt is a text or a list of ids. Raises ApiError."""
    _check_names(body, model, COMMON | {"prompt"})
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        _check_text(prompt, "prompt")
        try:
            ids = model.tokenizer.start_ids(model.tokenizer.encode(prompt).tolist())
        except DataError as error:
            raise ApiError(400, str(error), param="prompt") from None
    elif isinstance(prompt, list) and prompt and all(type(id) is int for id in prompt):
        ids = prompt
        if wrong := [id for id in ids if not 0 <= id < model.tokenizer.vocab_size]:
            raise ApiError(
                400,
                f"{_shorten(wrong[0])} is none of {model.tokenizer.vocab_size:,} token ids",
                param="prompt",
            )
    else:
        raise ApiError(
            400, "the prompt is neither one text nor one list of token ids", param="prompt"
        )
    return _build(
        body,
        model,
        ids,
        "max_tokens",
        COMPLETION_TOKENS,
        find_stop_ids(model.tokenizer),
        is_chat=False,
    )


def _check_names(body: dict[str, Any], model: ServedModel, known: set[str]) -> None:
    if (name := body.get("model")) != model.name:
        what = "model is missing" if name is None else f"no model {str(name)[:80]!a} here"
        raise ApiError(
            404, f"{what}: this server has {model.name!a}", param="model", code="model_not_found"
        )
    for name, value in body.items():
        if (
            name in AS_IT_IS
            and value is not None
            and not any(_equals(value, each) for each in AS_IT_IS[name])
        ):
            raise ApiError(
                400, f"{name} is not supported", param=name, code="unsupported_parameter"
            )
        if name not in known and name not in AS_IT_IS and name not in IGNORED:
            raise ApiError(
                400, f"unknown parameter {name[:80]!a}", param=name[:80], code="unknown_parameter"
            )


def _equals(value: Any, other: Any) -> bool:
    return (type(value) is bool) == (type(other) is bool) and bool(value == other)


def _build(
    body: dict[str, Any],
    model: ServedModel,
    ids: Sequence[int],
    limit_name: str,
    default_tokens: int,
    stop_ids: Sequence[int],
    *,
    is_chat: bool,
) -> Question:
    """The question for ids and what both kinds share. default_tokens 0: what the context has room for."""
    room = model.context - len(ids)
    if room < 1:
        what = f"{len(ids):,} tokens do not fit the context of {model.context:,}"
        raise ApiError(
            400, what, param="messages" if is_chat else "prompt", code="context_length_exceeded"
        )
    default = min(default_tokens or room, room)
    max_new_tokens = _take_number(body, limit_name, int, default, 1, math.inf)
    if max_new_tokens > room:
        what = f"{limit_name} is {_shorten(max_new_tokens)}, the context of {model.context:,} has room for {room:,}"
        raise ApiError(400, what, param=limit_name, code="context_length_exceeded")
    options = _take(body, "stream_options", dict) or {}
    if options and (
        options.keys() - {"include_usage", "include_obfuscation"} or not body.get("stream")
    ):
        raise ApiError(400, "stream_options is include_usage, with stream", param="stream_options")
    top_p = _take_number(body, "top_p", float, 1.0, 0.0, 1.0)
    request = Request(
        ids,
        int(max_new_tokens),
        temperature=_take_number(body, "temperature", float, 1.0, 0.0, 2.0),
        top_k=int(_take_number(body, "top_k", int, 0, 0, 2**31)),
        top_p=top_p or math.ulp(0.0),  # OpenAI's 0: the likeliest alone
        seed=int(_take_number(body, "seed", int, secrets.randbelow(2**63), -(2**63), 2**64)),
        stop_ids=tuple(stop_ids),
    )
    is_streamed = bool(_take(body, "stream", bool))
    has_usage = bool(_take(options, "include_usage", bool))
    return Question(request, _take_stops(body), is_chat, is_streamed, has_usage)


def _take(body: dict[str, Any], name: str, kind: type) -> Any:
    """A value of the kind; None where it is null or not there."""
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise ApiError(400, f"{name} is not of type {kind.__name__}", param=name)
    return value


def _take_number(
    body: dict[str, Any],
    name: str,
    kind: type[int] | type[float],
    default: float,
    least: float,
    most: float,
) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise ApiError(400, f"{name} is no {'whole ' if kind is int else ''}number", param=name)
    if not least <= value <= most:
        upper = f" to {most:g}" if most < math.inf else " or more"
        raise ApiError(400, f"{name} is {_shorten(value)}, not {least:g}{upper}", param=name)
    return value


def _shorten(number: float) -> str:
    text = f"{number:,}"
    return text if len(text) <= SHOWN_DIGITS else f"{text[:SHOWN_DIGITS]}..."


def _take_stops(body: dict[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop")
    stops = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop is no text and no list of at most {MAX_STOPS}", param="stop")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise ApiError(
                400, f"a text of stop has 1 to {MAX_STOP_LENGTH} characters", param="stop"
            )
        _check_text(stop, "stop")
    return tuple(stops)


def _check_text(text: str, name: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ApiError(400, f"{name} holds half of a surrogate pair, which is no text", param=name)


class Answer:
    """The text of an answer as its tokens come, and OpenAI's objects around it."""

    def __init__(self, question: Question, model: ServedModel) -> None:
        self._question, self._model = question, model
        self._stream = TextStream(model.tokenizer, question.request.prompt_ids)
        self._held = ""  # may be the beginning of a stop text
        self._tokens = 0
        self.finish_reason: FinishReason | None = None
        self._id = ("chatcmpl-" if question.is_chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())

    def push(self, tokens: Sequence[Token]) -> str:
        """The text that tokens complete; none is taken after the end."""
        text = ""
        for token in tokens:
            if self.finish_reason is None:
                self._tokens += 1
                piece = "" if token.finish_reason == "stop" else self._stream.push(token.id)
                piece += self._stream.push(None) if token.finish_reason else ""
                self.finish_reason = token.finish_reason
                text += self._cut(piece)
        return text

    def _cut(self, piece: str) -> str:
        """What is certainly before every stop text."""
        text, self._held = self._held + piece, ""
        ends = [at for stop in self._question.stops if (at := text.find(stop)) >= 0]
        if ends:
            self.finish_reason = "stop"
            return text[: min(ends)]
        if self.finish_reason is None:
            beginnings = (
                stop[:size] for stop in self._question.stops for size in range(1, len(stop))
            )
            held = max((len(each) for each in beginnings if text.endswith(each)), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text

    @property
    def usage(self) -> dict[str, int]:
        """Counts of tokens, with the one that ended the answer."""
        prompt = len(self._question.request.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
        }

    def build_whole(self, text: str) -> dict[str, Any]:
        """The object of an answer that is not streamed."""
        content = (
            {"message": {"role": "assistant", "content": text}}
            if self._question.is_chat
            else {"text": text}
        )
        kind = "chat.completion" if self._question.is_chat else "text_completion"
        return self._wrap(kind, [self._choose(content, self.finish_reason)]) | {"usage": self.usage}

    def build_chunk(
        self, text: str, *, is_first: bool = False, is_last: bool = False
    ) -> dict[str, Any]:
        """An object of a stream; the first of a chat names the role, the last says why it ended."""
        kind = "chat.completion.chunk" if self._question.is_chat else "text_completion"
        delta = {"role": "assistant"} if is_first else {}
        content = {"delta": delta | ({} if is_last else {"content": text})}
        choice = content if self._question.is_chat else {"text": text}
        return self._wrap(kind, [self._choose(choice, self.finish_reason if is_last else None)])

    def build_usage(self) -> dict[str, Any]:
        """The object of a stream that has no text but the counts."""
        kind = "chat.completion.chunk" if self._question.is_chat else "text_completion"
        return self._wrap(kind, []) | {"usage": self.usage}

    def _choose(self, content: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def _wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }
