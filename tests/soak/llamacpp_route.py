"""A model of ours through Hugging Face's form into llama.cpp: the same logits, greedy text and tokens there.

    python -m tests.soak.llamacpp_route RUN --llama-cpp CHECKOUT

Needs a checkout of llama.cpp for its converter, and its engine: pip install gguf llama-cpp-python. The last line of
stdout is one JSON object. Weights and cache are fp32; a vocabulary trained here is said to be split as GPT-2's.
"""

import argparse
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from megatoken.console import Console
from megatoken.interop.export import export
from megatoken.interop.weights import load_weights
from tests.soak.route import NEW, PROMPT, TEXT, report, take_ids

F32 = 0  # of ggml's types; its cache of keys and values is fp16 otherwise


def convert(llama_cpp: Path, folder: Path, target: Path) -> None:
    """Run llama.cpp's own converter in this process."""
    sys.path.insert(0, str(llama_cpp))
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def say_gpt2(model: object, tokenizer: object) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = say_gpt2
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(target), "--outtype", "f32"]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--llama-cpp", type=Path, required=True)
    options = parser.parse_args()
    from llama_cpp import Llama

    loaded = load_weights(options.run, print)
    model, ids = loaded.model.eval(), take_ids(loaded)
    with tempfile.TemporaryDirectory() as room:
        export(options.run, "hf", Path(room) / "hf", "fp32", Console(to_stderr=True))
        convert(options.llama_cpp, Path(room) / "hf", Path(room) / "model.gguf")
        theirs = Llama(
            str(Path(room) / "model.gguf"), n_ctx=256, logits_all=True, type_k=F32, type_v=F32, verbose=False
        )
        theirs.eval(ids)
        found = torch.from_numpy(np.array(theirs.scores[: len(ids)]))
        theirs.reset()
        greedy = [id for _, id in zip(range(NEW), theirs.generate(ids[:PROMPT], temp=0.0, top_k=1), strict=False)]
        tokens = theirs.tokenize(TEXT.encode(), add_bos=False)
    with torch.inference_mode():
        expected = model.logits(model(torch.tensor([ids])))[0]
    report(loaded, found, expected, greedy, tokens)


if __name__ == "__main__":
    main()
