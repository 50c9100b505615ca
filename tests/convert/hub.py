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
from typing import Any

TOKEN = "hf_a_token_of_the_tests"


class Handler(BaseHTTPRequestHandler):
    files: dict[str, bytes]  # of the repository, by path
    objects: dict[str, bytes]  # large files, by sha256
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid token"}, 401)
        elif self.path == "/api/repos/create":
            self.answer({"url": f"{self.root}/me/tiny"})
        elif self.path == "/api/validate-yaml":  # of the model card
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            paths = [each["path"] for each in json.loads(body)["files"]]
            modes = {True: "lfs", False: "regular"}
            rows = [{"path": p, "uploadMode": modes[p.endswith("safetensors")]} for p in paths]
            self.answer({"files": [row | {"shouldIgnore": False} for row in rows]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            rows = json.loads(body)["objects"]
            upload = {"upload": {"href": f"{self.root}/put"}}
            self.answer(
                {"transfer": "basic", "objects": [row | {"actions": upload} for row in rows]},
                kind="application/vnd.git-lfs+json",
            )
        elif "/commit/" in self.path:
            for line in body.splitlines():
                row = json.loads(line)
                value = row["value"]
                if row["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif row["key"] == "lfsFile":
                    self.files[value["path"]] = self.objects[value["oid"]]
            address = {"commitUrl": f"{self.root}/me/tiny/commit/1", "commitOid": "1"}
            self.answer(address | {"hookOutput": ""})
        else:
            self.answer({}, 404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.objects[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_GET(self) -> None:
        name = self.path.partition("/resolve/")[2].partition("/")[2].partition("?")[0]
        if self.path.startswith("/api/models/me/tiny"):
            rows = [{"rfilename": name} for name in self.files]
            self.answer({"id": "me/tiny", "sha": "1" * 40, "siblings": rows})
        elif name in self.files:
            self.send(self.files[name], 200, "application/octet-stream")
        else:
            self.answer({}, 404)

    do_HEAD = do_GET

    @property
    def root(self) -> str:
        return f"http://{self.headers['Host']}"

    def answer(self, value: Any, code: int = 200, kind: str = "application/json") -> None:
        self.send(json.dumps(value).encode(), code, kind)

    def send(self, body: bytes, code: int, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", "1" * 40)
        if code == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serve_hub() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the hub's address, and the files of its repository me/tiny."""
    handler = type("Hub", (Handler,), {"files": {}, "objects": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.files
        server.shutdown()
