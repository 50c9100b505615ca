"""Batches of a split as a pure function of (dataset, seed, step), so a run's data position is its step number.

Sequence i of step s is entry s * batch_size + i of an endless list of windows (with a ramp of the batch: entry i after
those of the batches before), in one of the orders of data/window_order.py. Ranks take consecutive slices of a batch,
micro-batches consecutive slices of a rank's rows: the global order does not depend on the number of ranks, the
micro-batch or gradient accumulation.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatoken.config.batch_ramp import BatchRamp
from megatoken.config.schema import DataOrder
from megatoken.data.chat_dataset import START, TRAINED, ChatRows, Marks
from megatoken.data.dataset import Tokens
from megatoken.data.documents import Ids
from megatoken.data.window_order import (
    CachedOrder,
    MixedOrder,
    SequentialOrder,
    ShuffledOrder,
    WindowOrder,
)
from megatoken.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """One process's share of a global batch, a sequence a row: what a training step reads.

    targets_BT: values below 0 are ignored. starts_BT: where rows hold several conversations, the
    position in the row where each token's conversation begins; None: every row is one sequence.
    Subclasses add tensors (B, ...) for an objective.
    """

    inputs_BT: Tensor
    targets_BT: Tensor
    starts_BT: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs_BT)

    def split(self, size: int) -> list[Self]:
        """Return micro-batches of `size` rows, as `take`."""
        return [self.take(slice(first, first + size)) for first in range(0, len(self), size)]

    def take(self, rows: slice | Tensor) -> Self:
        """Return some of the rows. On a CPU, `starts_BT` is dropped where every row is one sequence."""
        batch = self._map(lambda tensor: tensor[rows])
        starts = batch.starts_BT
        if starts is not None and starts.device.type == "cpu" and not starts.any():
            return replace(batch, starts_BT=None)
        return batch

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        if self.inputs_BT.device == device:
            return self
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: function(v) for k, v in tensors.items() if v is not None})


class DataLoader:
    """Batches of one split, for one data-parallel rank; iterating gives the steps of the first epoch."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        ramp: BatchRamp | None = None,
        order: DataOrder = "shuffled",
        sources: Sequence[tuple[int, float]] = (),
        marks: Marks | None = None,
        document_start: int | None = None,
    ) -> None:
        """Windows of seq_len + 1 tokens at stride seq_len, batch_size of them a step over all ranks.

        ramp: the batches grow to batch_size as it says. order: sequential cuts each shard into batches from its start
        and leaves out what is shorter than a batch, as build-nanogpt and llm.c's train_gpt2.py; one-batch repeats the
        first one. sources: (tokens, weight) of each source in `tokens`, which are shuffled each on its own. marks: of
        rows of conversations (data/chat_dataset.py), which share no token; they are not read sequentially.
        document_start: the id that begins each document of a text, none of which then sees another. Raises
        ConfigError when a batch does not divide by dp_size, DataError when the split holds fewer windows than one
        batch, or a source not one.
        """
        for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", "DataLoader", "give 1 or more")
        assert 0 <= dp_rank < dp_size
        self.tokens, self.seq_len, self.batch_size = tokens, seq_len, batch_size
        self.seed, self.dp_rank, self.dp_size = seed, dp_rank, dp_size
        lengths = [length for length, _ in sources] or [len(tokens)]
        unit = 1  # windows that are not divided
        if order == "sequential":
            lengths, unit = tokens.shard_tokens, batch_size
        assert marks is None or (order != "sequential" and document_start is None)
        self._marks, self.document_start = marks, document_start
        self._stride, shared = (
            (seq_len, 1) if marks is None else (seq_len + 1, 0)
        )  # tokens of two windows
        counts = [max(0, length - shared) // (unit * self._stride) * unit for length in lengths]
        # Windows are numbered through all sources, or shards; these are the first of each, and its first token.
        self._first_windows, self._first_tokens = (
            np.cumsum([0, *sizes[:-1]]) for sizes in (counts, lengths)
        )
        self.n_windows = sum(counts)
        if marks is not None and self.n_windows < batch_size:
            what = f"the training split holds {self.n_windows:,} rows of conversations, a batch has {batch_size:,}"
            fewer = self.n_windows // dp_size * dp_size * seq_len
            fix = (
                f"set budget.batch_tokens={fewer} or less"
                if fewer
                else "prepare more conversations"
            )
            raise DataError(what, "budget.batch_tokens", fix)
        _check_fit(len(tokens), self.n_windows, seq_len, batch_size, dp_size)
        if ramp:
            _check_divides("budget.batch_start", ramp.start // seq_len, seq_len, dp_size)
        self._ramp, self._repeats = ramp, order == "one-batch"
        chosen: WindowOrder = ShuffledOrder(self.n_windows, seed)
        if order == "sequential":
            chosen = SequentialOrder(self.n_windows)
        elif len(sources) > 1:
            if not min(counts):
                what = f"a source of {lengths[counts.index(0)]:,} tokens holds no sequence of {seq_len:,}"
                raise DataError(what, "data.path", "leave it out, or set a smaller model.seq_len")
            chosen = MixedOrder(counts, [weight for _, weight in sources], seed)
        self._order = CachedOrder(chosen, self.n_windows)

    @property
    def has_marks(self) -> bool:
        """Whether the windows are rows of conversations."""
        return self._marks is not None

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which every window is visited once; an epoch may end inside a batch."""
        return self.n_windows / self.batch_size

    def windows(self, step: int) -> NDArray[np.int64]:
        """The windows (batch_size,) of a step over all ranks; those of a source, or shard, are numbered in a row."""
        return self._order.windows(*self._entries(step))

    def rows(self, step: int) -> Ids:
        """This rank's windows of a step, (a batch's sequences // dp_size, seq_len + 1), in the shards' dtype.

        Any step, any number of times, from any thread. Raises DataError as `Tokens.gather`.
        """
        return self.tokens.gather(self._find_tokens(step), self.seq_len + 1)

    def _find_tokens(self, step: int) -> NDArray[np.int64]:
        """The first token of each of this rank's windows of a step."""
        first, size = self._entries(step)
        size //= self.dp_size
        windows = self._order.windows(first + self.dp_rank * size, size)
        place = np.searchsorted(self._first_windows, windows, side="right") - 1
        starts: NDArray[np.int64] = (
            self._first_tokens[place] + (windows - self._first_windows[place]) * self._stride
        )
        return starts

    def full_batch(self, step: int) -> Batch:
        """What a training step reads, on the CPU; of conversations what is trained is counted. Raises as `rows`."""
        if self._marks is None:
            batch = Batch(*self.batch(step))
            return (
                batch
                if self.document_start is None
                else separate_documents(batch, self.document_start)
            )
        marks = self._marks[self._find_tokens(step)[:, None] + np.arange(self.seq_len + 1)]
        return make_batch(self.rows(step), marks)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's (inputs, targets) of a step, each int64 (sequences, seq_len). Raises as `rows`."""
        rows = self.rows(step)
        # numpy converts in this thread; torch would start a second thread pool beside the training step's.
        return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(
            rows[:, 1:].astype(np.int64)
        )

    def __len__(self) -> int:
        """Whole batches in one epoch."""
        return self.n_windows // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The whole batches of the first epoch; `batch(step)` gives those of any step."""
        return map(self.batch, range(len(self)))

    def _entries(self, step: int) -> tuple[int, int]:
        """The first entry of a step in the endless list, and their number."""
        assert step >= 0
        if self._repeats:
            step = 0
        if self._ramp is None:
            return step * self.batch_size, self.batch_size
        return self._ramp.before(step) // self.seq_len, self._ramp.size(step) // self.seq_len


def make_batch(rows: Ids, marks: Marks) -> Batch:
    """Rows of conversations and their marks, both (n, T + 1), as a batch on the CPU."""
    ids = rows.astype(np.int64)
    targets = np.where(marks[:, 1:] & TRAINED, ids[:, 1:], -1)
    starts = np.maximum.accumulate(
        np.where(marks[:, :-1] & START, np.arange(ids.shape[1] - 1), 0), axis=1
    )
    inputs = torch.from_numpy(np.ascontiguousarray(ids[:, :-1]))
    return Batch(
        inputs, torch.from_numpy(targets), torch.from_numpy(starts) if starts.any() else None
    )


def separate_documents(batch: Batch, document_start: int) -> Batch:
    """The batch, on the CPU, with the place at which each token's document begins: at the id `document_start`.

    The id belongs to the document after it, as where sampling begins one. What a row begins with counts as a document.
    """
    ids = batch.inputs_BT.numpy()
    starts = np.maximum.accumulate(
        np.where(ids == document_start, np.arange(ids.shape[1]), 0), axis=1
    )
    return replace(batch, starts_BT=torch.from_numpy(starts))


def batch_of_step(step: int, skipped: Sequence[int]) -> int:
    """Number of the batch of a step, both from 0: batches go in order, without those in `skipped` (ascending)."""
    batch, before = step, -1
    while batch != before:
        before, batch = batch, step + bisect_right(skipped, batch)
    return batch


def _check_fit(n_tokens: int, n_windows: int, seq_len: int, batch_size: int, dp_size: int) -> None:
    _check_divides("budget.batch_tokens", batch_size, seq_len, dp_size)
    if n_windows >= batch_size:
        return
    fitting = n_windows // dp_size * dp_size
    shorter = (n_tokens - 1) // dp_size  # the longest sequence of which every rank can have one
    fix = "prepare more text"
    if fitting:
        fix = f"set budget.batch_tokens={fitting * seq_len} or less, or {fix}"
    elif shorter >= 1:
        fix = f"set model.seq_len={shorter} or less with budget.batch_tokens={shorter * dp_size}, or {fix}"
    what = f"the training split holds {n_tokens:,} tokens; one batch of {batch_size:,} sequences of {seq_len:,} "
    raise DataError(f"{what}needs {batch_size * seq_len + 1:,}", "budget.batch_tokens", fix)


def _check_divides(key: str, batch_size: int, seq_len: int, dp_size: int) -> None:
    if batch_size % dp_size:
        below = batch_size // dp_size * dp_size
        nearest = " or ".join(
            f"{n * seq_len:,} tokens ({n:,} sequences)" for n in (below, below + dp_size) if n
        )
        what = f"a batch of {batch_size:,} sequences does not divide among {dp_size} processes"
        most = next(n for n in range(dp_size, 0, -1) if batch_size % n == 0)
        raise ConfigError(what, key, f"the nearest that do: {nearest}; or take {most} of them")


@dataclass(frozen=True, slots=True)
class EvaluationWindows:
    """A fixed set of windows, spread evenly over a split: the same for every rank, micro-batch and run."""

    tokens: Tokens
    seq_len: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def n_targets(self) -> int:
        """Target tokens in the whole set."""
        return self.count * self.seq_len

    def rows(self, first: int, count: int) -> Ids:
        """Windows [first, first + count), cut off at the set's end, as (rows, seq_len + 1)."""
        return self.tokens.gather(self.starts(first, count), self.seq_len + 1)

    def starts(self, first: int, count: int) -> NDArray[np.int64]:
        """Place in the split of the first token of each of these windows."""
        n_windows = (
            len(self.tokens) - 1
        ) // self.seq_len  # of the split, in `count` equal parts: the middle of each
        index = np.arange(first, max(first, min(first + count, self.count)), dtype=np.int64)
        return (2 * index + 1) * n_windows // max(1, 2 * self.count) * self.seq_len


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """A fixed set of rows of conversations, as `EvaluationWindows`."""

    source: ChatRows
    count: int

    def __len__(self) -> int:
        return self.count

    def rows(self, first: int, count: int) -> Batch:
        """Rows [first, first + count), cut off at the set's end."""
        index = np.arange(first, max(first, min(first + count, self.count)), dtype=np.int64)
        return make_batch(
            *self.source.read((2 * index + 1) * len(self.source) // max(1, 2 * self.count))
        )


def evaluation_rows(source: ChatRows, *, limit_tokens: int) -> EvaluationRows:
    """Rows spread evenly over a split, of at most limit_tokens in all, but one at least if there is one."""
    return EvaluationRows(source, min(len(source), max(1, limit_tokens // source.seq_len)))


def evaluation_windows(tokens: Tokens, *, seq_len: int, limit_tokens: int) -> EvaluationWindows:
    """Whole windows, spread evenly over a split, of at most limit_tokens targets in all; every one if there are fewer.

    A split (or limit) shorter than one window gives one shorter window; a split of less than two tokens gives none.
    Nothing is shuffled, so a validation loss is over the same tokens every time.
    """
    n_targets = max(0, min(len(tokens) - 1, limit_tokens))
    length = min(seq_len, n_targets)
    return EvaluationWindows(tokens, max(1, length), n_targets // length if length else 0)


class Prefetcher:
    """Makes the next step's batch in a thread while this step's is used."""

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._pool = ThreadPoolExecutor(1, "megatoken-prefetch", self._select_device)
        self._next: tuple[int, Future[Batch | Tensor]] | None = None
        self.metrics: dict[str, float] = {}  # nothing is known of a batch of text

    def get(self, step: int) -> Batch:
        """`loader.batch(step)` on the device, for any step; starts on the next one. Raises DataError as the loader."""
        if self._next is None or self._next[0] != step:
            self._next = step, self._pool.submit(self._make, step)
        future, self._next = self._next[1], None
        made = future.result()
        self._next = step + 1, self._pool.submit(self._make, step + 1)
        if isinstance(made, Batch):
            return made.to(self._device)
        rows = widen_ids(made.to(self._device, non_blocking=True), self._loader.tokens.dtype)
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    def close(self) -> None:
        """Stop the thread and wait for it; may be called twice."""
        self._pool.shutdown(cancel_futures=True)

    def _select_device(self) -> None:
        if self._device.type == "cuda" and self._device.index is not None:
            torch.cuda.set_device(
                self._device
            )  # or pinning would open a context on the first device

    def _make(self, step: int) -> Batch | Tensor:
        """The batch for a CPU; of text for a device one tensor of narrow rows: a quarter of the bytes to copy."""
        if (
            self._device.type == "cpu"
            or self._loader.has_marks
            or self._loader.document_start is not None
        ):
            return self._loader.full_batch(step)
        rows = self._loader.rows(step)
        narrow = torch.from_numpy(rows.view(np.int16 if rows.itemsize == 2 else np.int32))
        return narrow.pin_memory() if self._device.type == "cuda" else narrow


def widen_ids(rows: Tensor, dtype: np.dtype[np.generic]) -> Tensor:
    """Token ids as int64 from the same bits read as int16 or int32, which every device can convert."""
    return rows.to(torch.int64) & (0xFFFF if dtype.itemsize == 2 else 0xFFFFFFFF)
