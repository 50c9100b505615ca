"""The HTTP server of `megatoken serve` and `report --serve`: an application on a socket."""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from megatoken.base.errors import ConfigError

GRACE_SECONDS = 10  # to finish responses in progress after the first signal
LOCAL_HOSTS = ("127.0.0.1", "[::1]", "localhost")  # Host headers of this machine, without ports
HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
]


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port not in range(1 << 16):
            raise OSError("no such port")
        listener = socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        where = f"{host}, port {port}"
        raise ConfigError(f"cannot listen: {error}", where, "choose another --port") from None
    # Accepted connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def format_address(host: str, listener: socket.socket) -> str:
    """Return the URL of a server that listens on `host`, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def build_server(app: Starlette, connections: int) -> uvicorn.Server:
    """Build a server that logs only errors, and on shutdown finishes the responses in progress.

    connections: how many may be open at once.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            headers=HEADERS,
            limit_concurrency=connections,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )


@dataclass(frozen=True)
class CheckHost:
    """Middleware that refuses requests for other hosts, which prevents DNS rebinding.

    hosts: accepted Host headers without ports, "*" for any.
    """

    app: ASGIApp
    hosts: Sequence[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = re.sub(r":\d+$", "", Headers(scope=scope).get("host", "")).lower()
        if not {host, "*"} & {*map(str.lower, self.hosts)}:
            raise HTTPException(400, f"invalid Host header {host!a:.80}")
        await self.app(scope, receive, send)
