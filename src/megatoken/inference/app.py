"""The web application of `megatoken serve`: OpenAI's endpoints, /health, and a chat page.

Any web page can make a visitor's browser send requests to this server. Two checks refuse requests
from other sites. The Host header must name this server (http_server.py). A body must be
application/json, which browsers send to another site only if that site allows it (CORS).

Requests and answers are not logged.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megatoken.base.errors import ConfigError, DataError, MegatokenError
from megatoken.inference.engine import Engine, Job
from megatoken.inference.http_server import CheckHost
from megatoken.inference.prometheus import format_metrics
from megatoken.inference.protocol import (
    ApiError,
    ChatRequest,
    Choice,
    CompletionRequest,
    ResponseBuilder,
    ServedModel,
)

MAX_BODY_BYTES = 4 << 20
MORE_CONNECTIONS = 64  # open connections without a job
PAGE = Path(__file__).parent / "page.html"


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
    everything = [
        Route("/", endpoints.get_page),
        Route("/health", endpoints.get_health),
        Route("/metrics", endpoints.get_metrics),
        Mount("/v1", routes=routes, middleware=check_key),
    ]
    check_host = [Middleware(CheckHost, hosts=hosts)]
    errors = (HTTPException, ValidationError, MegatokenError, Exception)
    return Starlette(
        routes=[Mount("", routes=everything, middleware=check_host)],
        exception_handlers=dict.fromkeys(errors, endpoints.handle_error),
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
            details = error.errors()
            lines = [": ".join([*map(str, row["loc"]), row["msg"]]) for row in details[:3]]
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
        self._totals = defaultdict[str, float](float)  # metrics that only grow
        self._watchers: set[asyncio.Task[None]] = set()

    def handle_error(self, request: Request, error: Exception) -> Response:
        """Turn an exception raised by an endpoint into OpenAI's error response."""
        response = build_error(error)
        self._count_request(response.status_code)
        return response

    def _count_request(self, status: int) -> None:
        self._totals[f'requests_total{{status="{status}"}}'] += 1

    async def get_page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._policy)

    async def get_health(self, request: Request) -> Response:
        running, waiting = self._engine.counts
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    async def get_metrics(self, request: Request) -> Response:
        running, waiting = self._engine.counts
        gauges = {
            "requests_running": running,
            "requests_waiting": waiting,
            "cache_tokens": self._engine.cached_tokens,
            "cache_tokens_bound": self._engine.cache_tokens or 0,
        }
        return PlainTextResponse(
            format_metrics("counter", self._totals) + format_metrics("gauge", gauges)
        )

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model.to_json()]})

    async def get_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model.to_json())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            message = f"model {name!a:.80} not found; this server has {self._model.name!a}"
            raise ApiError(404, message, "model_not_found", "model")

    async def _generate(
        self, request: Request, schema: type[ChatRequest | CompletionRequest]
    ) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise ApiError(415, "Content-Type must be application/json")
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body exceeds {MAX_BODY_BYTES:,} bytes")
        body = schema.model_validate_json(content)
        self._check_model(body.model)
        try:
            requests, dropped = await run_in_threadpool(body.encode, self._model)
            job = self._engine.submit(requests)
        except (ConfigError, DataError) as error:
            raise ApiError(400, str(error)) from None
        watcher = asyncio.create_task(cancel_after_response(request, job))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        builder = ResponseBuilder(body, requests, self._model)
        updates = self._read(builder.choices, job)
        headers = {"Dropped-Messages": str(dropped)}
        response: Response
        if body.stream:
            events = stream_events(builder, updates)
            response = StreamingResponse(events, media_type="text/event-stream", headers=headers)
        else:
            async for _ in updates:
                pass
            response = JSONResponse(builder.build_full(), headers=headers)
        self._count_request(200)
        return response

    async def _read(self, choices: Sequence[Choice], job: Job) -> AsyncIterator[Choice]:
        """Push each token to its choice, and yield the choice."""
        start = time.perf_counter()
        running = dict(enumerate(choices))
        while running:
            token = await job.read()
            if choice := running.get(token.key):  # not ended by a stop text
                if not choice.n_tokens:
                    self._totals["time_to_first_token_seconds_sum"] += time.perf_counter() - start
                    self._totals["time_to_first_token_seconds_count"] += 1
                    self._totals["prompt_tokens_total"] += len(job.requests[token.key].prompt_ids)
                    self._totals["cached_prompt_tokens_total"] += token.cached
                self._totals["generation_tokens_total"] += 1
                choice.push(token)
                if choice.finish_reason:
                    job.cancelled.add(token.key)
                    del running[token.key]
                yield choice


async def cancel_after_response(request: Request, job: Job) -> None:
    """Cancel the job once the response is complete or the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()


async def stream_events(
    builder: ResponseBuilder, updates: AsyncIterator[Choice]
) -> AsyncIterator[bytes]:
    """Yield server-sent events: one per token, then [DONE].

    If decoding fails, the last event is the error instead.
    """
    try:
        async for choice in updates:
            yield format_event(builder.build_event(choice))
    except (MegatokenError, ApiError) as error:
        yield b"data: " + bytes(build_error(error).body) + b"\n\n"
        return
    if builder.body.stream_options.get("include_usage"):
        yield format_event(builder.build_event() | {"usage": builder.count_tokens()})
    yield b"data: [DONE]\n\n"


def format_event(content: dict[str, Any]) -> bytes:
    """Format a server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


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
