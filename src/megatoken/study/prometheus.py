"""Serve the newest values of a run to Prometheus."""

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from megatoken.base.system.metrics_log import Row
from megatoken.inference.prometheus import format_metrics
from megatoken.study.sinks import POSITION, Sink, SinkRun, read_numbers

CLIENT_SECONDS = 10.0  # for a client to send its request


class Prometheus(Sink):
    """Serves a page of metrics at log.metrics_host and log.metrics_port, at any path."""

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run)
        values: dict[str, float] = {}

        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_SECONDS

            def do_GET(self) -> None:
                content = format_metrics("gauge", dict(values)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._values = values
        address = (run.log.metrics_host, run.log.metrics_port)
        self._server = ThreadingHTTPServer(address, Handler)
        Thread(target=self._server.serve_forever, daemon=True).start()

    def log(self, row: Row) -> None:
        numbers = read_numbers(row)
        if row["kind"] == "train":
            numbers |= {key: row[key] for key in POSITION}
        for name, value in numbers.items():
            self._values[re.sub(r"\W", "_", name)] = value

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
