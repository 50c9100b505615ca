"""The HTTP server: OpenAI's endpoints, /health, and a chat page.

Any web page can make a visitor's browser send requests to this server. Two checks
refuse requests from other sites. The Host header must name this server, which prevents DNS
rebinding. A body must be application/json, because browsers send that to another site only if the
site allows it (CORS).

Requests and answers are not logged.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatoken.errors import ConfigError, DataError, MegatokenError
from megatoken.serving.engine import Engine, Job
from megatoken.serving.protocol import (
    ApiError,
    ChatRequest,
    Choice,
    CommonRequest,
    CompletionRequest,
    ParsedRequest,
    ResponseBuilder,
    ServedModel,
    parse_chat,
    parse_completion,
)

MAX_BODY_BYTES = 4 << 20
GRACE_SECONDS = 10  # to finish running answers after the first signal
MORE_CONNECTIONS = 64  # open connections without a job
PAGE = Path(__file__).parent / "page.html"
HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
]


def build_app(engine: Engine, model: ServedModel, hosts: Sequence[str], api_key: str) -> Starlette:
    """Build the web application.

    hosts: accepted Host headers, "*" for any. api_key: key that clients must send, "" for none.
    """
    endpoints = Endpoints(engine, model)
    routes = [
        Route("/models", endpoints.list_models),
        Route("/models/{name:path}", endpoints.get_model),
        Route("/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/completions", endpoints.complete, methods=["POST"]),
    ]
    check_key = [Middleware(CheckKey, api_key=api_key)] if api_key else []
    errors = (HTTPException, ValidationError, MegatokenError, Exception)
    return Starlette(
        routes=[
            Route("/", endpoints.get_page),
            Route("/health", endpoints.get_health),
            Route("/metrics", endpoints.get_metrics),
            Mount("/v1", routes=routes, middleware=check_key),
        ],
        middleware=[
            Middleware(CountRequests, counts=endpoints.counts),
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
        ],
        exception_handlers=dict.fromkeys(errors, handle_error),
        max_body_size=MAX_BODY_BYTES,
    )


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        where = f"{host}, port {port}"
        raise ConfigError(f"cannot listen: {error}", where, "choose another --port") from None
    listener.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # accepted connections inherit it
    return listener


def build_server(app: Starlette, engine: Engine) -> uvicorn.Server:
    """Build a server that logs only errors, and on shutdown finishes the answers in progress."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            headers=HEADERS,
            limit_concurrency=engine.max_jobs + MORE_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )


@dataclass(frozen=True)
class CheckKey:
    """Middleware that refuses requests without the API key."""

    app: ASGIApp
    api_key: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = Headers(scope=scope).get("authorization", "")
        if not hmac.compare_digest(header.encode(), f"Bearer {self.api_key}".encode()):
            raise ApiError(401, "missing or wrong API key", "invalid_api_key")
        await self.app(scope, receive, send)


@dataclass(frozen=True)
class CountRequests:
    """Middleware that counts the API's requests by status."""

    app: ASGIApp
    counts: Counter[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500

        async def send_counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, send_counted)
        finally:
            if scope["path"].startswith("/v1/"):
                self.counts[f'requests_total{{status="{status}"}}'] += 1


def handle_error(request: Request, error: Exception) -> Response:
    """Turn an exception raised by an endpoint into OpenAI's error response."""
    return build_error(error)


def build_error(error: Exception) -> JSONResponse:
    """Build OpenAI's error response for an exception.

    Unexpected exceptions get status 500 without details; uvicorn logs them.
    """
    api_error = ApiError(500, "internal server error")
    match error:
        case ApiError():
            api_error = error
        case HTTPException():
            api_error = ApiError(error.status_code, error.detail)
        case ValidationError():
            details = error.errors(include_url=False, include_input=False, include_context=False)
            lines = [f"{'.'.join(map(str, row['loc']))}: {row['msg']}" for row in details[:3]]
            api_error = ApiError(400, "; ".join(lines), param=str((*details[0]["loc"], "")[0]))
        case MegatokenError():
            api_error = ApiError(500, str(error))
    return JSONResponse(api_error.to_json(), api_error.status_code)


class Endpoints:
    """The endpoints of a served model."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self._engine = engine
        self._model = model
        self._page = PAGE.read_text(encoding="utf-8")
        self._policy = {"Content-Security-Policy": build_policy(self._page)}
        self.counts = Counter[str]()
        self._watchers: set[asyncio.Task[None]] = set()

    async def get_page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._policy)

    async def get_health(self, request: Request) -> Response:
        running, waiting = self._engine.counts
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    async def get_metrics(self, request: Request) -> Response:
        return PlainTextResponse(format_metrics({**self.counts, **self._engine.read_metrics()}))

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model.to_json()]})

    async def get_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model.to_json())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, parse_chat)

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, parse_completion)

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            message = f"model {name!a:.80} not found; this server has {self._model.name!a}"
            raise ApiError(404, message, "model_not_found", "model")

    async def _generate(
        self,
        request: Request,
        schema: type[CommonRequest],
        parse: Callable[[Any, ServedModel], ParsedRequest],
    ) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise ApiError(415, "Content-Type must be application/json")
        body = schema.model_validate_json(await request.body())
        self._check_model(body.model)
        try:
            parsed = await run_in_threadpool(parse, body, self._model)
            job = self._engine.submit(parsed.requests)
        except (ConfigError, DataError) as error:
            raise ApiError(400, str(error)) from None
        watcher = asyncio.create_task(cancel_after_response(request, job))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        builder = ResponseBuilder(parsed, self._model)
        headers = {"Dropped-Messages": str(parsed.dropped)}
        if body.stream:
            events = stream_events(parsed, builder, job)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        async for _ in read_deltas(builder, job):
            pass
        return JSONResponse(builder.build_full(), headers=headers)


async def cancel_after_response(request: Request, job: Job) -> None:
    """Cancel the job once the response is complete or the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()


async def read_deltas(
    builder: ResponseBuilder, job: Job
) -> AsyncIterator[tuple[Choice, dict[str, Any]]]:
    """Yield each choice's additions, as they are decoded."""
    running = dict(enumerate(builder.choices))
    while running:
        token = await job.read()
        if choice := running.get(token.row):  # not ended by a stop text
            delta = choice.push(token)
            if choice.finish_reason:
                job.cancelled.add(choice.index)
                del running[choice.index]
            yield choice, delta


async def stream_events(
    parsed: ParsedRequest, builder: ResponseBuilder, job: Job
) -> AsyncIterator[bytes]:
    """Yield server-sent events: one per addition, a last one per choice, then [DONE].

    If decoding fails, the last event is the error instead.
    """
    try:
        for choice in builder.choices:
            if parsed.is_chat or choice.message["content"]:
                start = {"role": "assistant", **choice.message}
                yield format_event(builder.build_event(choice, start))
        async for choice, delta in read_deltas(builder, job):
            if delta:
                yield format_event(builder.build_event(choice, delta))
            if choice.finish_reason:
                yield format_event(builder.build_event(choice, {}, is_last=True))
    except (MegatokenError, ApiError) as error:
        yield b"data: " + bytes(build_error(error).body) + b"\n\n"
        return
    if parsed.body.stream_options.include_usage:
        yield format_event(builder.build_usage())
    yield b"data: [DONE]\n\n"


def format_event(content: dict[str, Any]) -> bytes:
    """Format a server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def format_metrics(values: Mapping[str, float]) -> str:
    """Format values in Prometheus' text format; the type follows from the end of the name."""
    types = {"total": "counter", "sum": "summary", "count": ""}
    lines = []
    for name, value in values.items():
        base, _, end = name.partition("{")[0].rpartition("_")
        kind = types.get(end, "gauge")
        if kind:
            metric = base if kind == "summary" else name.partition("{")[0]
            lines.append(f"# TYPE megatoken_{metric} {kind}")
        lines.append(f"megatoken_{name} {value}")
    return "\n".join([*dict.fromkeys(lines), ""])


def build_policy(page: str) -> str:
    """Build a Content-Security-Policy that allows only the page's own script and style."""
    sources = []
    for tag in ("script", "style"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources.append(f"{tag}-src 'sha256-{digest}'")
    return (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        f"form-action 'none'; frame-ancestors 'none'; {'; '.join(sources)}"
    )
