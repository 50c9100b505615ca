"""A tiny model behind HTTP, served by a thread of this process."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import Any

import httpx2
import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.inference.app import MORE_CONNECTIONS, build_app
from megatoken.inference.engine import Engine
from megatoken.inference.http_server import build_server, listen
from megatoken.inference.protocol import ServedModel
from megatoken.model.gpt import GPT
from megatoken.text.chat_template import ChatTemplate, add_control_tokens, template_of
from megatoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.processes import HANG_SECONDS
from tests.tiny_model import enlarge

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LOCAL = ("127.0.0.1", "[::1]", "localhost")
SIZES = ModelConfig(
    n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=64, seq_len=160,
    norm="rmsnorm", pos_emb="rotary", mlp="swiglu", bias=False, tie_embeddings=False,
)  # fmt: skip


@cache
def build_model(*, chat: bool = True) -> tuple[GPT, Tokenizer]:
    """Return a byte-level model whose random weights write letters that depend on the prompt."""
    tokenizer = load_tokenizer("bytes")
    tokenizer = add_control_tokens(tokenizer) if chat else tokenizer
    model = enlarge(GPT(SIZES, vocab_size=tokenizer.vocab_size)).eval()
    with torch.no_grad():
        model.head.weight[: ord("a")] *= 0.2
        model.head.weight[ord("z") + 1 :] *= 0.2
    return model, tokenizer


def user(text: str) -> dict[str, str]:
    """Return a user's message."""
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Served:
    """A running server and a client of it."""

    client: httpx2.Client
    engine: Engine
    port: int

    def post(self, path: str, **body: Any) -> httpx2.Response:
        """Post a request for the served model."""
        return self.client.post(path, json={"model": "tiny"} | body)

    def answer(self, path: str, **body: Any) -> Any:
        """Return the object of an answer."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any, **body: Any) -> Any:
        """Return the object of a completion."""
        return self.answer(COMPLETIONS, prompt=prompt, **body)

    def chat(self, text: str, **body: Any) -> Any:
        """Return the object of an answer to one message."""
        return self.answer(CHAT, messages=[user(text)], **body)

    def choose(self, prompt: str, **body: Any) -> Any:
        """Return the only choice of a completion."""
        [choice] = self.complete(prompt, **body)["choices"]
        return choice

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Return the objects of a streamed answer."""
        *lines, done, end = self.post(path, stream=True, **body).text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(line.removeprefix("data: ")) for line in lines]


@contextmanager
def serve(
    *,
    chat: bool = True,
    rows: int = 8,
    waiting: int = 64,
    api_key: str = "",
    hosts: Sequence[str] = LOCAL,
    cache_tokens: int = 20 * SIZES.seq_len,
    template: ChatTemplate | None = None,
) -> Iterator[Served]:
    model, tokenizer = build_model(chat=chat)
    template = template or template_of(tokenizer)
    served = ServedModel("tiny", SIZES.seq_len, tokenizer, template, "no template")
    with (
        listen("127.0.0.1", 0) as listener,
        Engine(model, rows=rows, waiting=waiting, cache_tokens=cache_tokens) as engine,
    ):
        port = listener.getsockname()[1]
        server = build_server(
            build_app(engine, served, hosts, api_key), engine.max_jobs + MORE_CONNECTIONS
        )
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        url, limits = f"http://127.0.0.1:{port}", httpx2.Limits(max_keepalive_connections=0)
        try:
            with httpx2.Client(base_url=url, timeout=HANG_SECONDS, limits=limits) as client:
                yield Served(client, engine, port)
        finally:
            server.should_exit = True
            thread.join()
