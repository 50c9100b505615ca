"""Export a model for llama.cpp, and compare logits, greedy text, tokens and chat.

    python -m benchmarks.llamacpp_route RUN

Needs `pip install gguf llama-cpp-python`. Weights and cache are fp32. Prints one JSON line.
"""

import argparse
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.route import ANSWER, NEW, PROMPT, TEXT, Reply, list_chats, report, take_ids
from megatoken.base.console import Console
from megatoken.convert.export import export
from megatoken.convert.gguf import F32
from megatoken.text.load_pretrained import load_pretrained


def answer(llama: Any, chat: Sequence[dict[str, str]]) -> Reply:
    """Answer a conversation greedily, with the template in the GGUF."""
    done = llama.create_chat_completion(chat, max_tokens=ANSWER, temperature=0.0)
    choice, count = done["choices"][0], done["usage"]["prompt_tokens"]
    return Reply(
        llama.input_ids[:count].tolist(), choice["message"]["content"], choice["finish_reason"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    options = parser.parse_args()
    from llama_cpp import Llama

    loaded = load_pretrained(options.run)
    model, ids = loaded.model.eval(), take_ids(loaded)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "it.gguf"
        export(options.run, "gguf", path, "fp32", Console(to_stderr=True))
        llama = Llama(str(path), n_ctx=256, logits_all=True, type_k=F32, type_v=F32, verbose=False)
        llama.eval(ids)
        found = torch.from_numpy(np.array(llama.scores[: len(ids)]))
        llama.reset()
        greedy = [
            id
            for _, id in zip(
                range(NEW), llama.generate(ids[:PROMPT], temp=0.0, top_k=1), strict=False
            )
        ]
        replies = [answer(llama, chat) for chat in list_chats(loaded)]
        tokens = llama.tokenize(TEXT.encode(), add_bos=False)
    with torch.inference_mode():
        expected = model.logits(torch.tensor([ids]))[0]
    report(loaded, found, expected, greedy, tokens, replies, llama_cpp=version("llama-cpp-python"))


if __name__ == "__main__":
    main()
