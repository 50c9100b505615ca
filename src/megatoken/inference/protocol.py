"""OpenAI's chat and completion requests, validated by pydantic, and the JSON of the responses.

An unsupported parameter is an error if it would change the completion.
"""

import json
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from megatoken.base.system.table import read_table
from megatoken.inference.batch import Request, Token
from megatoken.inference.conversation import fit_context
from megatoken.inference.generate import TextStream
from megatoken.inference.sampling import Sampling
from megatoken.text.chat_template import ChatTemplate, find_stop_ids, parse_messages
from megatoken.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16  # OpenAI's default max_tokens of /v1/completions
TABLE = read_table(__file__)
NEUTRAL = TABLE["neutral"]
# The tags around parts of an answer: for each field, its tags and the field of the text that follows.
TAGS = {
    "content": {"<think>": "reasoning_content"},
    "reasoning_content": {"</think>": "content"},
    "tool_calls": {"</tool_call>": "content"},
}
THINK_IDS = 16  # of the prompt's last ids, in which a template may have opened <think>
JsonObject = dict[str, Any]
TokenLogprobs = list[tuple[bytes, float]]  # of a token, then of the most likely ones


class ApiError(HTTPException):
    """An error response: HTTP status, message, OpenAI's code, and the parameter at fault."""

    def __init__(self, status: int, message: str, code: str = "", param: str = "") -> None:
        super().__init__(status, message)
        self.code = code or None
        self.param = param or None

    def to_json(self) -> JsonObject:
        """Return the JSON body of the response."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


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

    def to_json(self) -> JsonObject:
        """Return the model's entry in /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "megatoken",
            "context": self.context,
            "chat": self.template is not None,
        }


class Schema(BaseModel):
    """A JSON object in which unknown keys are errors and null means the default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, content: Any) -> Any:
        """Drop nulls, and parameters that protocol.yaml says to change nothing.

        Raises ApiError for others that the server does not support.
        """
        if not isinstance(content, dict):
            return content
        content = {
            name: value
            for name, value in content.items()
            if name not in TABLE["ignored"] and value is not None and value != NEUTRAL.get(name)
        }
        for name in content:
            if name not in cls.model_fields:
                only = f" other than {json.dumps(NEUTRAL[name])}" if name in NEUTRAL else ""
                what = f"{name!a:.80}{only} is not supported"
                raise ApiError(400, what, "unsupported_parameter", name)
        return content


def _wrap_text(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _wrap_prompt(value: Any) -> Any:
    is_batch = isinstance(value, list) and value and not isinstance(value[0], int)
    return value if is_batch else [value]


StopText = Annotated[str, Field(min_length=1, max_length=200)]


class CommonRequest(Schema):
    """Parameters that chat and completion requests share."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0)
    seed: int = Field(default_factory=lambda: secrets.randbelow(2**63))
    n: int = Field(1, ge=1, le=128)
    stop: Annotated[list[StopText], BeforeValidator(_wrap_text), Field(max_length=4)] = []
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = {}

    def _build_requests(
        self,
        model: ServedModel,
        ids: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
        top_logprobs: int | None,
    ) -> list[Request]:
        """Return a request per choice; raise ApiError if a prompt does not fit the context."""
        if len(ids) + max(max_tokens, 1) > model.context:
            what = f"{len(ids):,} tokens and {max(max_tokens, 1):,} new ones exceed the context of"
            param = "messages" if isinstance(self, ChatRequest) else "prompt"
            raise ApiError(400, f"{what} {model.context:,}", "context_length_exceeded", param)
        samplings = [
            Sampling(
                max_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p or math.ulp(0.0),  # OpenAI's 0 is greedy
                seed=self.seed + number,
                stop_ids=stop_ids,
            )
            for number in range(self.n)
        ]
        return [Request(ids, sampling, top_logprobs=top_logprobs) for sampling in samplings]


class ChatRequest(CommonRequest):
    """Body of /v1/chat/completions.

    truncation: "auto" drops the oldest turns if the messages do not fit the context, as in OpenAI's
    Responses API. chat_template_kwargs: variables of the template, as in vLLM.
    """

    messages: list[JsonObject] = Field(max_length=512)
    tools: list[JsonObject] = []
    tool_choice: Literal["none", "auto"] = "auto"
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    max_completion_tokens: int | None = Field(None, ge=1)
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: JsonObject = {}

    def encode(self, model: ServedModel) -> tuple[list[Request], int]:
        """Return a request per choice, and the number of messages dropped to fit the context.

        Raises ApiError if the conversation does not fit or the model cannot chat, and ConfigError
        or DataError if it is invalid.
        """
        if model.template is None:
            raise ApiError(400, model.no_template, "no_chat_template", "model")
        messages = fitting = parse_messages(self.messages, "messages", reply=True)
        tools = self.tools if self.tool_choice == "auto" and self.tools else None
        variables = self.chat_template_kwargs
        encode = partial(model.template.encode, reply=True, tools=tools, variables=variables)
        max_tokens = self.max_completion_tokens or self.max_tokens
        if self.truncation == "auto":
            new_tokens = (max_tokens or model.context) + 1
            fitting, ids = fit_context(encode, messages, model.context, new_tokens)
            max_tokens = min(max_tokens or model.context, model.context - len(ids))
        else:
            ids, _ = encode(messages)
        max_tokens = max_tokens or model.context - len(ids)
        top_logprobs = self.top_logprobs if self.logprobs else None
        stop_ids = model.template.stop_ids
        requests = self._build_requests(model, ids, max_tokens, stop_ids, top_logprobs)
        return requests, len(messages) - len(fitting)


class CompletionRequest(CommonRequest):
    """Body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_wrap_prompt)]
    logprobs: int | None = Field(None, ge=0, le=20)

    def encode(self, model: ServedModel) -> tuple[list[Request], int]:
        """Return a request per choice, and 0.

        Raises ApiError if a prompt does not fit, and DataError for text that the tokenizer cannot
        encode.
        """
        requests = []
        stop_ids = find_stop_ids(model.tokenizer)
        for ids in self.prompt:
            if isinstance(ids, str):
                ids = model.tokenizer.start_ids(model.tokenizer.encode(ids).tolist())
            max_tokens = self.max_tokens or min(COMPLETION_TOKENS, model.context - len(ids))
            requests += self._build_requests(model, ids, max_tokens, stop_ids, self.logprobs)
        return requests, 0


class Choice:
    """A completion as it grows: turns tokens into text, and the text into the message's fields.

    Text in <think> becomes reasoning_content. If the request has tools, JSON in <tool_call> becomes
    tool_calls. Other control tokens are left out.
    """

    def __init__(
        self, body: CommonRequest, model: ServedModel, request: Request, index: int
    ) -> None:
        self.index = index
        self.n_tokens = self.cached = 0
        self.finish_reason: str | None = None
        # The message's fields and the log-probabilities, and how much of each has been taken.
        self.fields: JsonObject = {"content": ""}
        if request.top_logprobs is not None:
            self.fields["logprobs"] = list[TokenLogprobs]()
        self._taken: dict[str, int] = {}
        self._tokenizer = model.tokenizer
        self._stream = TextStream(model.tokenizer, request.prompt_ids)
        self._text = ""  # not yet in a field, because it may begin a delimiter
        self._field = "content"  # of the text
        # Of each field: the stop texts, and the tags with the field that follows.
        stops = dict.fromkeys(body.stop, "")
        self._delimiters: dict[str, dict[str, str]] = {"content": stops}
        if isinstance(body, ChatRequest):
            self.fields["role"] = "assistant"
            self._delimiters = {name: tags | stops for name, tags in TAGS.items()}
            if body.tools and body.tool_choice == "auto":
                self._delimiters["content"].setdefault("<tool_call>", "tool_calls")
            if model.tokenizer.decode(request.prompt_ids[-THINK_IDS:]).rstrip().endswith("<think>"):
                self._field = "reasoning_content"
        delimiters = chain(*self._delimiters.values())
        special = model.tokenizer.special_ids
        self._hidden = {special[token] for token in special.keys() - delimiters}

    def push(self, token: Token) -> None:
        """Add a token; a stop text may end the completion."""
        self.n_tokens += 1
        self.cached += token.cached
        self.finish_reason = token.finish_reason
        if token.finish_reason != "stop":
            if token.id not in self._hidden:
                self._text += self._stream.push(token.id)
            if token.top:
                pairs = [(self._tokenizer.decode_bytes(id), logprob) for id, logprob in token.top]
                self.fields["logprobs"].append(pairs)
        if token.finish_reason:
            self._text += self._stream.push(None)
        self._split()
        if self.finish_reason == "stop" and "tool_calls" in self.fields:
            self.finish_reason = "tool_calls"
            self.fields["content"] = self.fields["content"].rstrip()

    def take(self) -> JsonObject:
        """Return what was added to the fields since the last call."""
        added = {name: value[self._taken.get(name, 0) :] for name, value in self.fields.items()}
        self._taken = {name: len(value) for name, value in self.fields.items()}
        return {name: value for name, value in added.items() if value}

    def _split(self) -> None:
        """Move text to the fields that it belongs to, up to the first stop text.

        If it ends with the beginning of a delimiter, that beginning is left for the next call.
        """
        while found := [each for each in self._delimiters[self._field] if each in self._text]:
            delimiter = min(found, key=self._text.index)
            before, _, self._text = self._text.partition(delimiter)
            following = self._delimiters[self._field][delimiter]
            self._add(before, delimiter if following else "")
            if not following:
                self.finish_reason = "stop"
                return
            self._field = following
        if self.finish_reason:
            self._add(self._text)
        elif self._field != "tool_calls":
            delimiters = self._delimiters[self._field]
            prefixes = (each[:n] for each in delimiters for n in range(1, len(each)))
            n_held = max((len(each) for each in prefixes if self._text.endswith(each)), default=0)
            end = len(self._text) - n_held
            self._add(self._text[:end])
            self._text = self._text[end:]

    def _add(self, text: str, tag: str = "") -> None:
        """Add the text before a tag to the current field. An invalid tool call becomes content."""
        name = self._field
        if name == "tool_calls":
            try:
                call = json.loads(text)
                arguments = json.dumps(call["arguments"], ensure_ascii=False)
                function = {"name": str(call["name"]), "arguments": arguments}
            except (ValueError, KeyError, TypeError):
                name, text = "content", f"<tool_call>{text}{tag}"
            else:
                calls = self.fields.setdefault(name, [])
                id = f"call_{secrets.token_hex(12)}"
                calls.append(
                    {"index": len(calls), "id": id, "type": "function", "function": function}
                )
                return
        if "role" in self.fields and not self.fields.get(name):
            text = text.lstrip("\n")
        if text:
            self.fields[name] = self.fields.get(name, "") + text


class ResponseBuilder:
    """Builds OpenAI's JSON objects from the choices."""

    def __init__(
        self, body: CommonRequest, requests: Sequence[Request], model: ServedModel
    ) -> None:
        self.body = body
        self.choices = [Choice(body, model, request, i) for i, request in enumerate(requests)]
        self._requests = requests
        self._is_chat = isinstance(body, ChatRequest)
        self._head = {
            "id": ("chatcmpl-" if self._is_chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model.name,
            "object": "chat.completion" if self._is_chat else "text_completion",
        }

    def build_full(self) -> JsonObject:
        """Build the JSON object of a response that is not streamed."""
        choices = [self._build(choice, "message", choice.fields) for choice in self.choices]
        return self._head | {"choices": choices, "usage": self.count_tokens()}

    def build_event(self, *choices: Choice) -> JsonObject:
        """Build an event of a stream, with what was added to choices since the last one."""
        event = self._head | {
            "choices": [self._build(choice, "delta", choice.take()) for choice in choices]
        }
        if self._is_chat:
            event["object"] = "chat.completion.chunk"
        return event

    def _build(self, choice: Choice, name: str, fields: JsonObject) -> JsonObject:
        fields = dict(fields)
        logprobs = fields.pop("logprobs", None)
        content = {name: fields} if self._is_chat else {"text": fields.get("content", "")}
        if logprobs is not None:
            logprobs = format_chat(logprobs) if self._is_chat else format_text(logprobs)
        reason = choice.finish_reason
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": reason}

    def count_tokens(self) -> JsonObject:
        """Return token counts, which include the tokens that ended the completions."""
        step = self.body.n  # choices of a prompt
        prompt = sum(len(request.prompt_ids) for request in self._requests[::step])
        completion = sum(choice.n_tokens for choice in self.choices)
        cached = sum(choice.cached for choice in self.choices[::step])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def format_chat(tokens: list[TokenLogprobs]) -> JsonObject:
    """Format log-probabilities as chat completions have them."""
    rows = [
        [
            {"token": _decode(data), "logprob": logprob, "bytes": list(data)}
            for data, logprob in pairs
        ]
        for pairs in tokens
    ]
    return {"content": [{**row[0], "top_logprobs": row[1:]} for row in rows], "refusal": None}


def format_text(tokens: list[TokenLogprobs]) -> JsonObject:
    """Format log-probabilities as completions have them."""
    return {
        "tokens": [_decode(pairs[0][0]) for pairs in tokens],
        "token_logprobs": [pairs[0][1] for pairs in tokens],
        "top_logprobs": [
            {_decode(data): logprob for data, logprob in pairs[1:]} for pairs in tokens
        ],
    }


def _decode(data: bytes) -> str:
    return data.decode(errors="replace")
