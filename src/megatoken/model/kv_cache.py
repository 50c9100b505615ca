"""Keys and values of earlier tokens, so that sampling computes each token once.

Shapes: N sequences, K heads of keys and values, T new tokens, S cached tokens, D head width.
"""

import torch
from torch import Tensor

from megatoken.config.model_config import ModelConfig


class KeyValueCache:
    """Keys and values of every layer, (layers, N, K, capacity, D) each, allocated once.

    Each layer appends; the model advances `length` after the last layer.
    """

    def __init__(
        self, config: ModelConfig, *, rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = (config.n_layer, rows, config.kv_heads, capacity, config.d_head)
        self._keys = torch.empty(sizes, dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self.length = 0

    def append(self, layer: int, k_NKTD: Tensor, v_NKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return all it has so far, (N, K, S, D) each."""
        end = self.length + k_NKTD.shape[2]
        keys, values = self._keys[layer, :, :, :end], self._values[layer, :, :, :end]
        keys[:, :, self.length :] = k_NKTD
        values[:, :, self.length :] = v_NKTD
        return keys, values

    def fork(self, n: int) -> None:
        """Turn the single sequence into `n`, each with its own copy of the past."""
        if n > 1:
            self._keys, self._values = (x.repeat(1, n, 1, 1, 1) for x in (self._keys, self._values))
