"""`generate`: tokens/s of greedy decoding at batch 1, next to `transformers` if it is installed.

Both have the same random weights. In fp32 all repeats must give the same ids. In bf16, where
rounding can change ids, transformers also runs in fp32 and the faster one counts. With native
kernels, ours is also timed with int8 weights.
"""

import argparse
import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.baselines import build_gpt2
from benchmarks.data import print_rates
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError
from megatoken.base.system.device import open_device
from megatoken.base.system.threads import thread_count
from megatoken.base.system.timing import time_interleaved
from megatoken.convert.hf.load import load_hf
from megatoken.inference.generate import generate_ids, prepare_decoding
from megatoken.inference.sampling import Sampling
from megatoken.model.gpt import GPT
from megatoken.model.native.selection import find_library

GAIN = 2.0  # of random matrices: ratio of a layer's output to its input


def run_generate(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Measure tokens/s, prompt included, of each program in interleaved rounds.

    Raises ConfigError if prompt and new tokens exceed the preset's context.
    """
    model_config, total = PRESETS[options.preset], options.prompt_tokens + options.tokens
    if total > model_config.seq_len:
        what = f"prompt of {options.prompt_tokens} and {options.tokens} new tokens need {total}"
        fix = f"the context of {options.preset} is {model_config.seq_len}: ask for fewer"
        raise ConfigError(what, "--tokens", fix)
    device = open_device(MachineConfig(device=options.device))
    console.print(
        f"{options.preset}, {device.precision} on {device.name}: {options.tokens} tokens after {options.prompt_tokens}"
    )
    model, reference = build_models(model_config, console)
    models = {"megatoken": model}
    if device.type == "cpu" and find_library():
        models["megatoken int8"] = copy.deepcopy(model)
    for name, each in models.items():
        prepare_decoding(each.to(device.torch_device), device, int8="int8" in name)
    noise = torch.Generator().manual_seed(0)
    prompt = torch.randint(
        0, model_config.vocab_size, (options.prompt_tokens,), generator=noise
    ).tolist()
    written: list[list[int]] = []

    def generate_ours(name: str) -> None:
        ids = generate_ids(
            models[name], prompt, Sampling(options.tokens, temperature=0), device=device
        )
        if name == "megatoken":
            written.append(ids[0])

    calls: dict[str, Callable[[], None]] = {name: partial(generate_ours, name) for name in models}
    if reference is not None:
        reference.to(device.torch_device)
        calls["transformers fp32"] = lambda: written.append(
            generate_with(reference, prompt, options.tokens)
        )
        if device.precision != "fp32":
            low = copy.deepcopy(reference).to(device.dtype)
            calls[f"transformers {device.precision}"] = lambda: written.append(
                generate_with(low, prompt, options.tokens)
            )
    timings = time_interleaved(calls, repeats=options.repeats, synchronize=device.synchronize)
    rates = {name: timing.rate(options.tokens) for name, timing in timings.items()}
    print_rates(rates, "tokens/s", console)
    same = all(ids == written[0] for ids in written) if device.precision == "fp32" else None
    if same is False:
        console.warn(
            "the programs gave different ids: rounding decided between two tokens, or one of them is wrong"
        )
    about = {
        "preset": options.preset,
        "new_tokens": options.tokens,
        "prompt_tokens": options.prompt_tokens,
    }
    theirs = [rate["median"] for name, rate in rates.items() if name not in models]
    ratios = {name: rates[name]["median"] / max(theirs) if theirs else None for name in models}
    about |= {"precision": device.precision, "threads": thread_count(), "tokens_per_second": rates}
    about |= {"ratio": ratios["megatoken"], "ratio_int8": ratios.get("megatoken int8")}
    yield {**about, "same_ids": same}


def build_models(model_config: ModelConfig, console: Console) -> tuple[GPT, Any]:
    """Return our model and transformers' with the same random weights, or ours and None.

    The blocks' matrices are enlarged. With initial weights, the tied embedding alone decides the
    next token, and the text repeats one token.
    """
    torch.manual_seed(0)
    try:
        reference = build_gpt2(model_config, model_config.vocab_size).eval()
    except ImportError:
        console.print(
            "transformers is not installed (pip install transformers): measuring ours alone"
        )
        return GPT(model_config), None
    with torch.no_grad():
        for weight in reference.transformer.h.parameters():
            if weight.dim() == 2:  # (in, out)
                weight.normal_(std=GAIN / math.sqrt(len(weight)))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference.save_pretrained(folder)
        return load_hf(folder)[0], reference


def generate_with(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Return transformers' own greedy continuation of the prompt."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return rows[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
