"""Continuations of a prompt, one token at a time, with cached keys and values; the same for the same seed.

The model's mode and torch's random state are left as they were. The last new token is not fed to the model, so the
prompt may fill the context. Beyond it the window slides: the model sees the newest tokens alone, of a prompt its end.
When the context is full, the oldest quarter is dropped, and keys and values of the rest, whose positions have changed,
are computed again: a fraction of the work of dropping one token at a time, and each sees three quarters at least.

Shapes: N sequences, V real vocabulary, T new tokens, K likeliest ids.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from megatoken.config.model_config import ModelConfig
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import ConfigError, DataError, NumericsError
from megatoken.model.gpt import GPT, set_attention, set_block_kernels
from megatoken.model.kv_cache import KeyValueCache
from megatoken.native.library import find_library
from megatoken.system.device import Device

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
    """The text that follows `prompt`; a list of texts if num_samples is above 1. Stops at the end-of-text token.

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
        stop_id=tokenizer.eot,
        device=device,
    )
    texts = [tokenizer.decode_after(prompt_ids, ids) for ids in sequences]
    return texts[0] if num_samples == 1 else texts


def describe_window(config: ModelConfig, prompt_tokens: int, new_tokens: int) -> str:
    """What the user should know where prompt and new tokens do not fit the context; empty where they do."""
    if prompt_tokens > config.seq_len:
        return f"the prompt has {prompt_tokens:,} tokens, the model sees the last {config.seq_len:,}: its context"
    if prompt_tokens + new_tokens - 1 > config.seq_len:
        return f"beyond the context of {config.seq_len:,} tokens the model sees the newest ones only"
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
    stop_id: int | None = None,
    device: Device | None = None,
    on_tokens: Callable[[list[int | None]], None] | None = None,
) -> list[list[int]]:
    """New ids of `num_samples` continuations of one prompt; `stop_id` ends a sequence and is left out.

    temperature 0 takes the likeliest id; top_k and top_p draw from the k likeliest ids (0: all), or from the fewest
    whose probabilities sum to p (Holtzman et al. 2020). Sample i equals the only sample of seed + i. device: compute in
    its precision instead of the weights'. on_tokens is called with each step's ids, None for a sequence that has ended.
    An empty prompt must be given as the end-of-text id.
    Raises ConfigError for settings out of range or no prompt, DataError for ids outside the vocabulary, NumericsError
    when logits are not finite.
    """
    check_settings(max_new_tokens, temperature, top_k, top_p, num_samples)
    _check_prompt(model.config, prompt_ids)
    weight = model.lm_head_weight
    dtype = device.dtype if device is not None else weight.dtype
    # Uniform numbers from [0, 1), from the CPU's generator on every device.
    generators = [torch.Generator().manual_seed((seed + i) % 2**63) for i in range(num_samples)]
    draws_TN = torch.stack([torch.rand(max_new_tokens, generator=each) for each in generators], 1).to(weight.device)
    context = model.config.seq_len
    seen_1T = torch.tensor([list(prompt_ids)[-context:]], device=weight.device)
    drawn: list[Tensor] = []  # (N,) of each step
    capacity = min(seen_1T.shape[1] + max_new_tokens - 1, context)
    cache = KeyValueCache(model.config, rows=1, capacity=capacity, dtype=dtype, device=weight.device)
    sequences: list[list[int]] = [[] for _ in range(num_samples)]
    live = set(range(num_samples))
    was_training = model.training
    model.eval()
    try:
        with (
            torch.inference_mode(),
            device.autocast() if device is not None and dtype != weight.dtype else nullcontext(),
        ):
            hidden = model(seen_1T, cache)
            logits_NV = model.lm_head(hidden[:, -1]).expand(num_samples, -1)
            cache.fork(num_samples)
            for step in range(max_new_tokens):
                ids_N = choose_ids(logits_NV.float(), draws_TN[step], temperature, top_k, top_p)
                if not torch.isfinite(logits_NV.gather(1, ids_N[:, None])).all():
                    fix = "the weights are damaged or have diverged: use an earlier checkpoint"
                    position = f"position {len(prompt_ids) + step}"
                    raise NumericsError("the model's logits are not finite numbers", position, fix)
                new_ids: list[int] = ids_N.tolist()
                live -= {i for i in live if new_ids[i] == stop_id}
                for i in live:
                    sequences[i].append(new_ids[i])
                if on_tokens is not None:
                    on_tokens([id if i in live else None for i, id in enumerate(new_ids)])
                if not live or step + 1 == max_new_tokens:
                    break
                drawn.append(ids_N)
                ids_NT = ids_N[:, None]
                if cache.length == context:
                    all_NT = torch.cat([seen_1T.expand(num_samples, -1), torch.stack(drawn, 1)], 1)
                    ids_NT, cache.length = all_NT[:, -max(3 * context // 4, 1) :], 0
                logits_NV = model.lm_head(model(ids_NT, cache)[:, -1])
    finally:
        model.train(was_training)
    return sequences


def choose_ids(logits_NV: Tensor, draws_N: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """One id (N,) per row of logits: where its uniform draw from [0, 1) falls in the cumulative probability."""
    if temperature == 0:
        return logits_NV.argmax(-1)
    tiny = torch.finfo(logits_NV.dtype).tiny  # a smaller number would count as 0
    temperature, top_p = max(temperature, tiny), max(top_p, tiny)
    if top_p < 1 and not top_k:
        top_k = logits_NV.shape[-1]  # the cumulative probability starts at the likeliest, so all are sorted
    sorted_ids_NK = None
    if top_k:
        logits_NV, sorted_ids_NK = logits_NV.topk(min(top_k, logits_NV.shape[-1]))
    probs_NK = torch.softmax((logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature, dim=-1)
    if top_p < 1:
        probs_NK = probs_NK.masked_fill(cumulative_sum(probs_NK) - probs_NK >= top_p, 0.0)
    cumulative_NK = cumulative_sum(probs_NK)
    # An id without probability does not raise the sum, so the first index above the draw is never one.
    thresholds_N1 = draws_N[:, None] * cumulative_NK[:, -1:]
    indices_N1 = torch.searchsorted(cumulative_NK, thresholds_N1, right=True).clamp_(max=probs_NK.shape[-1] - 1)
    return (indices_N1 if sorted_ids_NK is None else sorted_ids_NK.gather(1, indices_N1))[:, 0]


def cumulative_sum(probs_NK: Tensor) -> Tensor:
    """Cumulative sums of rows; a deterministic run adds on the CPU, because torch refuses to on CUDA."""
    if torch.are_deterministic_algorithms_enabled():
        return probs_NK.cpu().cumsum(-1).to(probs_NK.device)
    return probs_NK.cumsum(-1)


def check_settings(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    num_samples: int,
    names: Sequence[str] = ("max_new_tokens", "temperature", "top_k", "top_p", "num_samples"),
) -> None:
    """Raise ConfigError for a setting out of range. names: what the caller calls each."""
    rules = (
        (max_new_tokens, max_new_tokens >= 1, "1 or more"),
        (temperature, 0 <= temperature < math.inf, "0 (greedy) or more"),
        (top_k, top_k >= 0, "0 (all) or more"),
        (top_p, 0 < top_p <= 1, "above 0, up to 1 (all)"),
        (num_samples, num_samples >= 1, "1 or more"),
    )
    for name, (value, valid, expected) in zip(names, rules, strict=True):
        if not valid:
            raise ConfigError(f"{name} is {value}", "sampling", f"give {expected}")


def _check_prompt(config: ModelConfig, prompt_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise ConfigError("prompt holds no tokens", "sampling", "begin with the end-of-text token")
    index = next((index for index, id in enumerate(prompt_ids) if not 0 <= id < config.vocab_size), None)
    if index is not None:
        what = f"token id {prompt_ids[index]} is outside the model's vocabulary of {config.vocab_size}"
        raise DataError(what, f"prompt position {index}", "encode it with the tokenizer the model was trained with")


def prepare_decoding(model: GPT, device: Device) -> None:
    """Lay out the weights, in place, for a model that will only generate, where a token reads each of them once.

    On a CPU in bf16 they are rounded to it, and the native kernels compute where there are any. In fp32 every weight
    with more outputs than inputs is stored column by column: one row is multiplied faster that way, because long sums
    of columns replace short dot products. Elsewhere nothing changes.
    """
    if device.type != "cpu":
        return
    if device.precision == "bf16":
        model.to(torch.bfloat16)
        if find_library():
            set_block_kernels(model, "native")
            set_attention(
                model, "native" if model.attention_name == "flash" and not model.config.window else model.attention_name
            )
        return
    for weight in [model.lm_head_weight, *(part.weight for part in model.modules() if isinstance(part, nn.Linear))]:
        if weight.shape[0] > weight.shape[1]:
            weight.data = weight.data.t().contiguous().t()


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
