"""Make the batches of a split as a pure function of (dataset, seed, step).

To resume, a run needs only its step number and the list of batches it has skipped. Sequence i of
step s is entry s * batch_size + i of an endless list of windows (window_order.py). Each rank takes
a consecutive slice of the batch, and each micro-batch a consecutive slice of the rank's rows, so
the order of the data does not depend on the number of ranks or micro-batches.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatoken.base.config.batch_ramp import BatchRamp
from megatoken.base.config.schema import DataOrder
from megatoken.base.errors import ConfigError, DataError
from megatoken.data.dataset import Tokens
from megatoken.data.vocabulary import Ids, Ints
from megatoken.data.window_order import (
    SPAN_TOKENS,
    CachedOrder,
    MixedOrder,
    SequentialOrder,
    WindowOrder,
    make_shuffled,
)

_STEPS_AHEAD = 8  # their spans are fetched in advance


@dataclass(frozen=True)
class Batch:
    """A rank's share of a global batch, with one sequence per row.

    targets_BT: the loss ignores negative ones. starts_BT: for each token, the position in its row
    at which its conversation or document begins, always on the CPU; None if no row holds more than
    one. Subclasses add tensors (B, ...) for an objective.
    """

    inputs_BT: Tensor
    targets_BT: Tensor
    starts_BT: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs_BT)

    def split(self, size: int) -> list[Self]:
        """Split into micro-batches of `size` rows; the last can have fewer."""
        return [self.take(slice(first, first + size)) for first in range(0, len(self), size)]

    def take(self, rows: slice | Tensor) -> Self:
        """Return a batch of the selected rows.

        `starts_BT` becomes None if each selected row is a single sequence.
        """
        batch = self._map(lambda tensor: tensor[rows])
        starts = batch.starts_BT
        return batch if starts is None or starts.any() else replace(batch, starts_BT=None)

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device, except `starts_BT`."""
        if self.inputs_BT.device == device:
            return self
        rest = replace(self, starts_BT=None)
        is_cuda = device.type == "cuda"
        rest = rest.pin() if is_cuda else rest
        rest = rest._map(lambda tensor: tensor.to(device, non_blocking=is_cuda))
        return replace(rest, starts_BT=self.starts_BT)

    def pin(self) -> Self:
        """Return a copy in pinned memory, from which `to` copies without waiting for the GPU."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: function(v) for k, v in tensors.items() if v is not None})


@dataclass(eq=False)
class DataLoader:
    """Makes the batches of one split for one data-parallel rank.

    `tokens` is cut into windows of seq_len + 1 tokens with stride seq_len. batch_size: windows per
    step over all ranks. ramp: schedule of smaller batches at the start of a run. order: "shuffled";
    "spans", a shuffle that reads from few places at a time; "sequential", which
    cuts each shard into batches and drops the rest, as build-nanogpt and llm.c do; or "one-batch",
    which always repeats the first batch. sources: (number of tokens, weight) of
    each source in `tokens`; each source is shuffled separately. document_start: the id that begins
    a document, if documents must not attend to each other. A subclass may cut rows that share no
    token, or add tensors to a batch.

    Raises ConfigError if a batch does not divide evenly among the ranks, and DataError if the split
    has fewer windows than a batch or a source has no window.
    """

    tokens: Tokens
    seq_len: int
    batch_size: int
    seed: int
    dp_rank: int = 0
    dp_size: int = 1
    ramp: BatchRamp | None = None
    order: DataOrder = "shuffled"
    sources: Sequence[tuple[int, float]] = ()
    document_start: int | None = None
    shared_tokens: ClassVar[int] = 1  # by consecutive windows

    def __post_init__(self) -> None:
        lengths = [length for length, _ in self.sources] or [len(self.tokens)]
        unit = 1  # the number of windows must be a multiple of it
        if self.order == "sequential":
            lengths = self.tokens.shard_tokens
            unit = self.batch_size
        shared = self.shared_tokens
        self._stride = self.seq_len + 1 - shared
        self._check_ranks("budget.batch_tokens", self.batch_size)
        counts = [max(0, length - shared) // (unit * self._stride) * unit for length in lengths]
        self.n_windows = sum(counts)
        has_empty = self.order != "sequential" and not all(counts)  # a shard may be short
        if self.n_windows < self.batch_size or has_empty:
            what = f"{self.n_windows:,} training sequences of {self.seq_len:,} tokens"
            fix = "use a smaller budget.batch_tokens or model.seq_len, or prepare more text"
            raise DataError(f"{what}, a batch has {self.batch_size:,}", "data.path", fix)
        if self.ramp:
            self._check_ranks("budget.batch_start", self.ramp.start // self.seq_len)
        # Windows are numbered consecutively across all sources or shards.
        self._first_windows = np.cumsum([0, *counts[:-1]])
        self._first_tokens = np.cumsum([0, *lengths[:-1]])
        longest = max(1, SPAN_TOKENS // self.seq_len)
        span = (self.batch_size, longest) if self.order == "spans" else None
        window_order: WindowOrder
        if self.order == "sequential":
            window_order = SequentialOrder(self.n_windows)
        elif len(self.sources) > 1:
            weights = [weight for _, weight in self.sources]
            window_order = MixedOrder(counts, weights, self.seed, span)
        else:
            window_order = make_shuffled(self.n_windows, self.seed, span)
        self._order = CachedOrder(window_order, self.batch_size)
        self._span_tokens = self._stride * np.array(
            [longest] if self.order == "sequential" else window_order.span_windows
        )

    def _check_ranks(self, key: str, size: int) -> None:
        if size < 1 or size % self.dp_size:
            what = f"a batch of {size:,} sequences does not divide among {self.dp_size} processes"
            fix = f"use a multiple of {self.dp_size * self.seq_len:,} tokens"
            raise ConfigError(what, key, fix)

    def rows(self, step: int) -> Ids:
        """Return this rank's windows of a step, (windows, seq_len + 1), in the shards' dtype.

        Steps may be requested in any order, repeatedly and from any thread. Raises DataError as
        `Tokens.gather` does.
        """
        if self.tokens.loads:
            later = (self._find_spans(step + number) for number in range(1, _STEPS_AHEAD))
            self.tokens.load(self._find_spans(step), chain.from_iterable(later))
        return self.tokens.gather(self.find_tokens(step), self.seq_len + 1)

    def batch(self, step: int) -> Batch:
        """Return this rank's batch of a step, on the CPU.

        It has `starts_BT` if documents must not attend to each other. Raises DataError as
        `rows` does.
        """
        return separate_documents(to_batch(self.rows(step)), self.document_start)

    def find_tokens(self, step: int) -> Ints:
        """Return the token index at which each of this rank's windows of a step starts."""
        source, in_source = self._find_windows(step)
        starts: Ints = self._first_tokens[source] + in_source * self._stride
        return starts

    def _find_spans(self, step: int) -> list[tuple[int, int]]:
        """Return the range of tokens of each span that a step uses."""
        source, in_source = self._find_windows(step)
        size = self._span_tokens[source % len(self._span_tokens)]  # all shards share one size
        starts = self._first_tokens[source] + in_source * self._stride // size * size
        ends = np.minimum(starts + size + self.shared_tokens, len(self.tokens))
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def _find_windows(self, step: int) -> tuple[Ints, Ints]:
        """Return the source of each of this rank's windows of a step, and its number in it."""
        first, size = self._entries(step)
        size //= self.dp_size
        windows = self._order.windows(first + self.dp_rank * size, size)
        source = np.searchsorted(self._first_windows, windows, side="right") - 1
        return source, windows - self._first_windows[source]

    def _entries(self, step: int) -> tuple[int, int]:
        """Return (first, count): the entries of the endless window list that a step uses."""
        assert step >= 0
        if self.order == "one-batch":
            step = 0
        if self.ramp is None:
            return step * self.batch_size, self.batch_size
        return self.ramp.before(step) // self.seq_len, self.ramp.size(step) // self.seq_len


def to_batch(rows: Ids) -> Batch:
    """Convert token ids (B, T + 1) to a batch on the CPU."""
    # Convert with NumPy: in the prefetch thread, torch would start a second thread pool.
    inputs, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def separate_documents(batch: Batch, document_start: int | None) -> Batch:
    """Return the batch with `starts_BT` set: a document begins at every id `document_start`.

    If that is None, return the batch unchanged.
    """
    if document_start is None:
        return batch
    starts = latest_start(batch.inputs_BT.numpy() == document_start)
    return replace(batch, starts_BT=torch.from_numpy(starts))


def latest_start(is_start: NDArray[np.bool_]) -> Ints:
    """Return for each position (B, T) the index of the last start at or before it; 0 if none."""
    index = np.where(is_start, np.arange(is_start.shape[1]), 0)
    return np.maximum.accumulate(index, axis=1)


def batch_of_step(step: int, skipped: Sequence[int]) -> int:
    """Return the number of the batch that a step trains on.

    Batches are used in order, leaving out those in `skipped` (ascending batch numbers).
    """
    batch = step
    previous = -1
    while batch != previous:
        previous = batch
        batch = step + bisect_right(skipped, batch)
    return batch


@dataclass(frozen=True)
class EvaluationWindows:
    """`count` windows spread evenly over a split; the same for every rank, batch size and run."""

    tokens: Tokens
    seq_len: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def n_targets(self) -> int:
        """Number of target tokens."""
        return self.count * self.seq_len

    def rows(self, first: int, count: int) -> Ids:
        """Return windows [first, first + count), or fewer at the end, as ids (n, seq_len + 1)."""
        starts, length = self.starts(first, count), self.seq_len + 1
        self.tokens.load((start, start + length) for start in starts.tolist())
        return self.tokens.gather(starts, length)

    def starts(self, first: int, count: int) -> Ints:
        """Return the token index at which each of the windows [first, first + count) starts."""
        n_windows = (len(self.tokens) - 1) // self.seq_len
        return spread(first, count, self.count, n_windows) * self.seq_len


def spread(first: int, count: int, n_chosen: int, n_items: int) -> Ints:
    """Choose `n_chosen` of `n_items` items, evenly spaced; return `count` of the choices.

    The choices are the middles of `n_chosen` equal intervals. Those from number `first` on are
    returned, or fewer at the end.
    """
    index = np.arange(first, max(first, min(first + count, n_chosen)), dtype=np.int64)
    return (2 * index + 1) * n_items // max(1, 2 * n_chosen)


def evaluation_windows(tokens: Tokens, *, seq_len: int, limit_tokens: int) -> EvaluationWindows:
    """Choose windows with at most `limit_tokens` targets in total.

    A split or limit shorter than a window gives a single shorter window; a split of fewer than two
    tokens gives no window.
    """
    n_targets = max(0, min(len(tokens) - 1, limit_tokens))
    length = min(seq_len, n_targets)
    return EvaluationWindows(tokens, max(1, length), n_targets // length if length else 0)


class Prefetcher:
    """Makes the next step's batch in a thread while this step's batch is in use."""

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self.loader = loader
        self._device = device
        self._pool = ThreadPoolExecutor(1, "megatoken-prefetch", self._select_device)
        self._next: tuple[int, Future[Batch]] | None = None
        self.metrics: dict[str, float] = {}  # of the last batch

    def get(self, number: int) -> Batch:
        """Return a batch on the device, and start making the next one.

        Numbers may be requested in any order. Raises DataError as `DataLoader.rows` does.
        """
        if self._next and self._next[0] == number:
            future = self._next[1]
        else:
            future = self._pool.submit(self._make, number)
        self._next = None
        started = time.perf_counter()
        made = future.result()
        if self.loader.tokens.loads:
            self.metrics = {"data_seconds": time.perf_counter() - started}
        self._next = number + 1, self._pool.submit(self._make, number + 1)
        return made.to(self._device)

    def close(self) -> None:
        """Stop the thread and wait for it. Can be called twice."""
        if self.loader.tokens.loads:
            self.loader.tokens.loads.cancel()
        self._pool.shutdown(cancel_futures=True)

    def _select_device(self) -> None:
        if self._device.type == "cuda" and self._device.index is not None:
            torch.cuda.set_device(self._device)  # otherwise pinning opens a context on device 0

    def _make(self, number: int) -> Batch:
        """Return a batch; for a GPU in pinned memory."""
        batch = self.loader.batch(number)
        return batch.pin() if self._device.type == "cuda" else batch
