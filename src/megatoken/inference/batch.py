"""Decode several sequences in one batch; a sequence may join or leave at any step.

A sequence's random numbers depend only on its seed and position. Its ids do not depend on the other
sequences if matmuls round each row in the same way for any number of rows. With other matmuls,
rounding errors differ, which in fp32 rarely changes a token.

The last new token is not fed to the model, so the prompt and the new tokens may exceed the context
by one. In a longer sequence, the window slides: when the context is full, its oldest quarter is
dropped, and the keys and values of the rest are recomputed, because their positions have changed.

Shapes: N sequences, V vocabulary without padding, T tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.errors import ConfigError, DataError, NumericsError
from megatoken.base.system.device import Device
from megatoken.base.system.torch_compat import uncompiled
from megatoken.inference.fixed_steps import FixedSteps, supports_graphs
from megatoken.inference.kv_cache import NO_PREFIX, KeyValueCache, Prefix, PrefixStore
from megatoken.inference.sampling import Sampling, choose_ids, rank_ids
from megatoken.model.gpt import GPT

FinishReason = Literal["stop", "length"]
PREFILL_TOKENS = 4096  # most prompt tokens to compute at once
SPARE_TOKENS = 256  # most tokens by which a row of the cache grows at once


@dataclass(frozen=True)
class Request:
    """A prompt to continue. It must not be empty: to start a document, pass the end-of-text id.

    logprobs: whether to report log-probabilities at the sampling temperature, for policy gradients.
    This requires a temperature above 0. top_logprobs: how many of the most likely ids to report for
    each new id; None for no report.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def capacity(self) -> int:
        """Number of tokens fed to the model: the prompt, and all new tokens but the last."""
        return len(self.prompt_ids) + self.sampling.max_new_tokens - 1

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError if the prompt is empty, DataError for ids outside the vocabulary."""
        if not self.prompt_ids:
            raise ConfigError("the prompt is empty", fix="start with the end-of-text token")
        for id in self.prompt_ids:
            if not 0 <= id < config.vocab_size:
                what = f"token id {id} is outside the model's vocabulary of {config.vocab_size}"
                raise DataError(what, "prompt", "use the tokenizer the model was trained with")


class Token(NamedTuple):
    """A new id of one sequence.

    key: the sequence's key. finish_reason: for the sequence's last id, "stop" if it is in stop_ids,
    else "length"; None for the other ids. logprob: natural log of the id's probability, before
    top_k and top_p apply. top: (id, logprob) of the new id, then of the `top_logprobs` most likely
    ids, at temperature 1. cached: for the first id, number of prompt tokens found in the cache.
    """

    key: int
    id: int
    finish_reason: FinishReason | None
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()
    cached: int = 0


@dataclass
class Completion:
    """The result of a request. `ids` excludes the stop id; `logprobs` has an entry for it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    stop_id: int | None = None


@dataclass(eq=False)
class _Sequence:
    key: int
    request: Request
    draws: list[float]  # uniform numbers from [0, 1), one per new token
    input_ids: list[int]  # the prompt or window to compute when the sequence joins the batch
    prefix: Prefix = NO_PREFIX  # cached start of input_ids, until the sequence joins
    ids: list[int] = field(default_factory=list)

    @property
    def all_ids(self) -> list[int]:
        return [*self.request.prompt_ids, *self.ids]


class BatchDecoder:
    """Decodes up to `rows` sequences in one batch; the caller chooses a key for each of them.

    Use it in a `with` block, in which the model is in evaluation mode and computes in the device's
    precision or, if the device is None, in that of the weights.

    The cache grows with the sequences. cache_tokens: its largest size. Finished sequences then stay
    in the cache, for prompts that begin with them, until running ones need the space. If None, the
    size has no bound, and finished sequences are dropped.
    """

    def __init__(
        self,
        model: GPT,
        *,
        rows: int,
        cache_tokens: int | None = None,
        device: Device | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._max_rows = rows
        self._torch_device = model.tokens.weight.device
        self._context = model.config.seq_len
        self._bound = cache_tokens or math.inf
        self._cache = self._build_cache(0, 0)
        self._prefixes = PrefixStore() if cache_tokens else None
        self._is_fixed = supports_graphs(model)
        self._steps: FixedSteps | None = None  # unless the model must run in eager mode
        self._rows: list[_Sequence] = []  # in the cache's order
        self._waiting: list[_Sequence] = []  # rows that join in the next step

    def _build_cache(self, rows: int, capacity: int) -> KeyValueCache:
        dtype = self._model.tokens.weight.dtype if self._device is None else self._device.dtype
        return KeyValueCache(
            self._model.config, rows=rows, capacity=capacity, dtype=dtype, device=self._torch_device
        )

    def __enter__(self) -> Self:
        self._contexts = ExitStack()
        self._contexts.callback(self._model.train, self._model.training)
        self._model.eval()
        self._contexts.enter_context(torch.inference_mode())
        self._contexts.enter_context(uncompiled(self._model))
        if self._device is not None and self._device.dtype != self._model.tokens.weight.dtype:
            self._contexts.enter_context(self._device.autocast())
        return self

    def __exit__(self, *_: object) -> None:
        self._contexts.close()

    @property
    def keys(self) -> list[int]:
        """Keys of unfinished sequences."""
        return [row.key for row in self._rows + self._waiting]

    @property
    def cached_tokens(self) -> int:
        """Number of tokens that the cache has memory for."""
        stored = self._prefixes.tokens if self._prefixes else 0
        return math.prod(self._cache.sizes) + stored

    def fits(self, request: Request) -> bool:
        """Return whether there is a row for a request, and space until all sequences end."""
        rows = self._rows + self._waiting
        if len(rows) >= self._max_rows or self._bound == math.inf:
            return len(rows) < self._max_rows
        longest = max(each.capacity for each in (request, *(row.request for row in rows)))
        return (len(rows) + 1) * min(longest, self._context) <= self._bound

    def add(self, key: int, request: Request) -> None:
        """Add a sequence that fits, to be started in the next step.

        Raises as `Request.check` does.
        """
        request.check(self._model.config)
        assert self.fits(request)
        # Every device uses the CPU's generator, so that the ids are the same everywhere.
        generator = torch.Generator().manual_seed(request.sampling.seed % 2**63)
        draws = torch.rand(request.sampling.max_new_tokens, generator=generator).tolist()
        input_ids = list(request.prompt_ids)[-self._context :]
        prefix = self._prefixes.find(input_ids) if self._prefixes else NO_PREFIX
        self._waiting.append(_Sequence(key, request, draws, input_ids, prefix))

    def remove(self, key: int) -> None:
        """Remove an unfinished sequence."""
        self._waiting = [row for row in self._waiting if row.key != key]
        for row in list(self._rows):
            if row.key == key:
                self._remove(row)

    def _remove(self, row: _Sequence) -> None:
        """Remove a row from the batch; store its keys and values."""
        index = self._rows.index(row)
        ids = row.all_ids[:-1]
        if self._prefixes and len(ids) == self._cache.lengths[index]:  # the window has not moved
            self._prefixes.add(ids, self._cache.copy_row(index))
        self._cache.remove_row(index)
        self._rows[index] = self._rows[-1]
        self._rows.pop()
        self._reserve(len(self._rows), self._cache.length)

    def step(self) -> list[Token]:
        """Decode one token of each sequence; return the tokens and remove finished sequences.

        Raises NumericsError for logits that are not finite.
        """
        self._slide_windows()
        longest = max((len(row.input_ids) for row in self._waiting), default=0)
        self._reserve(len(self._rows) + len(self._waiting), max(self._cache.length + 1, longest))
        logits = []
        if self._rows:
            logits.append(self._advance())
        self._waiting.sort(key=lambda row: (len(row.input_ids), row.prefix[0], row.input_ids))
        sizes = groupby(self._waiting, key=lambda row: (len(row.input_ids), row.prefix[0]))
        for (length, _), rows in sizes:
            prompts = [list(equal) for _, equal in groupby(rows, key=lambda row: row.input_ids)]
            n_at_once = max(1, PREFILL_TOKENS // length)
            for first in range(0, len(prompts), n_at_once):
                logits.append(self._prefill(prompts[first : first + n_at_once]))
        self._waiting = []
        if not logits:
            return []
        tokens = self._draw(logits[0] if len(logits) == 1 else torch.cat(logits))
        for row, token in zip(list(self._rows), tokens, strict=True):
            row.ids.append(token.id)
            row.prefix = NO_PREFIX
            if token.finish_reason:
                self._remove(row)
        return tokens

    def _slide_windows(self) -> None:
        """Remove the rows whose context is full; queue them again without the oldest quarter."""
        for row, length in list(zip(self._rows, self._cache.lengths, strict=True)):
            if length == self._context:
                row.input_ids = row.all_ids[-max(3 * self._context // 4, 1) :]
                self._remove(row)
                self._waiting.append(row)

    def _reserve(self, count: int, length: int) -> None:
        """Fit the cache to `count` rows of `length` tokens, with space to grow within the bound."""
        rows, capacity = self._cache.sizes
        if count > rows or length > capacity or rows * capacity > 4 * count * length:
            rows = min(count + count // 2, self._max_rows)
            capacity = min(length + min(length, SPARE_TOKENS), self._context)
            if rows * capacity > self._bound:
                rows, capacity = count, min(capacity, int(self._bound // count))
            self._cache.resize(rows, capacity)
            self._steps = FixedSteps(self._model, self._cache) if self._is_fixed else None
        if self._prefixes:
            self._prefixes.shrink(self._bound - rows * capacity)

    def _put(self, values: Sequence[object]) -> Tensor:
        """Copy numbers to the device; on CUDA the host does not wait for it."""
        is_cuda = self._torch_device.type == "cuda"
        tensor = torch.tensor(values, pin_memory=is_cuda)
        return tensor.to(self._torch_device, non_blocking=is_cuda)

    def _advance(self) -> Tensor:
        """Feed the last id of each row; return the logits (N, V)."""
        ids = [row.ids[-1] for row in self._rows]
        if self._steps is None:
            hidden_N1C = self._model(self._put(ids)[:, None], self._cache)
            return self._model.lm_head(hidden_N1C[:, -1])
        logits_NV = self._steps.run(self._put([ids, self._cache.lengths]))
        self._cache.advance(1)
        return logits_NV

    def _prefill(self, prompts: list[list[_Sequence]]) -> Tensor:
        """Add rows to the batch and return their logits (N, V).

        prompts: groups of rows with equal `input_ids`, which are computed only once. All groups must
        have equally many `input_ids`, and cached prefixes of the same length.
        """
        firsts = [rows[0] for rows in prompts]
        n_cached = firsts[0].prefix[0]
        ids = self._put([row.input_ids[n_cached:] for row in firsts])
        cache = self._build_cache(len(firsts), len(firsts[0].input_ids))
        if n_cached:
            cache.load_rows([row.prefix[1] for row in firsts], n_cached)
        copied = self._put([index for index, rows in enumerate(prompts) for _ in rows])
        logits = self._model.lm_head(self._model(ids, cache)[:, -1])
        self._cache.add_rows(cache, copied)
        self._rows += [row for rows in prompts for row in rows]
        return logits[copied]

    def _draw(self, logits_NV: Tensor) -> list[Token]:
        """Choose a token for each row, in the cache's order."""
        logits_NV = logits_NV.float()
        draws_N = self._put([row.draws[len(row.ids)] for row in self._rows])
        ids_N1 = self._choose(logits_NV, draws_N)[:, None]
        drawn = [ids_N1.float(), logits_NV.gather(1, ids_N1)]  # fp32 holds every id exactly
        if any(row.request.logprobs for row in self._rows):
            drawn.append(self._measure_logprobs(logits_NV, ids_N1))
        tokens: list[Token] = []
        # The host waits for the device only here.
        for row, (value, logit, *logprobs) in zip(
            self._rows, torch.cat(drawn, 1).tolist(), strict=True
        ):
            id = int(value)
            if not math.isfinite(logit):
                fix = "use an earlier checkpoint"
                raise NumericsError("the model's logits are not finite", "sampling", fix)
            reason: FinishReason | None = None
            if id in row.request.sampling.stop_ids:
                reason = "stop"
            elif len(row.ids) + 1 == row.request.sampling.max_new_tokens:
                reason = "length"
            logprob = logprobs[0] if row.request.logprobs else None
            top: list[tuple[int, float]] = []
            if row.request.top_logprobs is not None:
                top = rank_ids(logits_NV[len(tokens)], id, row.request.top_logprobs)
            tokens.append(Token(row.key, id, reason, logprob, top, row.prefix[0]))
        return tokens

    def _measure_logprobs(self, logits_NV: Tensor, ids_N1: Tensor) -> Tensor:
        requests = [row.request for row in self._rows]
        scales = [request.sampling.temperature if request.logprobs else 1.0 for request in requests]
        return (logits_NV / self._put(scales)[:, None]).log_softmax(-1).gather(1, ids_N1)

    def _choose(self, logits_NV: Tensor, draws_N: Tensor) -> Tensor:
        groups: dict[tuple[float, int, float], list[int]] = {}
        for index, row in enumerate(self._rows):
            sampling = row.request.sampling
            group = (sampling.temperature, sampling.top_k, sampling.top_p)
            groups.setdefault(group, []).append(index)
        if len(groups) == 1:
            return choose_ids(logits_NV, draws_N, *group)
        ids_N = torch.empty(len(self._rows), dtype=torch.int64, device=logits_NV.device)
        for group, indices in groups.items():
            rows = self._put(indices)
            ids_N[rows] = choose_ids(logits_NV[rows], draws_N[rows], *group)
        return ids_N


def decode(model: GPT, request: Request, device: Device | None = None) -> Iterator[Token]:
    """Yield the tokens of one request as they are decoded.

    Raises as `Request.check` and `BatchDecoder.step` do.
    """
    with BatchDecoder(model, rows=1, device=device) as decoder:
        decoder.add(0, request)
        while decoder.keys:
            yield from decoder.step()


def generate_batch(
    model: GPT,
    requests: Sequence[Request],
    *,
    rows: int = 64,
    device: Device | None = None,
    on_token: Callable[[Token], object] | None = None,
) -> list[Completion]:
    """Decode all requests, at most `rows` at a time; return their completions in order.

    Adjacent requests with the same prompt share its computation. on_token: called with each token
    except stop tokens. Raises as `Request.check` and `BatchDecoder.step` do.
    """
    completions = [Completion() for _ in requests]
    waiting = list(enumerate(requests))
    with BatchDecoder(model, rows=rows, device=device) as decoder:
        while waiting or decoder.keys:
            while waiting and decoder.fits(waiting[0][1]):
                decoder.add(*waiting.pop(0))
            for token in decoder.step():
                completion = completions[token.key]
                if token.logprob is not None:
                    completion.logprobs.append(token.logprob)
                if token.finish_reason == "stop":
                    completion.stop_id = token.id
                else:
                    completion.ids.append(token.id)
                    if on_token is not None:
                        on_token(token)
                completion.finish_reason = token.finish_reason or "length"
    return completions
