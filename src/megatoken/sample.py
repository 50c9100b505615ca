"""A model's continuation of a prompt, one token at a time.

In: a live model and token ids. Out: new ids, the same for the same seed. Keys and values of earlier tokens are kept,
so each new token costs one row through the model. The model's mode and torch's random state are left as they were.
Deliberately absent: beams, penalties, several different prompts at once, sliding past the model's context (learned
positions end there, and so does what rotary ones were trained for).

Shapes: N sequences, V real vocabulary, K heads of keys and values, T new positions, S positions held, D head width.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from megatoken.data.tokenizer import Tokenizer
from megatoken.device import Device
from megatoken.errors import Exit, Fault
from megatoken.model.decode import Decoder
from megatoken.model.gpt import GPT
from megatoken.presets import Shape

HALF_CHARACTER = "\ufffd"


class KeyValueCache:
    """Keys and values of every layer, in memory taken once: (layers, N, K, capacity, D) each.

    The model appends layer by layer and then moves `length` itself.
    """

    def __init__(self, shape: Shape, *, rows: int, capacity: int, dtype: torch.dtype, place: torch.device) -> None:
        sizes = (shape.n_layer, rows, shape.kv_heads, capacity, shape.d_head)
        self._keys = torch.empty(sizes, dtype=dtype, device=place)
        self._values = torch.empty(sizes, dtype=dtype, device=place)
        self.length = 0

    def append(self, layer: int, k_NKTD: Tensor, v_NKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; return all it holds so far, (N, K, S, D) each."""
        keys, values, new = self._keys[layer], self._values[layer], k_NKTD.shape[2]
        keys.narrow(2, self.length, new).copy_(k_NKTD)
        values.narrow(2, self.length, new).copy_(v_NKTD)
        end = self.length + new
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def fork(self, n: int) -> None:
        """Make `n` sequences of a single one, each with its own copy of the past."""
        if n == 1:
            return
        self._keys = self._keys.repeat(1, n, 1, 1, 1)
        self._values = self._values.repeat(1, n, 1, 1, 1)


def generate(
    model: GPT,
    prompt_ids: Sequence[int],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    n: int = 1,
    stop_id: int | None = None,
    device: Device | None = None,
    on_tokens: Callable[[list[int | None]], None] | None = None,
) -> list[list[int]]:
    """New ids of `n` continuations of one prompt: at most `tokens` each, `stop_id` ends a sequence and is left out.

    temperature 0 takes the likeliest id; top_k and top_p draw from the k likeliest ids, or from the fewest that hold
    the share p of the probability (Holtzman et al. 2020). Sequence i is what seed + i gives alone. device: its
    precision is used; without it products run in the weights' own. on_tokens hears of each step's ids as they come,
    None for a sequence that has ended. An empty prompt has to be given as the end-of-text id.
    Raises Fault(CONFIG) for settings out of range or a prompt that does not fit the context with its continuation,
    Fault(DATA) for ids outside the vocabulary, Fault(NUMERICS) when the model's scores are not numbers.
    """
    _check_settings(tokens, temperature, top_k, top_p, n)
    _check_prompt(model.shape, prompt_ids, tokens)
    place = model.unembedding.device
    dtype = device.dtype if device is not None else model.unembedding.dtype
    draws_TN = torch.stack([_draw(seed + i, tokens) for i in range(n)], dim=1).to(place)
    cache = KeyValueCache(model.shape, rows=1, capacity=len(prompt_ids) + tokens, dtype=dtype, place=place)
    sequences: list[list[int]] = [[] for _ in range(n)]
    live = set(range(n))
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), device.autocast() if device is not None else nullcontext():
            hidden = model(torch.tensor([list(prompt_ids)], device=place), cache)
            logits_NV = model.logits(hidden[:, -1]).expand(n, -1)
            cache.fork(n)
            decoder = Decoder(model, rows=n)
            for step in range(tokens):
                ids_N = choose_ids(logits_NV.float(), draws_TN[step], temperature, top_k, top_p)
                new = _read_step(ids_N, logits_NV, live, stop_id, len(prompt_ids) + step)
                for i in live:
                    sequences[i].append(new[i])
                if on_tokens is not None:
                    on_tokens([id if i in live else None for i, id in enumerate(new)])
                if not live or step + 1 == tokens:
                    break
                logits_NV = decoder.step(ids_N, cache)
    finally:
        model.train(was_training)
    return sequences


def choose_ids(logits_NV: Tensor, draws_N: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """One id (N,) for each row of scores, by where its uniform draw from [0, 1) falls in the cumulated probability."""
    if temperature == 0:
        return logits_NV.argmax(-1)
    if top_p < 1 and not top_k:
        top_k = logits_NV.shape[-1]  # the share is counted from the likeliest downwards, so all have to be sorted
    order_NK = None
    if top_k:
        logits_NV, order_NK = logits_NV.topk(min(top_k, logits_NV.shape[-1]))
    shares_NK = torch.softmax((logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature, dim=-1)
    if top_p < 1:
        before_NK = shares_NK.cumsum(-1) - shares_NK
        shares_NK = shares_NK.masked_fill(before_NK >= top_p, 0.0)
    cumulated_NK = shares_NK.cumsum(-1)
    # An id without probability does not raise the sum, so the first place above the draw is never one.
    aim_N1 = draws_N[:, None] * cumulated_NK[:, -1:]
    places_N1 = torch.searchsorted(cumulated_NK, aim_N1, right=True).clamp_(max=shares_NK.shape[-1] - 1)
    return (places_N1 if order_NK is None else order_NK.gather(1, places_N1))[:, 0]


def _draw(seed: int, tokens: int) -> Tensor:
    """A uniform number from [0, 1) for each step, from the CPU's generator on every device."""
    return torch.rand(tokens, generator=torch.Generator().manual_seed(seed % 2**63))


def _read_step(ids_N: Tensor, logits_NV: Tensor, live: set[int], stop_id: int | None, position: int) -> list[int]:
    """The step's ids as plain numbers; sequences that end with it leave `live`."""
    scores_N = logits_NV.gather(1, ids_N[:, None])[:, 0].tolist()
    if not all(map(math.isfinite, scores_N)):
        fix = "the weights are damaged or have diverged: use an earlier checkpoint"
        raise Fault(Exit.NUMERICS, "the model's scores are not finite numbers", f"position {position}", fix)
    new: list[int] = ids_N.tolist()
    live -= {i for i in live if new[i] == stop_id}
    return new


def _check_settings(tokens: int, temperature: float, top_k: int, top_p: float, n: int) -> None:
    rules = (
        ("tokens", tokens, tokens >= 1, "1 or more"),
        ("temperature", temperature, 0 <= temperature < math.inf, "0 (greedy) or more"),
        ("top_k", top_k, top_k >= 0, "0 (all) or more"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0, up to 1 (all)"),
        ("n", n, n >= 1, "1 or more"),
    )
    for name, value, holds, wanted in rules:
        if not holds:
            raise Fault(Exit.CONFIG, f"{name} is {value}", "sampling", f"give {wanted}")


def _check_prompt(shape: Shape, prompt_ids: Sequence[int], tokens: int) -> None:
    if not prompt_ids:
        raise Fault(Exit.CONFIG, "prompt holds no tokens", "sampling", "begin with the end-of-text token")
    total, context = len(prompt_ids) + tokens, shape.seq_len
    if total > context:
        what = f"prompt of {len(prompt_ids)} and {tokens} new tokens need {total}, the model's context is {context}"
        room = context - len(prompt_ids)
        fix = (
            f"ask for at most {room} new tokens" if room > 0 else f"shorten the prompt to {context - 1} tokens or less"
        )
        raise Fault(Exit.CONFIG, what, "sampling", fix)
    bad = next((place for place, id in enumerate(prompt_ids) if not 0 <= id < shape.vocab_size), None)
    if bad is not None:
        what = f"token id {prompt_ids[bad]} is outside the model's vocabulary of {shape.vocab_size}"
        raise Fault(
            Exit.DATA, what, f"prompt position {bad}", "encode it with the tokenizer the model was trained with"
        )


class TextStream:
    """Ids into text as they come, never cutting a character that several tokens share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # ids already told: some decoders treat the first word of a text differently
        self._held: list[int] = []

    def push(self, id: int) -> str:
        """The text that `id` completes; empty while a character is unfinished."""
        self._held.append(id)
        return self._release(final=False)

    def finish(self) -> str:
        """What is still held back at the end."""
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._shown)
        text = self._tokenizer.decode(self._shown + self._held)
        if text.endswith(HALF_CHARACTER) and not final:
            return ""
        self._shown, self._held = self._held or self._shown, []
        return text[len(before) :]
