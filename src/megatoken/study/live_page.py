"""Serve the page of `megatoken report --serve`, which follows runs."""

import hmac
import secrets
import socket
from argparse import Namespace
from collections.abc import Callable
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route

from megatoken.base.console import Console
from megatoken.base.errors import DataError
from megatoken.inference.commands.serve import LOOPBACK
from megatoken.inference.http_server import (
    LOCAL_HOSTS,
    CheckHost,
    build_server,
    format_address,
    listen,
)

CONNECTIONS = 64  # open at once


def serve(build: Callable[[list[str] | None], str], options: Namespace, console: Console) -> None:
    """Serve the live page until Ctrl-C. Raises ConfigError if the address cannot be used.

    build: a function from the names of runs to leave out, None for the default, to the page.
    """
    is_local = options.host in LOOPBACK
    key = options.api_key or ("" if is_local else secrets.token_urlsafe(16))
    folder = f"/{key}/" if key else "/"

    def get_page(request: Request) -> Response:
        if not hmac.compare_digest(request.scope["path"].encode(), folder.encode()):
            raise HTTPException(403)
        return HTMLResponse(build(request.query_params.getlist("hide") or None))

    def refuse(request: Request, error: Exception) -> Response:
        return Response(status_code=403)

    build(None)
    host = socket.gethostname() if options.host == "0.0.0.0" else options.host
    checks = [
        Middleware(CheckHost, hosts=LOCAL_HOSTS if is_local else ["*"]),
        Middleware(GZipMiddleware, compresslevel=1),
    ]
    routes = [Mount("", routes=[Route("/{path:path}", get_page)], middleware=checks)]
    # DataError, OSError: a run was just removed.
    errors = dict.fromkeys((HTTPException, DataError, OSError), refuse)
    app = Starlette(routes=routes, exception_handlers=errors)
    with listen(options.host, options.port) as listener:
        address = format_address(host, listener)
        console.print(f"{address}{quote(folder)} until Ctrl-C")
        build_server(app, CONNECTIONS).run([listener])
