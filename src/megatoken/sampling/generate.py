"""Continuations of a prompt, one token at a time, with cached keys and values; the same for the same seed.

The model's mode and torch's random state are left as they were. sampling/batch.py decodes.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

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
from megatoken.sampling.choose import check_settings
from megatoken.system.device import Device
from megatoken.system.large_pages import gather_in_large_pages

DEFAULT_NEW_TOKENS = 128
REPLACEMENT_CHARACTER = "\ufffd"  # what a decoder makes of an incomplete character


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    num_samples: int = 1,
    device: Device | None = None,
) -> str | list[str]:
    """The text that follows `prompt`; a list of texts if num_samples is above 1. Stops where the model ends its text.

    max_new_tokens: 128 by default. The other arguments and errors are those of `generate_ids`; an empty prompt starts a
    new document. Warns of a prompt longer than the context, of which only the end is seen.
    """
    prompt_ids = tokenizer.encode(prompt).tolist()
    start_ids = tokenizer.start_ids(prompt_ids)
    if len(start_ids) > model.config.seq_len:
        warnings.warn(describe_window(model.config, len(start_ids), max_new_tokens), stacklevel=2)
    sequences = generate_ids(
        model,
        start_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        num_samples=num_samples,
        stop_ids=find_stop_ids(tokenizer),
        device=device,
    )
    texts = [tokenizer.decode_after(prompt_ids, ids) for ids in sequences]
    return texts[0] if num_samples == 1 else texts


def describe_window(config: ModelConfig, prompt_tokens: int, new_tokens: int) -> str:
    """What the user should know where prompt and new tokens do not fit the context; empty where they do."""
    if prompt_tokens > config.seq_len:
        return f"the prompt has {prompt_tokens:,} tokens, the model sees the last {config.seq_len:,}: its context"
    if prompt_tokens + new_tokens - 1 > config.seq_len:
        return (
            f"beyond the context of {config.seq_len:,} tokens the model sees the newest ones only"
        )
    return ""


def generate_ids(
    model: GPT,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    num_samples: int = 1,
    stop_ids: Sequence[int] = (),
    device: Device | None = None,
    on_tokens: Callable[[list[int | None]], None] | None = None,
) -> list[list[int]]:
    """New ids of `num_samples` continuations of one prompt; any of `stop_ids` ends a sequence and is left out.

    temperature 0 takes the likeliest id; top_k and top_p draw from the k likeliest ids (0: all), or from the fewest
    whose probabilities sum to p (Holtzman et al. 2020). Sample i equals the only sample of seed + i. device: compute in
    its precision instead of the weights'. on_tokens is called with each step's ids, None for a sequence that has ended.
    An empty prompt must be given as the end-of-text id.
    Raises ConfigError for settings out of range or no prompt, DataError for ids outside the vocabulary, NumericsError
    when logits are not finite.
    """
    check_settings(max_new_tokens, temperature, top_k, top_p, num_samples)
    request = Request(
        prompt_ids,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=stop_ids,
    )
    sequences: list[list[int]] = [[] for _ in range(num_samples)]
    with BatchDecoder(model, rows=num_samples, capacity=request.capacity, device=device) as decoder:
        for i in range(num_samples):
            decoder.add(i, replace(request, seed=seed + i))
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
    """Lay out the weights, in place, for a model that will only generate, where a token reads each of them once.

    On a CPU in bf16 they are rounded to it, and the native kernels compute where there are any. In fp32 every weight
    with more outputs than inputs is stored column by column: one row is multiplied faster that way, because long sums
    of columns replace short dot products. Elsewhere nothing changes.

    int8: hold the matrices in 8 bits (native/int8.py), which are read in half the time of bf16, and change the logits a
    little. Raises ConfigError where there are no native kernels for that.
    """
    if int8:
        if device.type != "cpu" or not find_library():
            what = "products with weights of 8 bits are computed by the native kernels for CPUs"
            raise ConfigError(what, "int8", NO_LIBRARY if device.type == "cpu" else "leave it out")
        _round_matrices(model, device.dtype)
        _set_native_attention(model)
        return
    if device.type != "cpu":
        return
    if device.precision == "bf16":
        model.to(torch.bfloat16)
        for parameter, copy in zip(
            model.parameters(), gather_in_large_pages(list(model.parameters())), strict=True
        ):
            parameter.data = copy
        if find_library():
            set_block_kernels(model, "native")
            _set_native_attention(model)
        return
    for weight in [
        model.lm_head_weight,
        *(part.weight for part in model.modules() if isinstance(part, nn.Linear)),
    ]:
        if weight.shape[0] > weight.shape[1]:
            weight.data = weight.data.t().contiguous().t()


def _set_native_attention(model: GPT) -> None:
    if model.attention_name == "flash" and not model.config.window:
        set_attention(model, "native")


def _round_matrices(model: GPT, dtype: torch.dtype) -> None:
    """Hold the weight of every product in 8 bits, all else in `dtype`; a tied embedding stays, beside a copy of it."""
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
    """Decodes the ids behind a prompt as they come; a character that several tokens share is released whole."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # The ids last decoded: some decoders treat the first word of a text differently.
        self._released = list(prompt_ids)
        self._pending: list[int] = []

    def push(self, id: int | None) -> str:
        """The text that `id` completes, empty while a character is incomplete; None at the end: the rest."""
        self._pending += [] if id is None else [id]
        before, text = map(self._tokenizer.decode, (self._released, self._released + self._pending))
        if text.endswith(REPLACEMENT_CHARACTER) and id is not None:
            return ""
        self._released, self._pending = self._pending or self._released, []
        return text[len(before) :]
