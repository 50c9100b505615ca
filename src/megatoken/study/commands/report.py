"""`megatoken report RUN...`: write runs as one HTML page, or serve a page that follows them."""

import gzip
import hmac
import re
import secrets
import socket
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote

from megatoken.base.console import Console, format_quantity
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.system.atomic_write import local_path, replace_file, storage_errors
from megatoken.base.system.metrics_log import METRICS
from megatoken.cli import Data
from megatoken.cli.arguments import add_address_arguments
from megatoken.cli.runs import DEFAULT, find_runs
from megatoken.inference.commands.serve import LOOPBACK

HELP = "write runs as one offline HTML page: curves, samples, scores, cost"
EXAMPLE = "megatoken report runs/mine runs/other --out report.html"
HOST = re.compile(r"\[?(.*?)\]?(:\d+)?$")  # of a Host header, whose port is optional


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    doc = "run, or folder with runs at any depth (default runs)"
    arg("runs", metavar="RUN", nargs="*", type=local_path, default=[DEFAULT], help=doc)
    doc = "page to write (default report.html)"
    arg("--out", type=local_path, default=Path("report.html"), metavar="FILE", help=doc)
    arg("--price", type=float, metavar="DOLLARS", help="per process-hour")
    arg("--ladder", type=local_path, metavar="FILE", help="record of `bench ladder` to show")
    doc = "serve a page that follows the runs, also new ones, and this machine's load"
    arg("--serve", action="store_true", help=doc)
    doc = "key in the page's address (default: none on localhost, else a random one)"
    add_address_arguments(parser, 8765, doc)


def run(options: Namespace, console: Console) -> Data:
    from megatoken.study.report_page import build_page

    if options.serve:
        serve(options, console)
        return {"served": True}
    # A path without runs is kept, as an error names it.
    runs = [run for path in options.runs for run in [*find_runs(path)] or [path]]
    page = build_page(runs, options.price, options.ladder, console.warn).encode()
    with storage_errors(options.out, what="cannot write the report", fix="choose --out"):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.out, page)
    console.print(f"report: {options.out} ({format_quantity(len(page), 'B')})")
    return {"report": str(options.out), "bytes": len(page)}


def serve(options: Namespace, console: Console) -> None:
    """Serve the live page until Ctrl-C. Raises ConfigError if the address cannot be used."""
    from megatoken.study.report_page import build_page

    quiet = Console(quiet=True)  # each request reads the runs again
    is_local = options.host in LOOPBACK
    key = options.api_key or ("" if is_local else secrets.token_urlsafe(16))
    folder = f"/{quote(key, safe='')}/" if key else "/"

    def build(hidden: list[str] | None) -> str:
        runs = [run for path in options.runs for run in find_runs(path) if (run / METRICS).exists()]
        return build_page(runs, options.price, options.ladder, quiet.warn, hidden, is_live=True)

    class Handler(BaseHTTPRequestHandler):
        timeout = 30.0  # for a connection without a request

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            has_key = hmac.compare_digest(path.encode(), folder.encode())
            # Send nothing to another site whose name resolves to this machine (DNS rebinding).
            host = HOST.sub(r"\1", self.headers.get("Host", ""))
            if not has_key or (is_local and host not in LOOPBACK):
                self.send_error(403)
                return
            with suppress(DataError, OSError):  # a run was just removed; the client has gone
                page = gzip.compress(build(parse_qs(query).get("hide")).encode(), 1)
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Encoding", "gzip")
                self.end_headers()
                self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET

    build(None)
    try:
        server = Server((options.host, options.port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {options.host}: {error}", "--host, --port") from None
    host = socket.gethostname() if options.host == "0.0.0.0" else options.host
    host = f"[{host}]" if ":" in host else host
    console.print(f"http://{host}:{server.server_address[1]}{folder} until Ctrl-C")
    with server:
        server.serve_forever()
