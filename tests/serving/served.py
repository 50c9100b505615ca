"""A tiny model behind HTTP, and requests to it."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection
from typing import Any

import torch

from megatoken.config.model_config import ModelConfig
from megatoken.data.chat_template import add_control_tokens, find_template
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.errors import ConfigError
from megatoken.model.gpt import GPT
from megatoken.serving.engine import Engine
from megatoken.serving.protocol import ServedModel
from megatoken.serving.server import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SIZES = ModelConfig(
    n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=64, seq_len=160,
    norm="rmsnorm", pos_emb="rotary", mlp="swiglu", bias=False, tie_embeddings=False,
)  # fmt: skip


@cache
def build_model(*, chat: bool = True) -> tuple[GPT, Tokenizer]:
    """Random weights, enlarged, over bytes: what it writes is letters that depend on all that was before."""
    tokenizer = load_tokenizer("bytes")
    tokenizer = add_control_tokens(tokenizer) if chat else tokenizer
    model = GPT(SIZES, vocab_size=tokenizer.vocab_size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
        assert model.head is not None
        model.head.weight[: ord("a")] *= 0.2
        model.head.weight[ord("z") + 1 :] *= 0.2
    return model, tokenizer


@dataclass
class Served:
    """A server in this process."""

    server: Server
    engine: Engine

    def connect(self, timeout: float = 120) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.server.port, timeout=timeout)

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and content of an answer; a dict is sent with the model's name, other bodies as they are."""
        connection = self.connect()
        raw = json.dumps({"model": "tiny"} | body).encode() if isinstance(body, dict) else body
        sent = ({"Content-Type": "application/json"} if raw is not None else {}) | (headers or {})
        try:
            connection.request(method or ("GET" if raw is None else "POST"), path, raw, sent)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(content) if is_json else content.decode()

    def chat(self, text: str, **options: Any) -> Any:
        return self.ask(CHAT, {"messages": [{"role": "user", "content": text}]} | options)


def read_events(content: str) -> list[Any]:
    """Objects of a stream, which must end as it should."""
    lines = content.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@contextmanager
def serve(
    *,
    chat: bool = True,
    rows: int = 8,
    waiting: int = 64,
    api_key: str = "",
    host: str = "127.0.0.1",
) -> Iterator[Served]:
    model, tokenizer = build_model(chat=chat)
    template, why = None, ""
    try:
        template = find_template(tokenizer)
    except ConfigError as error:
        why = str(error)
    about = ServedModel("tiny", model.config.seq_len, tokenizer, template, why)
    engine = Engine(model, rows=rows, waiting=waiting)
    with Server(engine, about, host, 0, api_key) as server, engine:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        thread.start()
        yield Served(server, engine)
        server.shutdown()
        thread.join()


def send_raw(port: int, raw: bytes, *, ends: bool = False) -> bytes:
    """All that the server answers to some bytes, after which the client may say that no more come."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(raw)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while block := connection.recv(65536):
            answer += block
    return answer
