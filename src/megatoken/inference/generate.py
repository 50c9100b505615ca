"""Generate continuations of a prompt. The same seed gives the same text.

Generation changes neither torch's random state nor whether the model is in train or eval mode.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import ConfigError
from megatoken.base.rooms import load_entry
from megatoken.base.system.device import Device
from megatoken.base.system.large_pages import gather_in_large_pages
from megatoken.base.system.threads import use_torch_threads
from megatoken.inference.batch import Request, Token, generate_batch
from megatoken.inference.sampling import Sampling
from megatoken.model.gpt import GPT, Linear, set_attention, set_block_kernels
from megatoken.model.native.int8 import round_to_int8
from megatoken.model.native.selection import NO_LIBRARY, find_library
from megatoken.text.chat_template import find_stop_ids
from megatoken.text.tokenizer import Tokenizer

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

    An empty prompt starts a new document. settings: fields of `Sampling`, such as max_new_tokens,
    temperature and seed. The other arguments and the errors are those of `generate_ids`. Warns if
    only the end of the prompt fits the context.
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
    """Return a note if the prompt and the new tokens do not fit the context, or else ""."""
    if prompt_tokens > config.seq_len:
        return f"the prompt has {prompt_tokens:,} tokens, the context only {config.seq_len:,}"
    if prompt_tokens + new_tokens - 1 > config.seq_len:
        return f"the oldest tokens are dropped beyond the context of {config.seq_len:,}"
    return ""


def generate_ids(
    model: GPT,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    *,
    num_samples: int = 1,
    device: Device | None = None,
    on_token: Callable[[Token], object] | None = None,
) -> list[list[int]]:
    """Return the new ids of `num_samples` continuations of one prompt, without stop ids.

    Sample i has the seed `sampling.seed` + i, so each can be generated alone. prompt_ids: pass the
    end-of-text id to start a new document. device: compute in this device's precision; None for the
    precision of the weights. on_token: as in `generate_batch`. Raises ConfigError for an empty
    prompt, DataError for ids outside the vocabulary, and NumericsError for logits that are not
    finite.
    """
    requests = [
        Request(prompt_ids, replace(sampling, seed=sampling.seed + i)) for i in range(num_samples)
    ]
    completions = generate_batch(
        model, requests, rows=num_samples, device=device, on_token=on_token
    )
    return [completion.ids for completion in completions]


def prepare_decoding(model: GPT, device: Device, *, int8: bool = False) -> None:
    """Optimize a model's weights in place for generation; do not train it afterwards.

    In bf16, the weights are rounded and, on a CPU, native kernels are used if available. On a CPU
    in fp32, matrices with more outputs than inputs are stored column-major, which speeds up matmuls
    with a single row. int8: whether to store the matrices in 8 bits (model/native/int8.py), which
    halves the memory traffic of bf16 and changes the logits slightly. Raises ConfigError if int8 is
    requested without native kernels.
    """
    if int8:
        if device.type != "cpu" or not find_library():
            fix = NO_LIBRARY if device.type == "cpu" else "leave it out"
            raise ConfigError("int8 needs the native CPU kernels", "int8", fix)
        _round_matrices(model, device.dtype)
        _set_native_attention(model)
    elif device.precision == "bf16":
        model.to(torch.bfloat16)
        if device.type != "cpu":
            return
        parameters = list(model.parameters())
        for parameter, copy in zip(parameters, gather_in_large_pages(parameters), strict=True):
            parameter.data = copy
        if find_library():
            set_block_kernels(model, load_entry("block_kernels", "native"))
            _set_native_attention(model)
    elif device.type == "cpu":
        linears = [part.weight for part in model.modules() if isinstance(part, nn.Linear)]
        for weight in (model.lm_head_weight, *linears):
            if weight.shape[0] > weight.shape[1]:
                weight.data = weight.data.t().contiguous().t()


def _set_native_attention(model: GPT) -> None:
    use_torch_threads(1)
    if model.attention_name == "flash" and not model.config.window:
        set_attention(model, "native")


def _round_matrices(model: GPT, dtype: torch.dtype) -> None:
    """Convert matrices to int8 and everything else to `dtype`.

    If the embedding is tied, the output layer gets an int8 copy of it.
    """
    if model.head is None:
        model.head = Linear(model.config.d_model, len(model.tokens.weight), bias=False)
        model.head.weight = model.tokens.weight
    layers = [part for part in model.modules() if isinstance(part, Linear)]
    matrices = [round_to_int8(layer.weight.detach()) for layer in layers]
    values = gather_in_large_pages([matrix.values_OI for matrix in matrices])
    for layer, matrix, values_OI in zip(layers, matrices, values, strict=True):
        del layer.weight  # a registered parameter cannot be replaced by another type
        layer.weight = replace(matrix, values_OI=values_OI)  # type: ignore[assignment]
    model.to(dtype)
    set_block_kernels(model, load_entry("block_kernels", "int8"))


class TextStream:
    """Decodes ids to text one at a time, without splitting a character.

    prompt_ids: the ids of the prompt, which precede the decoded ids.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Decoded together with the next ids: some decoders treat a text's first word differently.
        self._context = list(prompt_ids)
        self._pending: list[int] = []

    def push(self, id: int | None) -> str:
        """Return the text that `id` completes, which may be ""; for None, return what is left."""
        if id is not None:
            self._pending.append(id)
        prefix = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._pending)
        if text.endswith(REPLACEMENT_CHARACTER) and id is not None:
            return ""
        self._context = self._pending or self._context
        self._pending = []
        return text[len(prefix) :]
