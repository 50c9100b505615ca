"""HTTP in front of an engine: OpenAI's paths, a page to talk on, and who may ask.

Any web page can make its visitor's browser send requests here. So the Host header must be one of this server's names,
which a foreign domain that resolves to this address is not (DNS rebinding), an Origin header must be that of the page
served here, and a body must be JSON, for which a browser asks a server first when the page is another site's (CORS).
Nothing of a request or an answer is logged or kept.
"""

import base64
import hashlib
import hmac
import ipaddress
import json
import re
import select
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatoken.errors import MegatokenError
from megatoken.serving.engine import Engine, Job, QueueFull, Stopped
from megatoken.serving.protocol import (
    Answer,
    ApiError,
    Question,
    ServedModel,
    parse_chat,
    parse_completion,
    parse_json,
)

MAX_BODY_BYTES = 4 << 20
IDLE_SECONDS = 60.0  # that a connection may send or take nothing
POLL_SECONDS = 0.25  # between looks at a connection whose request waits
LINGER_SECONDS, LINGER_BYTES = (
    5.0,
    256 << 20,
)  # that the rest of a refused request is read and dropped
MORE_CONNECTIONS = 64  # than requests that are decoded and wait
LOOPBACK = ("127.0.0.1", "::1", "localhost")
PAGE = Path(__file__).parent / "page.html"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ClientGone(Exception):
    """The connection was closed before its answer was complete."""


class Server(ThreadingHTTPServer):
    """Listens on host and port (0: a free one); `serve_forever` answers, a thread for each connection.

    api_key: what clients must send; "": nothing. Raises OSError where it cannot listen.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, engine: Engine, model: ServedModel, host: str, port: int, api_key: str = ""
    ) -> None:
        self.engine, self.model, self.api_key = engine, model, api_key.encode()
        self.is_stopping = False
        self._changed = threading.Condition()
        self._answering = 0
        self._connections = threading.BoundedSemaphore(engine.max_jobs + MORE_CONNECTIONS)
        self.page = PAGE.read_bytes()
        self.policy = build_policy(self.page.decode())
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._host = host
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of the machine's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def knows_host(self, host: str) -> bool:
        """Whether a Host header is a name of this server; beyond loopback that is also any number."""
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if name in (*LOOPBACK, self._host.lower()):
            return True
        if self._host in LOOPBACK:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == socket.gethostname().lower()
        return True

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Counts the answers that are on their way."""
        with self._changed:
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    def finish_answers(self, seconds: float) -> bool:
        """Take no new questions; whether the last answer was complete within so many seconds."""
        self.is_stopping = True
        with self._changed:
            return self._changed.wait_for(lambda: not self._answering, seconds)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread, or close the connection where there are too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the default prints what may hold parts of a conversation."""


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection, one after another."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True

    def version_string(self) -> str:
        return "megatoken"

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""

    def setup(self) -> None:
        super().setup()
        self._is_refused = False

    def finish(self) -> None:
        """Send what is left, and let the client of a refused request read why.

        A socket that is closed before all was read resets the connection: the client, still sending its body, would
        see that in place of the answer.
        """
        super().finish()
        if not self._is_refused:
            return
        end, dropped = time.monotonic() + LINGER_SECONDS, 0
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while (left := end - time.monotonic()) > 0 and dropped < LINGER_BYTES:
                self.connection.settimeout(left)
                if not (block := self.connection.recv(1 << 20)):
                    return
                dropped += len(block)

    def do_GET(self) -> None:
        self._answer(
            {"/": self._send_page, "/health": self._send_health, "/v1/models": self._send_models}
        )

    def do_POST(self) -> None:
        self._answer({"/v1/chat/completions": self._chat, "/v1/completions": self._complete})

    def _answer(self, paths: dict[str, Any]) -> None:
        """Call the function of the path, after what every request must fulfil."""
        self._has_begun = False
        # What is not read of a request would be taken for the next one.
        self.close_connection = self.close_connection or self.command == "POST"
        try:
            self._check_sender()
            path = self.path.partition("?")[0]
            if path not in paths and path.removeprefix("/v1/models/") == self.server.model.name:
                path = "/v1/models"
            if path not in paths:
                raise ApiError(
                    404, f"nothing is here for {self.command}: see /v1/models, /v1/chat/completions"
                )
            if path.startswith("/v1/"):
                self._check_key()
            paths[path]()
        except (ClientGone, OSError):
            self.close_connection = True
        except ApiError as error:
            self._send_error(error)
        except MegatokenError as error:
            self._send_error(ApiError(500, str(error)))
        except Stopped:
            self._send_error(ApiError(503, "the server stops", code="stopping"))
        except Exception:
            self._send_error(ApiError(500, "the server failed: this is a bug", code="bug"))

    def _check_sender(self) -> None:
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if len(hosts) != 1 or not self.server.knows_host(hosts[0]):
            raise ApiError(403, "this is not the host that was asked for", code="foreign_host")
        if any(origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins):
            raise ApiError(403, "pages of other sites may not ask here", code="foreign_origin")

    def _check_key(self) -> None:
        given = (
            self.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "replace")
        )
        if self.server.api_key and not hmac.compare_digest(given, self.server.api_key):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _read_body(self) -> dict[str, Any]:
        lengths = self.headers.get_all("Content-Length", [])
        if (
            len(lengths) != 1
            or not re.fullmatch(r"[0-9]{1,12}", lengths[0])
            or "Transfer-Encoding" in self.headers
        ):
            raise ApiError(411, "the request has no Content-Length")
        if int(lengths[0]) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BODY_BYTES:,} bytes")
        if self.headers.get_content_type() != "application/json":
            raise ApiError(415, "the Content-Type is not application/json")
        body = self.rfile.read(int(lengths[0]))
        if len(body) < int(lengths[0]):
            raise ClientGone
        self.close_connection = self.headers.get("Connection", "").lower() == "close" or (
            self.request_version == "HTTP/1.0"
        )
        return parse_json(body)

    def _send(self, status: int, body: bytes, content_type: str, **headers: str) -> None:
        self._has_begun = True
        self.send_response(status)
        headers |= {"Content-Type": content_type, "Content-Length": str(len(body))}
        for name, value in (
            HEADERS | {name.replace("_", "-"): value for name, value in headers.items()}
        ).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _send_json(self, content: dict[str, Any], status: int = 200, **headers: str) -> None:
        self._send(status, json.dumps(content).encode() + b"\n", "application/json", **headers)

    def _send_error(self, error: ApiError) -> None:
        """As an answer, or as the last object of a stream that has begun; a client that is gone misses it."""
        try:
            if self._has_begun:
                self.close_connection = True
                self._send_event(error.to_json())
                self._write_chunk(b"")
            else:
                self._is_refused = True
                later = {"Retry_After": "1"} if error.status in (429, 503) else {}
                self._send_json(error.to_json(), error.status, **later)
        except OSError:
            self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For what http.server finds wrong, in the same form."""
        self.close_connection, self._has_begun = True, False
        self.request_version = "HTTP/1.0"  # what it is may be unknown
        self._send_error(
            ApiError(
                code, f"{HTTPStatus(code).phrase.lower()}: not a request that is answered here"
            )
        )

    def _send_page(self) -> None:
        self._send(
            200,
            self.server.page,
            "text/html; charset=utf-8",
            Content_Security_Policy=self.server.policy,
        )

    def _send_health(self) -> None:
        running, waiting = self.server.engine.counts
        self._send_json(
            {
                "status": "stopping" if self.server.is_stopping else "ok",
                "running": running,
                "waiting": waiting,
            }
        )

    def _send_models(self) -> None:
        entry = self.server.model.describe()
        self._send_json(
            {"object": "list", "data": [entry]}
            if self.path.partition("?")[0] == "/v1/models"
            else entry
        )

    def _chat(self) -> None:
        self._decode(parse_chat(self._read_body(), self.server.model))

    def _complete(self) -> None:
        self._decode(parse_completion(self._read_body(), self.server.model))

    def _decode(self, question: Question) -> None:
        with self.server.answering():
            if self.server.is_stopping:
                raise Stopped
            try:
                job = self.server.engine.submit(question.request)
            except QueueFull:
                raise ApiError(
                    429, "too many requests wait: try again later", code="queue_full"
                ) from None
            try:
                answer = Answer(question, self.server.model)
                if question.is_streamed:
                    self._stream(answer, question, job)
                else:
                    text = "".join(self._read_answer(answer, job))
                    self._send_json(
                        answer.build_whole(text), Dropped_Messages=str(question.dropped)
                    )
            finally:
                job.cancel()

    def _read_answer(self, answer: Answer, job: Job) -> Iterator[str]:
        """Pieces of text as they come. Raises ClientGone."""
        connection = select.poll()  # unlike select, of descriptors above 1,023 as well
        connection.register(self.connection, select.POLLIN)
        while answer.finish_reason is None:
            tokens = job.read(POLL_SECONDS)
            if connection.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
                raise ClientGone
            if text := answer.push(tokens):
                yield text

    def _stream(self, answer: Answer, question: Question, job: Job) -> None:
        """Server-sent events: an object each, then [DONE]."""
        self._has_begun = True
        self.send_response(200)
        about = {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Dropped-Messages": str(question.dropped),
        }
        for name, value in (HEADERS | about).items():
            self.send_header(name, value)
        if self.request_version == "HTTP/1.0":
            self.close_connection = True
        else:
            self.send_header("Transfer-Encoding", "chunked")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if question.is_chat:
            self._send_event(answer.build_chunk("", is_first=True))
        for text in self._read_answer(answer, job):
            self._send_event(answer.build_chunk(text))
        self._send_event(answer.build_chunk("", is_last=True))
        if question.has_usage:
            self._send_event(answer.build_usage())
        self._write_chunk(b"data: [DONE]\n\n")
        self._write_chunk(b"")

    def _send_event(self, content: dict[str, Any]) -> None:
        self._write_chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _write_chunk(self, block: bytes) -> None:
        """A piece of a body without a length; an empty one ends it."""
        if self.request_version == "HTTP/1.0":
            self.wfile.write(block)
        else:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))


def build_policy(page: str) -> str:
    """The Content-Security-Policy of a page: its own script and style, by their hashes, and this server alone."""
    allowed = []
    for tag in ("script", "style"):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts
        )
        allowed.append(" ".join([f"{tag}-src", *(f"'sha256-{digest}'" for digest in digests)]))
    rest = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return f"{rest}; frame-ancestors 'none'; {'; '.join(allowed)}"
