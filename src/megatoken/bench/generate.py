"""bench generate: tokens/s of `generate` at batch 1, with `transformers` beside it where that is installed.

In: a preset with random weights, the lengths of prompt and continuation. Out: the speed of writing the continuation,
prompt included, greedy, fp32. Both contenders have the same weights and their ids are compared in every repeat.
Absent: trained weights and sampling, which change the text and not the speed; other batch sizes.
"""

import argparse
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatoken.config import Machine
from megatoken.console import Console
from megatoken.device import Device, open_device
from megatoken.errors import Exit, Fault
from megatoken.interop.hf import load_hf
from megatoken.model.decode import turn_weights
from megatoken.model.gpt import GPT, initialize
from megatoken.presets import PRESETS, Shape
from megatoken.sample import generate
from megatoken.timing import take_turns

Generate = Callable[[], list[int]]

GAIN = 2.0  # of random matrices: a layer's output is this many times as large as its input


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Time a preset. Raises Fault(CONFIG) when prompt and continuation are longer than its context."""
    shape, total = PRESETS[options.preset], options.prompt_tokens + options.tokens
    if total > shape.seq_len:
        what = f"prompt of {options.prompt_tokens} and {options.tokens} new tokens need {total}"
        fix = f"the context of {options.preset} is {shape.seq_len}: ask for fewer"
        raise Fault(Exit.CONFIG, what, "--tokens", fix)
    device = open_device(Machine(device=options.device, precision="fp32"))
    console.say(f"{options.preset}, fp32 on {device.name}: {options.tokens} tokens after {options.prompt_tokens}")
    answer = measure(shape, device, options.tokens, options.prompt_tokens, options.repeats, console)
    return {"preset": options.preset, **answer}


def measure(
    shape: Shape, device: Device, tokens: int, prompt_tokens: int, repeats: int, console: Console
) -> dict[str, Any]:
    """Tokens/s of each contender, in turns after one untimed round, and whether all gave the same ids.

    `ratio`: our median over that of transformers; null without it.
    """
    model, reference = build_models(shape, console)
    if device.place.type == "cpu":
        turn_weights(model)
    model.to(device.place)
    prompt = torch.randint(0, shape.vocab_size, (prompt_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    contenders: dict[str, Generate] = {
        "megatoken": lambda: generate(model, prompt, tokens=tokens, temperature=0, device=device)[0]
    }
    if reference is not None:
        contenders["transformers"] = follow_reference(reference.to(device.place), prompt, tokens)
    written: list[list[int]] = []

    def keep(write: Generate) -> None:
        written.append(write())

    calls = {name: partial(keep, write) for name, write in contenders.items()}
    turns = take_turns(calls, repeats=repeats, synchronize=device.synchronize)
    rates = {name: timing.rate(tokens) for name, timing in turns.items()}
    for name, rate in rates.items():
        console.say(f"{name:<12} {rate['median']:8.1f} tokens/s ({rate['low']:.1f} to {rate['high']:.1f})")
    same = all(ids == written[0] for ids in written)
    if not same:
        console.warn("the contenders gave different ids: rounding decided between two tokens, or one of them is wrong")
    ratio = rates["megatoken"]["median"] / rates["transformers"]["median"] if reference is not None else None
    return {
        "new_tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "threads": torch.get_num_threads(),
        "tokens_per_second": rates,
        "ratio": ratio,
        "same_ids": same,
    }


def build_models(shape: Shape, console: Console) -> tuple[GPT, Any]:
    """Our model and transformers' with the same random weights, on the CPU; ours and None where it is not installed."""
    try:
        import transformers
    except ImportError:
        console.say("transformers is not installed (pip install transformers): measuring ours alone")
        model = GPT(shape)
        initialize(model, 0)
        return model, None
    transformers.logging.disable_progress_bar()
    config = transformers.GPT2Config(
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.d_model,
        n_inner=shape.d_ff,
        n_positions=shape.seq_len,
        vocab_size=shape.vocab_size,
        bos_token_id=None,
        eos_token_id=None,  # no id ends the text, as in ours without a stop_id
    )
    torch.manual_seed(0)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = transformers.GPT2LMHeadModel(config).eval()
        enliven(reference)
        reference.save_pretrained(folder)
        model, _ = load_hf(folder)
    console.say(f"the weights of transformers' model are in ours ({time.perf_counter() - began:.1f} s)")
    return model, reference


def enliven(reference: Any) -> None:
    """Draw the matrices of transformers' blocks anew, wide enough to change what passes through, in place.

    With initial weights the tied embedding decides alone: the text is one token for ever, and comparing it is idle.
    """
    with torch.no_grad():
        for weight in reference.transformer.h.parameters():
            if weight.dim() == 2:  # (in, out)
                weight.normal_(std=GAIN / math.sqrt(len(weight)))


def follow_reference(model: Any, prompt: list[int], tokens: int) -> Generate:
    """A greedy continuation of the prompt by transformers' own `generate`."""
    ids = torch.tensor([prompt], device=model.device)

    def continue_prompt() -> list[int]:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
        new: list[int] = rows[0, len(prompt) :].tolist()
        return new

    return continue_prompt
