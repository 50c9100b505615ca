"""Cache keys and values of earlier tokens, so that sampling computes each token once.

Shapes: N sequences, K heads of keys and values, T new tokens, S cached tokens, D head width.
"""

from collections.abc import Sequence
from itertools import takewhile
from operator import eq

import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.model.kernels.attention import supports_varlen

CachedSequence = list[Tensor]  # its keys and values: (2, K, S, D) per layer


class KeyValueCache:
    """Keys and values of every layer; a row holds one sequence.

    A layer's tensor is (2, rows, K, capacity, D), keys before values. With `model.smear`, another
    tensor holds the halves of each embedding. In each forward, the model calls `next_positions` to
    get the new tokens' positions, each layer calls `append`, and the model calls `advance` at the
    end. If rows differ in length, they can grow only by one token per forward.

    lengths: number of tokens in each row in use. Rows in use come before unused ones.
    bounds: as in `Cache`.
    """

    bounds: Tensor | None = None

    def __init__(
        self,
        config: ModelConfig,
        *,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = [(config.kv_heads, config.d_head)] * config.n_layer
        sizes += [(1, config.d_model // 2)] * config.smear
        # Zeros, because unused positions of short rows are read with weight 0, and 0 * NaN is NaN.
        self._layers = [
            torch.zeros(2, rows, K, capacity, D, dtype=dtype, device=device) for K, D in sizes
        ]
        self.lengths = [0] * rows
        self._row_and_end: tuple[Tensor, Tensor] | None = None  # of each row, if lengths differ

    @property
    def length(self) -> int:
        """The number of tokens in the longest row."""
        return max(self.lengths, default=0)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of rows, and of tokens in a row, that the tensors can hold."""
        _, rows, _, capacity, _ = self._layers[0].shape
        return rows, capacity

    def resize(self, rows: int, capacity: int) -> None:
        """Change `sizes`, one layer at a time, so that only one is in memory twice."""
        used = len(self.lengths)
        length = self.length
        for index, layer in enumerate(self._layers):
            _, _, K, _, D = layer.shape
            self._layers[index] = layer.new_zeros(2, rows, K, capacity, D)
            self._layers[index][:, :used, :, :length] = layer[:, :used, :, :length]

    def next_positions(self, T: int) -> Tensor:
        """Return the positions of the next T tokens: (T,) if all rows are equally long.

        If lengths differ, T must be 1, and the positions are (N, 1).
        """
        device = self._layers[0].device
        length = self.length
        if min(self.lengths) == length:
            self._row_and_end = None
            return torch.arange(length, length + T, device=device)
        assert T == 1
        ends_N = torch.tensor(self.lengths, device=device)
        self._row_and_end = torch.arange(len(ends_N), device=device), ends_N
        return ends_N[:, None]

    def append(self, layer: int, k_NKTD: Tensor, v_NKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, and return all of them, (N, K, S, D) each."""
        start = self.length
        end = start + k_NKTD.shape[2]
        keys, values = self._layers[layer][:, : len(self.lengths), :, :end].unbind()
        if self._row_and_end is None:
            keys[:, :, start:] = k_NKTD
            values[:, :, start:] = v_NKTD
        else:
            row_N, end_N = self._row_and_end
            keys[row_N, :, end_N] = k_NKTD[:, :, 0].to(keys.dtype)
            values[row_N, :, end_N] = v_NKTD[:, :, 0].to(keys.dtype)
        return keys, values

    def advance(self, T: int) -> None:
        """Add T to every row's length."""
        self.lengths = [length + T for length in self.lengths]

    def add_rows(self, other: "KeyValueCache", rows: Tensor) -> None:
        """Append rows of another cache, whose sequences are equally long; rows may repeat."""
        start = len(self.lengths)
        length = other.length
        for target, source in zip(self._layers, other._layers, strict=True):
            target[:, start : start + len(rows), :, :length] = source[:, rows, :, :length]
        self.lengths += [length] * len(rows)

    def remove_row(self, row: int) -> None:
        """Remove a row, and move the last row to its index."""
        length = self.lengths[row] = self.lengths[-1]
        last = len(self.lengths) - 1
        if row != last:
            for layer in self._layers:
                layer[:, row, :, :length] = layer[:, last, :, :length]
        self.lengths.pop()

    def copy_row(self, row: int) -> CachedSequence:
        """Return a copy of a row's keys and values."""
        length = self.lengths[row]
        return [layer[:, row, :, :length].clone() for layer in self._layers]

    def load_rows(self, sequences: Sequence[CachedSequence], length: int) -> None:
        """Start each row with the first `length` tokens of a sequence from `copy_row`."""
        for row, sequence in enumerate(sequences):
            for layer, tensor in zip(self._layers, sequence, strict=True):
                layer[:, row, :, :length] = tensor[:, :, :length]
        self.lengths = [length] * len(sequences)


class FixedRows(KeyValueCache):
    """The first N rows of a cache, for a forward of one token that CUDA graphs can replay.

    Their lengths are on the device, and `append` returns all of the capacity. ends_N: each row's
    length, int64.
    """

    def __init__(self, cache: KeyValueCache, ends_N: Tensor) -> None:
        _, _, K, capacity, _ = cache._layers[0].shape
        N = len(ends_N)
        self._layers = cache._layers
        self.lengths = [capacity - 1] * N
        index = torch.arange(N * K + 1, device=ends_N.device)
        self._row_and_end = index[:N], ends_N
        if supports_varlen(self._layers[0]):
            counts = F.pad((ends_N + 1).repeat_interleave(K, output_size=N * K), (0, 1))
            self.bounds = torch.stack((index, index * capacity, counts)).int()

    def next_positions(self, T: int) -> Tensor:
        """Return the positions (N, 1) of the next tokens."""
        assert self._row_and_end is not None
        return self._row_and_end[1][:, None]


Prefix = tuple[int, CachedSequence]  # number of tokens, and a sequence with as many or more
NO_PREFIX: Prefix = 0, []


class PrefixStore:
    """Keys and values of finished sequences, for prompts that begin with the same tokens."""

    def __init__(self) -> None:
        self._sequences: dict[
            tuple[int, ...], CachedSequence
        ] = {}  # by ids, least recently used first

    @property
    def tokens(self) -> int:
        """Number of tokens stored."""
        return sum(map(len, self._sequences))

    def add(self, ids: Sequence[int], tensors: CachedSequence) -> None:
        """Store a sequence in place of its stored prefixes."""
        new = tuple(ids)
        for prefix in [old for old in self._sequences if old == new[: len(old)]]:
            del self._sequences[prefix]
        self._sequences[new] = tensors

    def find(self, ids: Sequence[int]) -> Prefix:
        """Return the longest stored beginning of `ids`.

        The last of `ids` is never included, because its logits are needed.
        """
        prompt = tuple(ids[:-1])
        lengths = {old: _count_equal(old, prompt) for old in self._sequences}
        best = max(lengths, key=lengths.__getitem__, default=())
        if not lengths.get(best):
            return NO_PREFIX
        tensors = self._sequences[best] = self._sequences.pop(best)
        return lengths[best], tensors

    def shrink(self, tokens: float) -> None:
        """Drop the least recently used sequences until at most `tokens` tokens are stored."""
        while self.tokens > tokens:
            del self._sequences[next(iter(self._sequences))]


def _count_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of equal ids before the first difference."""
    return len(list(takewhile(bool, map(eq, a, b))))


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the size of one token's keys and values."""
    keys_and_values = 2 * config.n_layer * config.kv_heads * config.d_head
    return (keys_and_values + config.smear * config.d_model) * dtype.itemsize
