"""Generate continuations of a prompt; the same for the same seed.

The model's mode and torch's random state do not change.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatoken.config.model_config import ModelConfig
from megatoken.data.chat_template import find_stop_ids
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import ConfigError
from megatoken.model.gpt import GPT, Linear, set_attention, set_block_kernels
from megatoken.native.int8 import round_to_int8
from megatoken.native.library import NO_LIBRARY, find_library
from megatoken.sampling.batch import BatchDecoder, Request
from megatoken.sampling.choose import Sampling
from megatoken.system.device import Device
from megatoken.system.large_pages import gather_in_large_pages

REPLACEMENT_CHARACTER = "\ufffd"  # decoded from an incomplete character


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_samples: int = 1,
    device: Device | None = None,
    **settings: Any,
) -> str | list[str]:
    """Return the text that follows `prompt`, or a list of texts if `num_samples` is above 1.

    An empty prompt starts a new document. settings: max_new_tokens (default 128), temperature,
    top_k, top_p and seed, as in `Sampling`; other arguments and errors are those of `generate_ids`.
    Warns if only the end of the prompt fits the context.
    """
    sampling = Sampling(**{"stop_ids": find_stop_ids(tokenizer)} | settings)
    prompt_ids = tokenizer.encode(prompt).tolist()
    start_ids = tokenizer.start_ids(prompt_ids)
    if len(start_ids) > model.config.seq_len:
        note = describe_window(model.config, len(start_ids), sampling.max_new_tokens)
        warnings.warn(note, stacklevel=2)
    sequences = generate_ids(model, start_ids, sampling, num_samples=num_samples, device=device)
    texts = [tokenizer.decode_after(prompt_ids, ids) for ids in sequences]
    return texts[0] if num_samples == 1 else texts


def describe_window(config: ModelConfig, prompt_tokens: int, new_tokens: int) -> str:
    """Return a note if prompt and new tokens do not fit the context, or an empty string."""
    if prompt_tokens > config.seq_len:
        return (
            f"the prompt has {prompt_tokens:,} tokens; the model sees the last {config.seq_len:,}"
        )
    if prompt_tokens + new_tokens - 1 > config.seq_len:
        return (
            f"beyond the context of {config.seq_len:,} tokens, the model sees the newest ones only"
        )
    return ""


def generate_ids(
    model: GPT,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    num_samples: int = 1,
    device: Device | None = None,
    on_tokens: Callable[[list[int | None]], None] | None = None,
) -> list[list[int]]:
    """Return the new ids of `num_samples` continuations of one prompt, without stop ids.

    Sample i equals the only sample of seed + i. device: compute in its precision instead of the
    weights'. on_tokens: called with each step's ids, None for a finished sequence. Pass an empty
    prompt as the end-of-text id.
    Raises ConfigError for an empty prompt, DataError for ids outside the vocabulary, NumericsError
    for logits that are not finite.
    """
    if num_samples < 1:
        raise ConfigError(f"num_samples is {num_samples}", fix="use 1 or more")
    capacity = Request(prompt_ids, sampling).capacity
    sequences: list[list[int]] = [[] for _ in range(num_samples)]
    with BatchDecoder(model, rows=num_samples, capacity=capacity, device=device) as decoder:
        for i in range(num_samples):
            decoder.add(i, Request(prompt_ids, replace(sampling, seed=sampling.seed + i)))
        while decoder.rows:
            new_ids: list[int | None] = [None] * num_samples
            for token in decoder.step():
                if token.finish_reason != "stop":
                    new_ids[token.row] = token.id
                    sequences[token.row].append(token.id)
            if on_tokens is not None:
                on_tokens(new_ids)
    return sequences


def prepare_decoding(model: GPT, device: Device, *, int8: bool = False) -> None:
    """Change the weights' layout, in place, for a model that will only generate, on a CPU.

    In bf16 they are rounded to it, and native kernels are used if available. In fp32 weights with
    more outputs than inputs are stored column-major, which makes products with one row faster.

    int8: hold the matrices in 8 bits (native/int8.py): half the memory traffic of bf16, slightly
    different logits. Raises ConfigError if the native kernels for it are not available.
    """
    if int8:
        if device.type != "cpu" or not find_library():
            fix = NO_LIBRARY if device.type == "cpu" else "leave it out"
            raise ConfigError("int8 needs the native CPU kernels", "int8", fix)
        _round_matrices(model, device.dtype)
        _set_native_attention(model)
    elif device.type == "cpu" and device.precision == "bf16":
        model.to(torch.bfloat16)
        parameters = list(model.parameters())
        for parameter, copy in zip(parameters, gather_in_large_pages(parameters), strict=True):
            parameter.data = copy
        if find_library():
            set_block_kernels(model, "native")
            _set_native_attention(model)
    elif device.type == "cpu":
        linears = [part.weight for part in model.modules() if isinstance(part, nn.Linear)]
        for weight in (model.lm_head_weight, *linears):
            if weight.shape[0] > weight.shape[1]:
                weight.data = weight.data.t().contiguous().t()


def _set_native_attention(model: GPT) -> None:
    if model.attention_name == "flash" and not model.config.window:
        set_attention(model, "native")


def _round_matrices(model: GPT, dtype: torch.dtype) -> None:
    """Convert matrices to int8 and the rest to `dtype`. A tied embedding is copied for the head."""
    if model.head is None:
        model.head = Linear(model.config.d_model, len(model.tokens.weight), bias=False)
        model.head.weight = model.tokens.weight
    layers = [part for part in model.modules() if isinstance(part, Linear)]
    matrices = [round_to_int8(layer.weight.detach()) for layer in layers]
    values = gather_in_large_pages([matrix.values_OI for matrix in matrices])
    for layer, matrix, values_OI in zip(layers, matrices, values, strict=True):
        del layer.weight  # a parameter
        layer.weight = replace(matrix, values_OI=values_OI)  # type: ignore[assignment]  # for native/int8.py alone
    model.to(dtype)
    set_block_kernels(model, "int8")


class TextStream:
    """Decode ids that follow a prompt one by one. Never splits a character."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Context for the next ids: some decoders treat the first word of a text differently.
        self._context = list(prompt_ids)
        self._pending: list[int] = []

    def push(self, id: int | None) -> str:
        """Return the text that `id` completes; for None, the rest."""
        if id is not None:
            self._pending.append(id)
        prefix = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._pending)
        if text.endswith(REPLACEMENT_CHARACTER) and id is not None:
            return ""
        self._context = self._pending or self._context
        self._pending = []
        return text[len(prefix) :]
