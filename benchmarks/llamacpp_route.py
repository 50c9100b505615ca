"""Export a model, convert it for llama.cpp, and compare logits, greedy text, tokens and chat.

    python -m benchmarks.llamacpp_route RUN --llama-cpp CHECKOUT

Needs llama.cpp's converter from a checkout, and its engine: pip install gguf llama-cpp-python.
Weights and cache are fp32; the pre-tokenizer of our own vocabularies is set to GPT-2's. Prints one
JSON line.
"""

import argparse
import runpy
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.route import ANSWER, NEW, PROMPT, TEXT, Reply, list_chats, report, take_ids
from megatoken.console import Console
from megatoken.convert.export import export
from megatoken.convert.load_pretrained import load_pretrained

F32 = 0  # of ggml's types; its cache of keys and values is fp16 otherwise


def convert(llama_cpp: Path, folder: Path, target: Path) -> None:
    """Run llama.cpp's converter in this process."""
    sys.path.insert(0, str(llama_cpp))
    from conversion.base import TextModel

    original = TextModel.get_vocab_base_pre

    def default_to_gpt2(model: object, tokenizer: object) -> str:
        try:
            return str(original(model, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = default_to_gpt2
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(target), "--outtype", "f32"]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


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
    parser.add_argument("--llama-cpp", type=Path, required=True)
    options = parser.parse_args()
    from llama_cpp import Llama

    loaded = load_pretrained(options.run)
    model, ids = loaded.model.eval(), take_ids(loaded)
    with tempfile.TemporaryDirectory() as temporary:
        export(options.run, "hf", Path(temporary) / "hf", "fp32", Console(to_stderr=True))
        convert(options.llama_cpp, Path(temporary) / "hf", Path(temporary) / "model.gguf")
        llama = Llama(
            str(Path(temporary) / "model.gguf"),
            n_ctx=256,
            logits_all=True,
            type_k=F32,
            type_v=F32,
            verbose=False,
        )
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
