"""OpenAI's chat and completion requests, validated by pydantic, and the JSON of the answers.

An unsupported parameter is an error if it would change the answer.
"""

import json
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from megatoken.data.chat_template import ChatTemplate, find_stop_ids, parse_messages
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import ConfigError
from megatoken.sampling.batch import Request, Token
from megatoken.sampling.choose import Sampling
from megatoken.sampling.conversation import fit_context
from megatoken.sampling.generate import TextStream

COMPLETION_TOKENS = 16  # OpenAI's default max_tokens of /v1/completions
# Parameters that do not change the answer.
IGNORED = {
    *("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"),
    "parallel_tool_calls",
}
# Unsupported parameters, with the values that change nothing.
NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "response_format": {"type": "text"},
    "suffix": "",
    "tools": [],
}


# The tags in which models mark parts of an answer: per field, tags and the field of the text after.
TAGS = {
    "content": {"<think>": "reasoning_content"},
    "reasoning_content": {"</think>": "content"},
    "tool_calls": {"</tool_call>": "content"},
}
THINK_IDS = 16  # last prompt ids in which a template may have opened <think>
TokenLogprobs = list[tuple[str, float]]  # of a token, then of the most likely ones


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


def _wrap_prompt(value: Any) -> Any:
    is_batch = isinstance(value, list) and value and not isinstance(value[0], int)
    return value if is_batch else [value]


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
    n: int = Field(1, ge=1, le=128)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[Annotated[int, Field(strict=False)], float] = {}
    stop: Annotated[list[StopText], BeforeValidator(_wrap_text), Field(max_length=4)] = []
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class ChatRequest(CommonRequest):
    """Body of /v1/chat/completions.

    truncation: "auto" drops the oldest turns if the messages do not fit the context, as in OpenAI's
    Responses API.
    """

    messages: list[dict[str, Any]] = Field(max_length=512)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto"] = "auto"
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    max_completion_tokens: int | None = Field(None, ge=1)
    truncation: Literal["auto", "disabled"] = "disabled"


class CompletionRequest(CommonRequest):
    """Body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_wrap_prompt)]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class ParsedRequest:
    """A validated and encoded body.

    requests: `body.n` per prompt. dropped: number of messages dropped to fit the context.
    """

    body: CommonRequest
    requests: list[Request]
    dropped: int = 0

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatRequest)


def parse_chat(body: ChatRequest, model: ServedModel) -> ParsedRequest:
    """Encode a conversation.

    Raises ApiError if it does not fit or the model cannot chat, and DataError if it is invalid.
    """
    if model.template is None:
        raise ApiError(400, model.no_template, "no_chat_template", "model")
    messages = fitting = parse_messages(body.messages, "messages", reply=True)
    tools = body.tools if body.tool_choice == "auto" and body.tools else None
    max_tokens = body.max_completion_tokens or body.max_tokens
    if body.truncation == "auto":
        max_tokens = min(max_tokens or model.context, model.context)
        try:
            fitting, ids = fit_context(
                model.template, messages, model.context, max_tokens + 1, tools
            )
        except ConfigError as error:
            raise ApiError(400, str(error), "context_length_exceeded", "messages") from None
        max_tokens = max(1, min(max_tokens, model.context - len(ids)))
    ids, _ = model.template.encode(fitting, reply=True, tools=tools)
    top_logprobs = body.top_logprobs if body.logprobs else None
    requests = _build(body, model, ids, max_tokens, model.template.stop_ids, top_logprobs)
    return ParsedRequest(body, requests, len(messages) - len(fitting))


def parse_completion(body: CompletionRequest, model: ServedModel) -> ParsedRequest:
    """Encode prompts.

    Raises ApiError if one does not fit, and DataError for text that the tokenizer cannot encode.
    """
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "log-probabilities of the prompt are not supported", param="echo")
    requests = []
    for ids in body.prompt:
        if isinstance(ids, str):
            ids = model.tokenizer.start_ids(model.tokenizer.encode(ids).tolist())
        max_tokens = body.max_tokens or min(COMPLETION_TOKENS, max(1, model.context - len(ids)))
        stop_ids = find_stop_ids(model.tokenizer)
        requests += _build(body, model, ids, max_tokens, stop_ids, body.logprobs)
    return ParsedRequest(body, requests)


def _build(
    body: CommonRequest,
    model: ServedModel,
    ids: Sequence[int],
    max_tokens: int | None,
    stop_ids: Sequence[int],
    top_logprobs: int | None,
) -> list[Request]:
    """Return a request per choice; raise ApiError if the prompt exceeds the context.

    max_tokens: None for as many as fit the context.
    """
    room = model.context - len(ids)
    if room < (max_tokens or 1):
        what = f"{len(ids):,} tokens and {max_tokens or 1:,} new ones exceed the context of"
        param = "messages" if isinstance(body, ChatRequest) else "prompt"
        raise ApiError(400, f"{what} {model.context:,}", "context_length_exceeded", param)
    sampling = Sampling(
        max_tokens or room,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p or math.ulp(0.0),  # OpenAI's 0 is greedy
        seed=body.seed,
        stop_ids=stop_ids,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=body.logit_bias,
    )
    samplings = [replace(sampling, seed=body.seed + number) for number in range(body.n)]
    return [Request(ids, sampling, top_logprobs=top_logprobs) for sampling in samplings]


class Choice:
    """An answer as it grows: turns tokens into text, and the text into the message's fields.

    Text in <think> becomes reasoning_content. If the request has tools, JSON in <tool_call> becomes
    tool_calls. fresh: log-probabilities not yet in an event.
    """

    def __init__(self, parsed: ParsedRequest, model: ServedModel, index: int) -> None:
        self.finish_reason: str | None = None
        self.message: dict[str, Any] = {"content": ""}
        self.logprobs: list[TokenLogprobs] = []
        self.fresh: list[TokenLogprobs] = []
        self.index, self.n_tokens, self.cached = index, 0, 0
        self._parsed, self._tokenizer = parsed, model.tokenizer
        prompt_ids = parsed.requests[index].prompt_ids
        self._stream = TextStream(model.tokenizer, prompt_ids)
        self._held = ""  # text that may be the beginning of a stop text
        self._field, self._rest = "content", ""  # field of the text, and what may begin a tag
        self._tags: Mapping[str, Mapping[str, str]] = {"content": {}}
        if isinstance(parsed.body, ChatRequest):
            self._tags = TAGS
            if parsed.body.tools and parsed.body.tool_choice == "auto":
                self._tags = TAGS | {"content": {**TAGS["content"], "<tool_call>": "tool_calls"}}
            if model.tokenizer.decode(prompt_ids[-THINK_IDS:]).rstrip().endswith("<think>"):
                self._field = "reasoning_content"
        elif isinstance(parsed.body, CompletionRequest) and parsed.body.echo:
            self.message["content"] = model.tokenizer.decode(prompt_ids)

    def push(self, token: Token) -> dict[str, Any]:
        """Return what a token adds to the message, up to the first stop text."""
        self.n_tokens += 1
        self.cached = token.cached
        self.finish_reason = token.finish_reason
        text = self._held
        if token.finish_reason != "stop":
            text += self._stream.push(token.id)
            if token.top:
                pairs = [(self._tokenizer.decode([id]), logprob) for id, logprob in token.top]
                self.fresh.append(pairs)
                self.logprobs.append(pairs)
        if token.finish_reason:
            text += self._stream.push(None)
        delta = self._split(self._cut(text))
        for name, value in delta.items():
            self.message[name] = self.message[name] + value if name in self.message else value
        if self.finish_reason == "stop" and "tool_calls" in self.message:
            self.finish_reason = "tool_calls"
            self.message["content"] = self.message["content"].strip() or None
        return delta

    def _cut(self, text: str) -> str:
        """Return `text` up to the first stop text.

        If `text` ends with the beginning of a stop text, that part is held back for the next call.
        """
        stops = self._parsed.body.stop
        ends = [text.index(stop) for stop in stops if stop in text]
        if ends:
            self.finish_reason = "stop"
            return text[: min(ends)]
        if self.finish_reason:
            return text
        text, self._held = hold_back(text, stops)
        return text

    def _split(self, text: str) -> dict[str, Any]:
        """Return the fields that a piece of text belongs to, with their parts of it."""
        delta: dict[str, Any] = {}
        self._rest += text
        while found := [tag for tag in self._tags[self._field] if tag in self._rest]:
            tag = min(found, key=self._rest.index)
            before, _, rest = self._rest.partition(tag)
            self._add(delta, before, tag)
            self._field, self._rest = self._tags[self._field][tag], rest
        if self._field == "tool_calls" and not self.finish_reason:
            return delta
        rest = ""
        if not self.finish_reason:
            self._rest, rest = hold_back(self._rest, self._tags[self._field])
        self._add(delta, self._rest)
        self._rest = rest
        return delta

    def _add(self, delta: dict[str, Any], text: str, tag: str = "") -> None:
        """Add the text before a tag to the current field. An invalid tool call becomes content."""
        name = self._field
        if name == "tool_calls":
            try:
                call = json.loads(text)
                arguments = json.dumps(call["arguments"], ensure_ascii=False)
                function = {"name": str(call["name"]), "arguments": arguments}
                number = len(self.message.get(name, [])) + len(delta.get(name, []))
                entry = {"index": number, "id": f"call_{secrets.token_hex(12)}"}
                delta.setdefault(name, []).append(
                    {**entry, "type": "function", "function": function}
                )
                return
            except (ValueError, KeyError, TypeError):
                name, text = "content", f"<tool_call>{text}{tag}"
        if self._tags[name] and not (name in delta or self.message.get(name)):
            text = text.lstrip("\n")
        if text:
            delta[name] = delta.get(name, "") + text


def hold_back(text: str, marks: Iterable[str]) -> tuple[str, str]:
    """Split a text before an end that may be the beginning of a mark."""
    prefixes = (mark[:size] for mark in marks for size in range(1, len(mark)))
    n_held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
    return text[: len(text) - n_held], text[len(text) - n_held :]


class ResponseBuilder:
    """Builds OpenAI's JSON objects from the choices."""

    def __init__(self, parsed: ParsedRequest, model: ServedModel) -> None:
        self.choices = [Choice(parsed, model, i) for i in range(len(parsed.requests))]
        self._parsed = parsed
        self._head = {
            "id": ("chatcmpl-" if parsed.is_chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model.name,
        }

    def build_full(self) -> dict[str, Any]:
        """Build the JSON object of an answer that is not streamed."""
        kind = "chat.completion" if self._parsed.is_chat else "text_completion"
        choices = []
        for choice in self.choices:
            content: dict[str, Any] = {"text": choice.message["content"]}
            if self._parsed.is_chat:
                content = {"message": {"role": "assistant", **choice.message}}
            choices.append(self._build(choice, content, choice.logprobs, choice.finish_reason))
        return self._head | {"object": kind, "choices": choices, "usage": self._count()}

    def build_event(
        self, choice: Choice, delta: dict[str, Any], *, is_last: bool = False
    ) -> dict[str, Any]:
        """Build an event of a stream. The last event of a choice says why it ended."""
        kind = "chat.completion.chunk" if self._parsed.is_chat else "text_completion"
        content = {"delta": delta} if self._parsed.is_chat else {"text": delta.get("content", "")}
        reason = choice.finish_reason if is_last else None
        logprobs, choice.fresh = choice.fresh, []
        choices = [self._build(choice, content, logprobs, reason)]
        return self._head | {"object": kind, "choices": choices}

    def build_usage(self) -> dict[str, Any]:
        """Build the event of a stream that reports token counts."""
        event = self.build_event(self.choices[0], {})
        return event | {"choices": [], "usage": self._count()}

    def _build(
        self,
        choice: Choice,
        content: dict[str, Any],
        logprobs: list[TokenLogprobs],
        reason: str | None,
    ) -> dict[str, Any]:
        formatted = None
        if logprobs:
            formatted = format_chat(logprobs) if self._parsed.is_chat else format_text(logprobs)
        return {"index": choice.index, **content, "logprobs": formatted, "finish_reason": reason}

    def _count(self) -> dict[str, Any]:
        """Return token counts, which include the tokens that ended the answers."""
        step = self._parsed.body.n  # choices of a prompt
        prompt = sum(len(request.prompt_ids) for request in self._parsed.requests[::step])
        completion = sum(choice.n_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.cached for choice in self.choices[::step])
            },
        }


def format_chat(tokens: list[TokenLogprobs]) -> dict[str, Any]:
    """Format log-probabilities as chat completions have them."""
    rows = [
        [
            {"token": text, "logprob": logprob, "bytes": list(text.encode())}
            for text, logprob in pairs
        ]
        for pairs in tokens
    ]
    return {"content": [{**row[0], "top_logprobs": row[1:]} for row in rows], "refusal": None}


def format_text(tokens: list[TokenLogprobs]) -> dict[str, Any]:
    """Format log-probabilities as completions have them."""
    texts, logprobs = zip(*(pairs[0] for pairs in tokens), strict=True)
    top = [dict(pairs[1:]) for pairs in tokens]
    offsets = list(accumulate(map(len, texts[:-1]), initial=0))
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": offsets,
    }
