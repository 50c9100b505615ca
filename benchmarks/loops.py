"""`loops`: the share of samples in which a run loops, with the settings of `megatoken sample`.

    python -m benchmarks.loops RUN... [--data DATA] [options of `sample`, such as --temperature 1]

A sample loops if the same four consecutive words occur in it more than four times. Words are
separated by whitespace, punctuation and underscores. Every sample counts: prompts times seeds 0, 1,
... `median_nats` is the median over the samples of the mean loss of their tokens under the model at
temperature 1, `distinct` the share of different runs of n words among all of a sample's, averaged
over the samples. The row `held out` is text of --data, in pieces of as many tokens. Prints one JSON
line.
"""

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice
from statistics import mean, median
from typing import Any

import torch

from megatoken.base.console import Console
from megatoken.cli.arguments import parse
from megatoken.data.dataset import load_dataset
from megatoken.inference.batch import Request, generate_batch
from megatoken.inference.open_model import open_model
from megatoken.inference.sampling import Sampling
from megatoken.text.chat_template import find_stop_ids
from megatoken.text.load_pretrained import LoadedModel

PROMPTS = (
    *("def", "class", "import", "from", "    def __init__(self", "for i in range(", "if __name__"),
    *('"""', "# ", "def main():\n    "),
)
WORDS = 4
LIMIT = 4  # most occurrences of the same words in a sample that does not loop


def find_runs(text: str, length: int) -> list[tuple[str, ...]]:
    """Return all runs of `length` consecutive words."""
    words = [word for word in re.split(r"[\W_]+", text) if word]
    return list(zip(*(words[i:] for i in range(length)), strict=False))


def is_loop(text: str) -> bool:
    counts = Counter(find_runs(text, WORDS))
    return max(counts.values(), default=0) > LIMIT


def describe(texts: Sequence[str]) -> dict[str, Any]:
    """Return the figures of texts that need no model."""
    distinct = {}
    for length in (1, 2, 4):
        runs = [found for text in texts if (found := find_runs(text, length))]
        distinct[length] = round(mean(len(set(found)) / len(found) for found in runs), 3)
    loops = [text for text in texts if is_loop(text)]
    return {
        "samples": len(texts),
        "loops": len(loops),
        "share": len(loops) / len(texts),
        "distinct": distinct,
        "first_loop": loops[0] if loops else None,
    }


def measure_run(options: argparse.Namespace, prompts: Sequence[str], seeds: int) -> dict[str, Any]:
    """Sample `seeds` continuations of each prompt, as `sample` does, and describe them."""
    loaded, device = open_model(options, Console(to_stderr=True).warn)
    tokenizer = loaded.tokenizer
    prompt_ids = [tokenizer.encode(prompt).tolist() for prompt in prompts for _ in range(seeds)]
    requests = [
        Request(
            tokenizer.start_ids(ids),
            Sampling(
                options.tokens,
                options.temperature,
                options.top_k,
                options.top_p,
                number % seeds,
                find_stop_ids(tokenizer),
            ),
        )
        for number, ids in enumerate(prompt_ids)
    ]
    done = generate_batch(loaded.model, requests, rows=len(requests), device=device)
    texts = [
        tokenizer.decode_after(ids, completion.ids)
        for ids, completion in zip(prompt_ids, done, strict=True)
    ]
    losses = [
        measure_loss(loaded, [*request.prompt_ids], completion.ids)
        for request, completion in zip(requests, done, strict=True)
        if completion.ids
    ]
    settings = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    return settings | describe(texts) | {"median_nats": round(median(losses), 3)}


@torch.inference_mode()
def measure_loss(loaded: LoadedModel, prompt_ids: list[int], ids: list[int]) -> float:
    """Return the mean loss of `ids` after the prompt, in nats per token at temperature 1."""
    # Longer than the context: its last tokens.
    every = torch.tensor([prompt_ids + ids])[:, -loaded.model.config.seq_len - 1 :]
    targets = every[0, 1:][-len(ids) :]
    logits = loaded.model.logits(every[:, :-1])[0, -len(targets) :]
    return float(torch.nn.functional.cross_entropy(logits.float(), targets))


def read_pieces(folder: str, tokens: int, count: int) -> list[str]:
    """Return evenly spaced pieces of `tokens` tokens of held-out text."""
    from megatoken.text.tokenizer import open_tokenizer

    dataset = load_dataset(folder)
    tokenizer = open_tokenizer(dataset.vocabulary)
    starts = range(0, len(dataset.val) - tokens, (len(dataset.val) - tokens) // count)
    return [tokenizer.decode(dataset.val.read(at, tokens).tolist()) for at in islice(starts, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", help="dataset whose held-out text to describe")
    parser.add_argument("--prompt", action="append", help="default: beginnings of Python")
    parser.add_argument("--seeds", type=int, default=5, help="samples per prompt")
    options, others = parser.parse_known_args()
    prompts = options.prompt or PROMPTS
    result = defaultdict[str, Any](dict)
    for name in options.runs:
        sampling = parse(["sample", name, "--tokens", "100", *others])
        result[name] = measure_run(sampling, prompts, options.seeds)
        print(f"{name}: {result[name]['loops']} of {result[name]['samples']} loop", flush=True)
    if options.data:
        count = len(prompts) * options.seeds
        result["held out"] = describe(read_pieces(options.data, 100, count))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
