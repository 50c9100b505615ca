"""A local double of the Hugging Face hub's HTTP interface, for the client huggingface_hub.

Of the interface, it has what creating a repository, uploading files and reading them back needs.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

TOKEN = "hf_a_token_of_the_tests"


class Handler(BaseHTTPRequestHandler):
    files: dict[str, bytes]  # of the repository, by path
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = f"http://{self.headers['Host']}/me/tiny"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid token"}, 401)
        elif self.path == "/api/repos/create":
            self.answer({"url": address})
        elif self.path == "/api/validate-yaml":  # of the model card
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:  # no file is too large for a commit
            row = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [row | each for each in json.loads(body)["files"]]})
        elif "/commit/" in self.path:
            for value in (json.loads(line)["value"] for line in body.splitlines()):
                if "path" in value:
                    self.files[value["path"]] = base64.b64decode(value["content"])
            self.answer({"commitUrl": f"{address}/commit/1", "commitOid": "1", "hookOutput": ""})

    def do_GET(self) -> None:
        name = self.path.partition("/resolve/")[2].partition("/")[2].partition("?")[0]
        if self.path.startswith("/api/models/me/tiny"):
            rows = [{"rfilename": name} for name in self.files]
            self.answer({"id": "me/tiny", "sha": "1" * 40, "siblings": rows})
        elif name in self.files:
            self.send(self.files[name], 200)
        else:
            self.answer({}, 404)

    do_HEAD = do_GET

    def answer(self, value: object, code: int = 200) -> None:
        self.send(json.dumps(value).encode(), code, "application/json")

    def send(self, body: bytes, code: int, kind: str = "application/octet-stream") -> None:
        headers = {"Content-Type": kind, "Content-Length": len(body), "X-Repo-Commit": "1" * 40}
        headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
        if code == 404:
            headers["X-Error-Code"] = "EntryNotFound"
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve_hub() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the hub's address, and the files of its repository me/tiny."""
    handler = type("Hub", (Handler,), {"files": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.files
        server.shutdown()
