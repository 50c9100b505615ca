"""Batches as a pure function of (dataset, seed, step).

In: the tokens of a split. Out: rows of seq_len + 1 token ids, on the device when asked. Sequence i of step s is
number p = s * batch_seqs + i of an endless row of windows; epoch p // n_windows visits every window once, in an
order keyed by (seed, epoch). Ranks take consecutive slices of a batch, micro-batches consecutive slices of a
rank's rows, so the global order is the same for every world size, micro-batch and accumulation. Deliberately
absent: any state to save (the position is the step) and worker processes (a thread fills the gap, nothing to
lose or to hang).
"""

from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from numpy.typing import NDArray

from megatoken.data.order import make_key, permute
from megatoken.data.tokens import Ids, Tokens
from megatoken.errors import Exit, Fault

_CHUNK_WINDOWS = 4096  # the order is computed this many windows at a time: numpy's overhead is paid once


class Loader:
    """Makes any step's batch of one split; holds no position."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_len: int,
        batch_seqs: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Windows of seq_len + 1 tokens at stride seq_len; batch_seqs of them a step over all ranks.

        Fault(Exit.CONFIG) when batch_seqs does not divide by world_size, Fault(Exit.DATA) when the split holds
        fewer windows than one batch.
        """
        assert seq_len >= 1
        assert batch_seqs >= 1
        assert 0 <= rank < world_size
        self.tokens, self.seq_len, self.batch_seqs = tokens, seq_len, batch_seqs
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.n_windows = max(0, len(tokens) - 1) // seq_len
        _check_fit(len(tokens), self.n_windows, seq_len, batch_seqs, world_size)
        self._rank_seqs = batch_seqs // world_size
        self._chunk_windows = min(_CHUNK_WINDOWS, self.n_windows)
        self._chunk: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which every window is visited once; an epoch may end inside a batch."""
        return self.n_windows / self.batch_seqs

    def windows(self, step: int) -> NDArray[np.int64]:
        """The windows (batch_seqs,) of a step's whole batch; window w starts at token w * seq_len."""
        return self._order(step * self.batch_seqs, self.batch_seqs)

    def batch(self, step: int) -> Ids:
        """This rank's rows (batch_seqs // world_size, seq_len + 1) of a step, in the shards' dtype.

        Inputs are [:, :-1], targets [:, 1:]. A pure function of the step: any step, any number of times, from
        any thread. Fault(Exit.DATA) when a block touched for the first time is damaged.
        """
        first = step * self.batch_seqs + self.rank * self._rank_seqs
        windows = self._order(first, self._rank_seqs)
        return self.tokens.gather(windows * self.seq_len, self.seq_len + 1)

    def _order(self, first: int, count: int) -> NDArray[np.int64]:
        """Windows at places [first, first + count) of the endless row."""
        assert first >= 0
        size = self._chunk_windows
        pieces = []
        for number in range(first // size, (first + count - 1) // size + 1):
            kept = self._chunk  # read once: another thread may replace it
            if kept[0] != number:
                kept = (number, self._order_chunk(number * size, size))
                self._chunk = kept
            pieces.append(kept[1][max(0, first - number * size) : first + count - number * size])
        return np.concatenate(pieces)

    def _order_chunk(self, first: int, count: int) -> NDArray[np.int64]:
        pieces = []
        while count:
            epoch, place = divmod(first, self.n_windows)
            here = min(count, self.n_windows - place)
            index = np.arange(place, place + here, dtype=np.int64)
            pieces.append(permute(index, self.n_windows, make_key(self.seed, epoch)))
            first, count = first + here, count - here
        return np.concatenate(pieces)


def _check_fit(n_tokens: int, n_windows: int, seq_len: int, batch_seqs: int, world_size: int) -> None:
    if batch_seqs % world_size:
        below = batch_seqs // world_size * world_size
        valid = [seqs for seqs in (below, below + world_size) if seqs]
        nearest = " or ".join(f"{seqs * seq_len:,} tokens ({seqs:,} sequences)" for seqs in valid)
        what = f"a batch of {batch_seqs:,} sequences does not divide among {world_size} ranks"
        raise Fault(Exit.CONFIG, what, "budget.batch_tokens", f"the nearest that do: {nearest}")
    if n_windows >= batch_seqs:
        return
    what = (
        f"the training split holds {n_tokens:,} tokens; one batch of {batch_seqs:,} sequences of {seq_len:,} "
        f"needs {batch_seqs * seq_len + 1:,}"
    )
    fitting = n_windows // world_size * world_size
    shorter = (n_tokens - 1) // world_size  # the longest sequence of which every rank can have one
    if fitting:
        fix = f"set budget.batch_tokens={fitting * seq_len} or less, or prepare more text"
    elif shorter >= 1:
        fix = (
            f"set model.seq_len={shorter} or less with budget.batch_tokens={shorter * world_size}, or prepare more text"
        )
    else:
        fix = "prepare more text"
    raise Fault(Exit.DATA, what, "budget.batch_tokens", fix)


@dataclass(frozen=True, slots=True)
class EvaluationWindows:
    """A fixed set of consecutive windows from the start of a split: the same for every rank and run."""

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
        starts = np.arange(first, max(first, min(first + count, self.count)), dtype=np.int64) * self.seq_len
        return self.tokens.gather(starts, self.seq_len + 1)


def evaluation_windows(tokens: Tokens, *, seq_len: int, limit_tokens: int) -> EvaluationWindows:
    """Whole windows from the start of a split that hold at most limit_tokens targets, all if there are fewer.

    A split (or a limit) shorter than one window gives one shorter window; a split of less than two tokens gives
    none. Nothing is shuffled, so a validation loss is over the same tokens every time.
    """
    n_targets = max(0, min(len(tokens) - 1, limit_tokens))
    length = min(seq_len, n_targets)
    return EvaluationWindows(tokens, max(1, length), n_targets // length if length else 0)


class Prefetcher:
    """Makes the next step's batch in a thread while this step's is used."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._wanted: SimpleQueue[int | None] = SimpleQueue()
        self._made: SimpleQueue[tuple[int, tuple[torch.Tensor, ...] | BaseException]] = SimpleQueue()
        self._coming: int | None = None  # the step that the thread was last asked for
        self._thread = Thread(target=self._work, name="megatoken-prefetch", daemon=True)
        self._thread.start()

    def get(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, int64 (rows, seq_len) each, on the device; exactly loader.batch(step).

        Any step may be asked for; the following one is prepared meanwhile. Raises what the loader raised for
        this step, a Fault(Exit.DATA) for a damaged block.
        """
        assert self._thread.is_alive(), "the prefetcher is closed"
        if self._coming != step:
            self._coming = step
            self._wanted.put(step)
        while True:
            number, made = self._made.get()
            if number == step:  # what nobody wants any more is dropped, be it a failure
                break
        if isinstance(made, BaseException):
            self._coming = None
            raise made
        self._coming = step + 1
        self._wanted.put(self._coming)
        if len(made) == 2:
            return made[0], made[1]
        rows = widen(made[0].to(self._device, non_blocking=True), self._loader.tokens.dtype)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def close(self) -> None:
        """Stops the thread and waits for it; may be called twice."""
        self._wanted.put(None)
        self._thread.join()

    def _work(self) -> None:
        if self._device.type == "cuda" and self._device.index is not None:
            torch.cuda.set_device(self._device)  # or pinning would open a context on the first device
        while (step := self._wanted.get()) is not None:
            try:
                self._made.put((step, self._make(step)))
            except BaseException as error:  # raised again where the batch is asked for
                self._made.put((step, error))

    def _make(self, step: int) -> tuple[torch.Tensor, ...]:
        """(inputs, targets) for a CPU; for a device one tensor of narrow rows: a quarter of the bytes to copy."""
        rows = self._loader.batch(step)
        if self._device.type == "cpu":
            # numpy converts in this thread; torch would start a second team of threads beside the step's.
            return tuple(torch.from_numpy(part.astype(np.int64)) for part in (rows[:, :-1], rows[:, 1:]))
        narrow = torch.from_numpy(rows.view(np.int16 if rows.itemsize == 2 else np.int32))
        return (narrow.pin_memory() if self._device.type == "cuda" else narrow,)


def widen(rows: torch.Tensor, dtype: np.dtype[np.generic]) -> torch.Tensor:
    """Token ids as int64 from the same bits read as int16 or int32, which every device can convert."""
    return rows.to(torch.int64) & (0xFFFF if dtype.itemsize == 2 else 0xFFFFFFFF)
