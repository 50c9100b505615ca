"""Decode steps at fixed addresses, which CUDA graphs replay.

In eager mode, the host needs longer to launch a step's kernels than a GPU needs to run them. A graph
launches all of them at once. Until the cache is resized, there is one graph for each padded number
of rows: the first such step runs in eager mode, the second is captured.

Shapes: n rows, padded to N, a power of two; R rows of the cache; V vocabulary without padding.
"""

from threading import get_ident

import torch
from torch import Tensor
from torch.cuda import CUDAGraph

from megatoken.inference.kv_cache import FixedRows, KeyValueCache
from megatoken.model.gpt import GPT, list_own_classes
from megatoken.model.kernels.attention import flash_attention, masked_attention

# Of each thread: the stream on which it captures, because cuBLAS allocates memory for every stream,
# and the first graph, which keeps the memory that all its graphs share.
CAPTURES: dict[int, tuple[torch.cuda.Stream, CUDAGraph]] = {}


def supports_graphs(model: GPT) -> bool:
    """Return whether the model is on CUDA, without code of users, which might wait for the device."""
    is_flash = masked_attention(model.attention_name) is flash_attention
    return model.tokens.weight.is_cuda and is_flash and not list_own_classes(model)


class FixedSteps:
    """Steps of the rows of a cache, until it is resized."""

    def __init__(self, model: GPT, cache: KeyValueCache) -> None:
        self._model = model
        self._cache = cache
        self._device = model.tokens.weight.device
        shape = 2, cache.sizes[0]
        self._inputs_2R = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._graphs: dict[int, tuple[CUDAGraph, Tensor] | None] = {}  # by N

    def run(self, inputs_2n: Tensor) -> Tensor:
        """Feed an id to each row; return the logits (n, V), which are valid until the next step.

        inputs_2n: ids, and lengths of the rows in the cache, which the caller advances.
        """
        n = inputs_2n.shape[1]
        N = min(1 << (n - 1).bit_length(), self._inputs_2R.shape[1])
        self._inputs_2R[:, :n] = inputs_2n
        if N not in self._graphs or self._device.type != "cuda":
            self._graphs[N] = None
            return self._compute(N)[:n]
        graph, logits_NV = self._graphs[N] = self._graphs[N] or self._capture(N)
        graph.replay()
        return logits_NV[:n]

    def _capture(self, N: int) -> tuple[CUDAGraph, Tensor]:
        # `torch.cuda.graph` would also empty torch's cache of device memory.
        graph = CUDAGraph()
        default = torch.cuda.Stream(self._device), None  # type: ignore[no-untyped-call]
        stream, first = CAPTURES.get(get_ident(), default)
        with torch.cuda.stream(stream):
            graph.capture_begin(first.pool() if first else None, "thread_local")
            try:
                logits_NV = self._compute(N)
            finally:
                graph.capture_end()
        CAPTURES.setdefault(get_ident(), (stream, graph))
        return graph, logits_NV

    def _compute(self, N: int) -> Tensor:
        ids_N, ends_N = self._inputs_2R[:, :N]
        hidden_N1C = self._model(ids_N[:, None], FixedRows(self._cache, ends_N))
        return self._model.lm_head(hidden_N1C[:, -1])
