"""OpenAI's chat and completion requests, validated by pydantic, and the JSON of the answers.

An unsupported parameter is an error if it would change the answer.
"""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from megatoken.data.chat_template import ChatTemplate, find_stop_ids, parse_messages
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import ConfigError
from megatoken.sampling.batch import FinishReason, Request, Token
from megatoken.sampling.choose import Sampling
from megatoken.sampling.conversation import fit_context
from megatoken.sampling.generate import TextStream

COMPLETION_TOKENS = 16  # OpenAI's default max_tokens of /v1/completions
# Parameters that do not change the answer.
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
# Unsupported parameters, with the values that change nothing.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "response_format": {"type": "text"},
    "suffix": "",
    "tools": [],
}


class ApiError(HTTPException):
    """An error response: HTTP status, message, OpenAI's code, and the parameter at fault."""

    def __init__(self, status: int, message: str, code: str = "", param: str = "") -> None:
        super().__init__(status, message)
        self.code = code or None
        self.param = param or None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class Schema(BaseModel):
    """A JSON object in which unknown keys are errors and null means the default."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, content: Any) -> Any:
        """Drop nulls, the IGNORED parameters, and parameters with their NEUTRAL value."""
        if not isinstance(content, dict):
            return content
        return {
            name: value
            for name, value in content.items()
            if name not in IGNORED and value is not None and value != NEUTRAL.get(name)
        }


def _wrap_text(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _unwrap_prompt(value: Any) -> Any:
    is_batch_of_one = isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int)
    return value[0] if is_batch_of_one else value


StopText = Annotated[str, Field(min_length=1, max_length=200)]


class StreamOptions(Schema):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class CommonRequest(Schema):
    """Parameters that chat and completion requests share."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0)
    seed: int = Field(default_factory=lambda: secrets.randbelow(2**63))
    stop: Annotated[list[StopText], BeforeValidator(_wrap_text), Field(max_length=4)] = []
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class TextPart(Schema):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a conversation. Unknown keys such as `name` are ignored."""

    role: str
    content: str | list[TextPart]

    def to_row(self) -> dict[str, str]:
        """Return {"role", "content"}, with the text parts of the content joined."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatRequest(CommonRequest):
    """Body of /v1/chat/completions.

    truncation: "auto" drops the oldest turns if the messages do not fit the context, as in OpenAI's
    Responses API.
    """

    messages: list[ChatMessage] = Field(max_length=512)
    max_completion_tokens: int | None = Field(None, ge=1)
    truncation: Literal["auto", "disabled"] = "disabled"


class CompletionRequest(CommonRequest):
    """Body of /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_unwrap_prompt)]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it.

    name: what requests must give as `model`. context: the context length in tokens. template:
    None if the model cannot chat; `no_template` is then the reason. created: seconds since 1970.
    """

    name: str
    context: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    no_template: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self) -> dict[str, Any]:
        """Return the model's entry in /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "megatoken",
            "context": self.context,
            "chat": self.template is not None,
        }


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A validated and encoded request.

    stops: texts that end the answer. dropped: number of messages dropped to fit the context.
    """

    request: Request
    stops: Sequence[str]
    is_chat: bool
    is_streamed: bool
    has_usage: bool
    dropped: int = 0


def parse_chat(body: ChatRequest, model: ServedModel) -> ParsedRequest:
    """Encode a conversation.

    Raises ApiError if it does not fit or the model cannot chat, and DataError if it is invalid.
    """
    if model.template is None:
        raise ApiError(400, model.no_template, "no_chat_template", "model")
    rows = [message.to_row() for message in body.messages]
    messages = parse_messages(rows, "messages", reply=True)
    max_tokens = body.max_completion_tokens or body.max_tokens
    fitting = messages
    if body.truncation == "auto":
        max_tokens = min(max_tokens or model.context, model.context)
        try:
            fitting, ids = fit_context(model.template, messages, model.context, max_tokens + 1)
        except ConfigError as error:
            raise ApiError(400, str(error), "context_length_exceeded", "messages") from None
        max_tokens = max(1, min(max_tokens, model.context - len(ids)))
    ids, _ = model.template.encode(fitting, reply=True)
    dropped = len(messages) - len(fitting)
    return _build(body, model, ids, max_tokens, model.template.stop_ids, dropped)


def parse_completion(body: CompletionRequest, model: ServedModel) -> ParsedRequest:
    """Encode a prompt.

    Raises ApiError if it does not fit, and DataError for text that the tokenizer cannot encode.
    """
    ids = body.prompt
    if isinstance(ids, str):
        ids = model.tokenizer.start_ids(model.tokenizer.encode(ids).tolist())
    max_tokens = body.max_tokens or min(COMPLETION_TOKENS, max(1, model.context - len(ids)))
    return _build(body, model, ids, max_tokens, find_stop_ids(model.tokenizer))


def _build(
    body: CommonRequest,
    model: ServedModel,
    ids: Sequence[int],
    max_tokens: int | None,
    stop_ids: Sequence[int],
    dropped: int = 0,
) -> ParsedRequest:
    """Build the request; raise ApiError if it exceeds the context.

    max_tokens: None for as many as fit the context.
    """
    is_chat = isinstance(body, ChatRequest)
    room = model.context - len(ids)
    if room < (max_tokens or 1):
        what = f"{len(ids):,} tokens and {max_tokens or 1:,} new ones exceed the context of"
        param = "messages" if is_chat else "prompt"
        raise ApiError(400, f"{what} {model.context:,}", "context_length_exceeded", param)
    sampling = Sampling(
        max_tokens or room,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p or math.ulp(0.0),  # OpenAI's 0 is greedy
        seed=body.seed,
        stop_ids=stop_ids,
    )
    return ParsedRequest(
        request=Request(ids, sampling),
        stops=body.stop,
        is_chat=is_chat,
        is_streamed=body.stream,
        has_usage=body.stream_options.include_usage,
        dropped=dropped,
    )


class ResponseBuilder:
    """Turns an answer's tokens into text, and the text into OpenAI's JSON objects."""

    def __init__(self, parsed: ParsedRequest, model: ServedModel) -> None:
        self.finish_reason: FinishReason | None = None
        self._parsed = parsed
        self._stream = TextStream(model.tokenizer, parsed.request.prompt_ids)
        self._held = ""  # text that may be the beginning of a stop text
        self._n_tokens = 0
        self._head = {
            "id": ("chatcmpl-" if parsed.is_chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model.name,
        }

    def push(self, token: Token) -> str:
        """Return the text that a token completes, up to the first stop text."""
        self._n_tokens += 1
        self.finish_reason = token.finish_reason
        text = self._held
        if token.finish_reason != "stop":
            text += self._stream.push(token.id)
        if token.finish_reason:
            text += self._stream.push(None)
        return self._cut(text)

    def _cut(self, text: str) -> str:
        """Return `text` up to the first stop text.

        If `text` ends with the beginning of a stop text, that part is held back for the next call.
        """
        stops = self._parsed.stops
        ends = [text.index(stop) for stop in stops if stop in text]
        if ends:
            self.finish_reason = "stop"
            return text[: min(ends)]
        if self.finish_reason:
            return text
        prefixes = (stop[:size] for stop in stops for size in range(1, len(stop)))
        n_held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def build_full(self, text: str) -> dict[str, Any]:
        """Build the JSON object of an answer that is not streamed."""
        content: dict[str, Any] = {"text": text}
        if self._parsed.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
        kind = "chat.completion" if self._parsed.is_chat else "text_completion"
        return self._build(kind, content, self.finish_reason) | {"usage": self._count()}

    def build_event(self, delta: dict[str, str], *, is_last: bool = False) -> dict[str, Any]:
        """Build an event of a stream. The last event says why the answer ended."""
        reason = self.finish_reason if is_last else None
        if self._parsed.is_chat:
            return self._build("chat.completion.chunk", {"delta": delta}, reason)
        return self._build("text_completion", {"text": delta.get("content", "")}, reason)

    def build_usage(self) -> dict[str, Any]:
        """Build the event of a stream that reports token counts."""
        return self.build_event({}) | {"choices": [], "usage": self._count()}

    def _build(
        self, kind: str, content: dict[str, Any], reason: FinishReason | None
    ) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return self._head | {"object": kind, "choices": [choice]}

    def _count(self) -> dict[str, int]:
        """Return token counts, which include the token that ended the answer."""
        prompt = len(self._parsed.request.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._n_tokens,
            "total_tokens": prompt + self._n_tokens,
        }
