"""Measure the throughput of `megatoken serve` with 1, 4 and 8 concurrent clients.

    python -m benchmarks.serve

Serves a model of a preset's size with random weights and 4,096 ids. Clients stream completions of
--tokens tokens after prompts of different lengths, each with its own seed. Prints one JSON line:
tokens/s of all clients and seconds to the first token (median, lowest, highest over rounds), the
ratio to one client's tokens/s in the same round, and how many texts differ from the same request
alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from megatoken.config.presets import PRESETS
from megatoken.convert.hf.export import write_hf
from megatoken.data.tokenizer import load_tokenizer
from megatoken.model.gpt import GPT

CLIENTS = (1, 4, 8)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "served"
        folder.mkdir()
        tokenizer = load_tokenizer("bpe:4096", lambda: (path.read_text() for path in SOURCES))
        sizes = replace(PRESETS[options.preset], vocab_size=tokenizer.vocab_size)
        write_hf(folder, GPT(sizes), tokenizer, "fp32")
        command = [sys.executable, "-m", "megatoken", "serve", str(folder), "--port", "0"]
        process = subprocess.Popen(
            [*command, "--precision", options.precision], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            port = int(
                process.stdout.readline().partition("http://127.0.0.1:")[2].partition("/")[0]
            )
            figures = measure(port, options.tokens, options.rounds)
        finally:
            process.terminate()
            process.wait()
    print(json.dumps(vars(options) | figures))


if __name__ == "__main__":
    main()
