"""`megatoken report RUN...`: write runs as one HTML page, or serve it while they train."""

from argparse import ArgumentParser, Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatoken.cli import Result
from megatoken.console import Console, format_quantity
from megatoken.errors import ExitCode, StorageError
from megatoken.system.atomic_write import local_path, replace_file, storage_errors

HELP = "write runs as one offline HTML page: curves, samples, scores, cost"
EXAMPLE = "megatoken report runs/mine runs/other --out report.html"


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    arg("runs", metavar="RUN", nargs="+", type=local_path)
    doc = "page to write (default report.html)"
    arg("--out", type=local_path, default=Path("report.html"), metavar="FILE", help=doc)
    doc = "serve the page on this machine while runs continue (default port 8765)"
    arg("--serve", type=int, nargs="?", const=8765, metavar="PORT", help=doc)
    arg("--price", type=float, metavar="DOLLARS", help="per process-hour")
    arg("--ladder", type=local_path, metavar="FILE", help="record of `bench ladder` to show")


def run(options: Namespace, console: Console) -> Result:
    from megatoken.cli.report_page import build_page

    page = build_page(options.runs, options.price, options.ladder, console.warn).encode()
    if options.serve is not None:
        serve(options, console)
        return Result(ExitCode.DONE, {"served": True})
    with storage_errors(options.out, what="cannot write the report", fix="choose --out"):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.out, page)
    console.print(f"report: {options.out} ({format_quantity(len(page), 'B')})")
    return Result(ExitCode.DONE, {"report": str(options.out), "bytes": len(page)})


def serve(options: Namespace, console: Console) -> None:
    """Serve the page to this machine until Ctrl-C. Each request rebuilds it from the runs."""
    from megatoken.cli.report_page import build_page

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Send nothing to another site whose name resolves to this machine (DNS rebinding).
            host = self.headers.get("Host", "").rpartition(":")[0]
            if self.path != "/" or host not in ("127.0.0.1", "localhost"):
                self.send_error(404)
                return
            page = build_page(
                options.runs, options.price, options.ladder, lambda text: None, is_live=True
            )
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", options.serve), Handler)
    except (OSError, OverflowError) as error:
        raise StorageError(f"cannot serve: {error}", f"--serve {options.serve}") from None
    console.print(f"http://127.0.0.1:{server.server_address[1]}/ until Ctrl-C")
    with server:
        server.serve_forever()
