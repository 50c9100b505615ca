"""Decoding of several sequences at once, of different prompts and settings, that join and leave while others go on.

What a sequence draws depends on its own seed and position alone. So does its text where a row of a matrix product has
the same bits however many rows there are; elsewhere rounding differs, which in fp32 rarely changes a token.

The last new token is not fed to the model, so the prompt may fill the context. Beyond it the window slides: the model
sees the newest tokens alone, of a prompt its end. When the context is full, the oldest quarter is dropped, and keys and
values of the rest, whose positions have changed, are computed again: a fraction of the work of dropping one token at a
time, and each sees three quarters at least.

Shapes: N sequences, V real vocabulary, T tokens.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from types import TracebackType
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig
from megatoken.errors import ConfigError, DataError, NumericsError
from megatoken.model.gpt import GPT
from megatoken.model.kv_cache import KeyValueCache
from megatoken.sampling.choose import check_settings, choose_ids
from megatoken.system.device import Device
from megatoken.system.torch_compat import uncompiled

FinishReason = Literal["stop", "length"]
BEGUN_TOKENS = 4096  # of prompts of one length that are computed at once


@dataclass(frozen=True, slots=True)
class Request:
    """A sequence to decode. prompt_ids: an empty prompt is given as the end-of-text id; stop_ids end the sequence.

    temperature 0 takes the likeliest id; top_k and top_p draw from the k likeliest ids (0: all), or from the fewest
    whose probabilities sum to p (Holtzman et al. 2020). logprobs: report log-probabilities; drawn_logprobs: those of
    the distribution at this temperature instead of 1, as reinforcement needs them.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: Sequence[int] = ()
    logprobs: bool = False
    drawn_logprobs: bool = False

    @property
    def capacity(self) -> int:
        """Tokens that it can bring before the model."""
        return len(self.prompt_ids) + self.max_new_tokens - 1

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError for settings out of range or no prompt, DataError for ids outside the vocabulary."""
        check_settings(self.max_new_tokens, self.temperature, self.top_k, self.top_p, 1)
        if not self.prompt_ids:
            raise ConfigError(
                "prompt holds no tokens", "sampling", "begin with the end-of-text token"
            )
        index = next(
            (i for i, id in enumerate(self.prompt_ids) if not 0 <= id < config.vocab_size), None
        )
        if index is not None:
            what = f"token id {self.prompt_ids[index]} is outside the model's vocabulary of {config.vocab_size}"
            fix = "encode it with the tokenizer the model was trained with"
            raise DataError(what, f"prompt position {index}", fix)


class Token(NamedTuple):
    """A new id of a row; finish_reason, of its last one: `stop` where the id is one of stop_ids, or `length`.

    logprob: natural logarithm of the model's probability of the id, before temperature (unless `drawn_logprobs`), top_k
    and top_p.
    """

    row: int
    id: int
    finish_reason: FinishReason | None
    logprob: float | None


@dataclass(slots=True)
class Completion:
    """The new ids of a request without the one that stopped it, which is stop_id; logprobs has one of that, too."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    stop_id: int | None = None


@dataclass(slots=True, eq=False)
class _Row:
    key: int
    request: Request
    draws: list[float]  # uniform numbers from [0, 1), one for each new token
    seen: list[
        int
    ]  # what the model is to see next: of a row that has not begun, or whose window has slid, all of it
    ids: list[int] = field(default_factory=list)


class BatchDecoder:
    """Decodes up to `rows` sequences, each of which the caller gives a number as key; a `with` statement.

    Inside it the model is in evaluation mode and computes in the device's precision (None: the weights'). capacity: the
    largest `capacity` of a request that comes (0: any).
    """

    def __init__(
        self, model: GPT, *, rows: int, capacity: int = 0, device: Device | None = None
    ) -> None:
        self._model, self._device, self._max_rows = model, device, rows
        self._torch_device = model.tokens.weight.device
        self._context = model.config.seq_len
        self._capacity = min(capacity or self._context, self._context)
        self._cache = self._build_cache(rows, self._capacity)
        self._cache.lengths = []
        self._rows: list[_Row] = []  # in the cache's order
        self._waiting: list[_Row] = []  # for the next step

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._contexts.close()

    @property
    def rows(self) -> list[int]:
        """Sequences that have not ended."""
        return [row.key for row in self._rows + self._waiting]

    @property
    def free_rows(self) -> int:
        """How many more can be added."""
        return self._max_rows - len(self._rows) - len(self._waiting)

    def add(self, key: int, request: Request) -> None:
        """Take a sequence up in the next step. Raises as `Request.check`."""
        request.check(self._model.config)
        assert self.free_rows > 0
        # From the CPU's generator on every device.
        generator = torch.Generator().manual_seed(request.seed % 2**63)
        draws = torch.rand(request.max_new_tokens, generator=generator).tolist()
        self._waiting.append(_Row(key, request, draws, list(request.prompt_ids)[-self._context :]))

    def remove(self, key: int) -> None:
        """Forget a sequence that has not ended."""
        self._waiting = [row for row in self._waiting if row.key != key]
        for row in [row for row in self._rows if row.key == key]:
            self._leave(row)

    def _leave(self, row: _Row) -> None:
        index = self._rows.index(row)
        self._cache.leave(index)
        self._rows[index] = self._rows[-1]
        self._rows.pop()

    def step(self) -> list[Token]:
        """A new id for each sequence; those that it ends leave. Raises NumericsError when logits are not finite."""
        for row in [
            row
            for row, length in zip(self._rows, self._cache.lengths, strict=True)
            if length == self._context
        ]:
            self._leave(row)
            all_ids = [*row.request.prompt_ids, *row.ids]
            row.seen = all_ids[-max(3 * self._context // 4, 1) :]
            self._waiting.append(row)
        logits = []
        if self._rows:
            ids_N1 = torch.tensor([[row.ids[-1]] for row in self._rows], device=self._torch_device)
            logits.append(self._model.lm_head(self._model(ids_N1, self._cache)[:, -1]))
        self._waiting.sort(key=lambda row: (len(row.seen), row.seen))
        for length, rows in groupby(self._waiting, key=lambda row: len(row.seen)):
            prompts = [list(equal) for _, equal in groupby(rows, key=lambda row: row.seen)]
            at_once = max(1, BEGUN_TOKENS // length)
            logits += [
                self._begin(prompts[first : first + at_once])
                for first in range(0, len(prompts), at_once)
            ]
        self._waiting = []
        if not logits:
            return []
        tokens = self._draw(logits[0] if len(logits) == 1 else torch.cat(logits))
        for row, token in zip(list(self._rows), tokens, strict=True):
            row.ids.append(token.id)
            if token.finish_reason:
                self._leave(row)
        return tokens

    def _begin(self, prompts: list[list[_Row]]) -> Tensor:
        """Compute what each list of rows sees, all of one length, once, and take them up; the rows' logits (N, V)."""
        ids = torch.tensor([rows[0].seen for rows in prompts], device=self._torch_device)
        cache, copies = self._build_cache(*ids.shape), [len(rows) for rows in prompts]
        logits = self._model.lm_head(self._model(ids, cache)[:, -1])
        self._cache.join(cache, copies)
        self._rows += [row for rows in prompts for row in rows]
        return logits.repeat_interleave(torch.tensor(copies, device=self._torch_device), 0)

    def _draw(self, logits_NV: Tensor) -> list[Token]:
        """An id for each row, in the order of the cache."""
        logits_NV = logits_NV.float()
        draws_N = torch.tensor(
            [row.draws[len(row.ids)] for row in self._rows], device=logits_NV.device
        )
        ids_N = self._choose(logits_NV, draws_N)
        for row, logit in zip(
            self._rows, logits_NV.gather(1, ids_N[:, None])[:, 0].tolist(), strict=True
        ):
            if not math.isfinite(logit):
                fix = "the weights are damaged or have diverged: use an earlier checkpoint"
                position = f"position {len(row.request.prompt_ids) + len(row.ids)}"
                raise NumericsError("the model's logits are not finite numbers", position, fix)
        logprobs: list[float | None] = [None] * len(self._rows)
        if any(row.request.logprobs for row in self._rows):
            scales = [
                row.request.temperature if row.request.drawn_logprobs else 1.0 for row in self._rows
            ]
            if any(scale != 1 for scale in scales):
                logits_NV = logits_NV / torch.tensor(scales, device=logits_NV.device)[:, None]
            logprobs = logits_NV.log_softmax(-1).gather(1, ids_N[:, None])[:, 0].tolist()
        tokens = []
        for row, id, logprob in zip(self._rows, ids_N.tolist(), logprobs, strict=True):
            is_last = len(row.ids) + 1 == row.request.max_new_tokens
            reason: FinishReason | None = (
                "stop" if id in row.request.stop_ids else "length" if is_last else None
            )
            tokens.append(Token(row.key, id, reason, logprob if row.request.logprobs else None))
        return tokens

    def _choose(self, logits_NV: Tensor, draws_N: Tensor) -> Tensor:
        settings = [
            (row.request.temperature, row.request.top_k, row.request.top_p) for row in self._rows
        ]
        if len(set(settings)) == 1:
            return choose_ids(logits_NV, draws_N, *settings[0])
        ids_N = torch.empty(len(settings), dtype=torch.int64, device=logits_NV.device)
        for each in set(settings):
            index = torch.tensor(
                [i for i, own in enumerate(settings) if own == each], device=logits_NV.device
            )
            ids_N[index] = choose_ids(logits_NV[index], draws_N[index], *each)
        return ids_N


def generate_batch(
    model: GPT,
    requests: Iterable[Request],
    *,
    rows: int = 64,
    device: Device | None = None,
    on_completion: Callable[[int, Completion], None] | None = None,
) -> list[Completion]:
    """Decode all requests, at most `rows` at a time, and return what each gave, in their order.

    Neighbours with the same prompt share its computation. on_completion is called with a request's number as soon as it
    has ended. Raises as `BatchDecoder.add` and `step`.
    """
    queue = list(requests)
    completions = [Completion() for _ in queue]
    if not queue:
        return []
    capacity, added = max(request.capacity for request in queue), 0
    with BatchDecoder(
        model, rows=min(rows, len(queue)), capacity=capacity, device=device
    ) as decoder:
        while added < len(queue) or decoder.rows:
            for number in range(added, min(added + decoder.free_rows, len(queue))):
                decoder.add(number, queue[number])
                added += 1
            for number, id, reason, logprob in decoder.step():
                completion = completions[number]
                completion.logprobs += [] if logprob is None else [logprob]
                if reason == "stop":
                    completion.stop_id = id
                else:
                    completion.ids.append(id)
                if reason:
                    completion.finish_reason = reason
                    if on_completion is not None:
                        on_completion(number, completion)
    return completions
