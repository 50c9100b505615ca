"""Cache keys and values of earlier tokens, so that sampling computes each token once.

Shapes: N sequences, K heads of keys and values, T new tokens, S cached tokens, D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig


class KeyValueCache:
    """Preallocated keys and values of every layer; a row holds one sequence.

    Both tensors are (layers, rows, K, capacity, D). In each forward, the model calls `place` to get
    the new tokens' positions, each layer calls `append`, and the model calls `advance` at the end.
    If rows differ in length, they can grow only by one token per forward.

    lengths: number of tokens in each row in use. Rows in use come before unused ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = (config.n_layer, rows, config.kv_heads, capacity, config.d_head)
        # Zeros, because unused positions of short rows are read with weight 0, and 0 * NaN is NaN.
        self._keys, self._values = torch.zeros(2, *sizes, dtype=dtype, device=device)
        self.lengths = [0] * rows
        self._row_and_end: tuple[Tensor, Tensor] | None = None  # of each row, where lengths differ

    @property
    def length(self) -> int:
        """The number of tokens in the longest row."""
        return max(self.lengths)

    def place(self, T: int) -> Tensor:
        """Return the positions of the next T tokens: (T,) if all rows are equally long.

        If lengths differ, T must be 1, and the positions are (N, 1).
        """
        device = self._keys.device
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
        rows = len(self.lengths)
        start = self.length
        end = start + k_NKTD.shape[2]
        keys = self._keys[layer, :rows, :, :end]
        values = self._values[layer, :rows, :, :end]
        if self._row_and_end is None:
            keys[:, :, start:] = k_NKTD
            values[:, :, start:] = v_NKTD
        else:
            row_N, end_N = self._row_and_end
            keys[row_N, :, end_N] = k_NKTD[:, :, 0]
            values[row_N, :, end_N] = v_NKTD[:, :, 0]
        return keys, values

    def advance(self, T: int) -> None:
        """Add T to every row's length."""
        self.lengths = [length + T for length in self.lengths]

    def join(self, other: "KeyValueCache", copies: Sequence[int]) -> None:
        """Append copies of each sequence in another cache, whose sequences are equally long.

        copies: number of copies of each sequence.
        """
        start = len(self.lengths)
        length = other.length
        rows = [index for index, count in enumerate(copies) for _ in range(count)]
        for target, source in ((self._keys, other._keys), (self._values, other._values)):
            target[:, start : start + len(rows), :, :length] = source[:, rows, :, :length]
        self.lengths += [length] * len(rows)

    def leave(self, row: int) -> None:
        """Remove a row, and move the last row to its index."""
        length = self.lengths[row] = self.lengths[-1]
        last = len(self.lengths) - 1
        if row != last:
            for x in (self._keys, self._values):
                x[:, row, :, :length] = x[:, last, :, :length]
        self.lengths.pop()
