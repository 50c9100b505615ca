"""Measure `megatoken serve`: throughput, memory, and time to first token.

    python -m benchmarks.serve

Serves a model of a preset's size with random weights and 4,096 ids. Clients stream completions of
--tokens tokens after prompts of different lengths, each with its own seed. Prints one JSON line:
tokens/s of all clients and seconds to the first token (median, lowest, highest over rounds), the
ratio to one client's tokens/s in the same round, and how many texts differ from the same request
alone. Then serves a small model with contexts of 8,192 and 131,072: resident memory before a
request and after one of 4 tokens, tokens/s of 64 clients, and seconds to the first token after a
prompt of 400 new tokens and after a prompt that continues an earlier sequence of 400.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.convert.hf.export import write_hf
from megatoken.model.gpt import GPT
from megatoken.text.tokenizer import Tokenizer, load_tokenizer

CLIENTS = (1, 4, 8)
MANY_CLIENTS = 64
CONTEXTS = (8192, 131072)
SMALL = ModelConfig(
    n_layer=8, n_head=8, d_model=256, d_ff=256, norm="rmsnorm", pos_emb="rotary", mlp="swiglu",
    bias=False, tie_embeddings=False,
)  # fmt: skip
SOURCES = sorted(
    (Path(__file__).parents[1] / "src").rglob("*.py")
)  # what the tokenizer is trained on
PROMPT = "In the beginning there was a small model, and it wrote one word after another. "


def ask(port: int, number: int, tokens: int) -> tuple[str, float, int]:
    """Return the text, seconds to the first token, and token count of a client's request."""
    body = {
        "model": "served",
        "prompt": PROMPT * (1 + number % 4),
        "seed": number,
        "max_tokens": tokens,
    }
    body |= {
        "temperature": 0.8,
        "top_k": 50,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    start, first, text, used = time.perf_counter(), 0.0, "", 0
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            first = first or time.perf_counter() - start
            text += "".join(choice["text"] for choice in event["choices"])
            used = event.get("usage", {}).get("completion_tokens", used)
    connection.close()
    return text, first, used


def measure(port: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure all clients; the first round is not counted."""
    alone = [ask(port, number, tokens)[0] for number in range(max(CLIENTS))]
    rates: dict[int, list[float]] = {clients: [] for clients in CLIENTS}
    firsts: dict[int, list[float]] = {clients: [] for clients in CLIENTS}
    different = compared = 0
    for _ in range(rounds):
        for clients in CLIENTS:
            start = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                answers = list(pool.map(lambda number: ask(port, number, tokens), range(clients)))
            seconds = time.perf_counter() - start
            rates[clients].append(sum(used for _, _, used in answers) / seconds)
            firsts[clients].append(statistics.median(first for _, first, _ in answers))
            compared += clients
            different += sum(text != alone[number] for number, (text, _, _) in enumerate(answers))
    ratios = {
        each: [b / a for a, b in zip(rates[1], rates[each], strict=True)] for each in CLIENTS[1:]
    }

    def spread(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "low": min(values), "high": max(values)}

    return {
        "tokens_per_second": {str(each): spread(values) for each, values in rates.items()},
        "seconds_to_first_token": {str(each): spread(values) for each, values in firsts.items()},
        "ratio_to_one_client": {str(each): spread(values) for each, values in ratios.items()},
        "texts_compared": compared,
        "texts_that_differ": different,
    }


@contextmanager
def serve(model: GPT, tokenizer: Tokenizer, precision: str) -> Iterator[tuple[int, int]]:
    """Serve a model in a process; yield its port and its process id."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "served"
        folder.mkdir()
        write_hf(folder, model, tokenizer, "fp32")
        command = [sys.executable, "-m", "megatoken", "serve", str(folder), "--port", "0"]
        process = subprocess.Popen(
            [*command, "--precision", precision], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            address = next(line for line in process.stdout if "http://127.0.0.1:" in line)
            port = int(address.partition("http://127.0.0.1:")[2].partition("/")[0])
            yield port, process.pid
        finally:
            process.terminate()
            process.wait()


def resident_mb(pid: int) -> float:
    [kilobytes] = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes) / 1024


def complete(port: int, prompt: list[int], tokens: int) -> tuple[float, int]:
    """Return the seconds that a greedy completion takes, and its cached tokens."""
    body = {"model": "served", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    start = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    usage = json.loads(connection.getresponse().read())["usage"]
    connection.close()
    return time.perf_counter() - start, usage["prompt_tokens_details"]["cached_tokens"]


def measure_context(context: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Measure the small model with a context."""
    model = GPT(replace(SMALL, seq_len=context), vocab_size=tokenizer.vocab_size)
    with serve(model, tokenizer, "fp32") as (port, pid):
        figures: dict[str, Any] = {"context": context, "resident_mb_before": resident_mb(pid)}
        complete(port, [1] * 5, 4)
        figures["resident_mb_after"] = resident_mb(pid)
        start = time.perf_counter()
        with ThreadPoolExecutor(MANY_CLIENTS) as pool:
            answers = list(pool.map(lambda number: ask(port, number, 24), range(MANY_CLIENTS)))
        seconds = time.perf_counter() - start
        figures["many_clients_tokens_per_second"] = sum(used for _, _, used in answers) / seconds
        for repeat in range(5):
            first = [2 + repeat] * 400
            for name, prompt in (("new", first), ("reused", [*first, *range(10)])):
                taken, cached = complete(port, prompt, 1)
                figures.setdefault(f"first_token_seconds_{name}", []).append(taken)
                figures[f"cached_tokens_{name}"] = cached
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tokenizer = load_tokenizer("bpe:4096", lambda: (path.read_text() for path in SOURCES))
    sizes = replace(PRESETS[options.preset], vocab_size=tokenizer.vocab_size)
    with serve(GPT(sizes), tokenizer, options.precision) as (port, _):
        figures = measure(port, options.tokens, options.rounds)
    bytes_tokenizer = load_tokenizer("bytes")
    figures["contexts"] = [measure_context(context, bytes_tokenizer) for context in CONTEXTS]
    print(json.dumps(vars(options) | figures))


if __name__ == "__main__":
    main()
