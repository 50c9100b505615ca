"""Counts the bytes of live tensors and of collectives while a computation runs; its tensors may be fake.

Not counted: memory that a kernel allocates within itself, the allocator's rounding and fragmentation, NCCL's buffers.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatoken.system.torch_compat import (
    READ_BY_HOST,
    CollectiveOp,
    TorchDispatchMode,
    active_fake_mode,
    tree_leaves,
    unset_fake_temporarily,
)

# Collective (the operator's name without underscores) -> how often the whole tensor travels around the ring. Each of n
# processes sends (n - 1)/n of it per round (Patarasuk & Yuan 2009).
RING_ROUNDS = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "alltoall": 1, "broadcast": 1}
# Operators by which constants enter a fake computation.
LIFT_OPS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
RECOUNT = 1.001  # growth of the peak after which gradients are counted again


class MemoryTracker(TorchDispatchMode):  # type: ignore[misc]  # looked up lazily: of type Any
    """Context that tracks storages made inside it.

    live_bytes, peak_bytes; gradients_at_peak: `count_gradients()` at the peak, to 0.1%; sent_bytes: by collective.
    """

    def __init__(self, count_gradients: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = self.gradients_at_peak = 0
        self.sent_bytes: Counter[str] = Counter()
        self.count_gradients = count_gradients
        self._storages: dict[int, tuple[object, int]] = {}  # id -> (weak reference, bytes)
        self._counted_at = 0.0

    def reset_peak(self) -> None:
        """Start a new peak from what is live now."""
        self.peak_bytes, self._counted_at = 0, 0.0
        self._update_peak()

    def __enter__(self) -> Self:
        # DTensor propagates shapes in a fake mode of its own: only what runs in ours, or in none, is part of the run.
        self._fake_mode = active_fake_mode()
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            self._resize(storage, size)
            self._track(storage)
            return storage

        # FSDP frees gathered weights by resizing their storage, which no dispatch mode sees.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # comes again as the operation on the local tensor
        inputs = list_tensors(args)
        if (
            self._fake_mode
            and inputs
            and func not in LIFT_OPS
            and all(type(tensor) is Tensor for tensor in inputs)
        ):
            with unset_fake_temporarily():  # the ranks of a mesh, which are not part of the run
                return func(*args, **(kwargs or {}))
        if self._fake_mode and func is READ_BY_HOST:
            return float(
                inputs[0].is_floating_point()
            )  # a finite loss or norm; a comparison that is false
        waits = (
            func.name() == "_c10d_functional::wait_tensor"
        )  # returns its input; the fake one returns a copy
        result = args[0] if waits else func(*args, **(kwargs or {}))
        if active_fake_mode() is self._fake_mode:
            for tensor in list_tensors(result):
                self._track(tensor.untyped_storage())
            self._count_sent(func, args, result)
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()  # torch keeps one Python object for each storage
        reference, known_size = self._storages.get(key) or (
            weakref.ref(storage, partial(self._forget, key)),
            0,
        )
        self._storages[key] = (reference, size)
        self.live_bytes += size - known_size
        self._update_peak()

    def _forget(self, key: int, _: object) -> None:
        self.live_bytes -= self._storages.pop(key)[1]

    def _update_peak(self) -> None:
        if self.live_bytes <= self.peak_bytes:
            return
        self.peak_bytes = self.live_bytes
        if self.live_bytes > RECOUNT * self._counted_at:
            self._counted_at = self.live_bytes
            self.gradients_at_peak = self.count_gradients()

    def _count_sent(self, func: Any, args: Any, result: Any) -> None:
        namespace, _, name = func.name().partition("::")
        if "c10d" not in namespace and namespace != "_dtensor":
            return
        collective = next((known for known in RING_ROUNDS if known in name.replace("_", "")), None)
        if collective:
            n = CollectiveOp.get_process_group(func, args).size()
            sizes = [
                sum(t.numel() * t.element_size() for t in list_tensors(value))
                for value in (*args, result)
            ]
            whole_bytes = max(
                sizes
            )  # arguments and result are a shard and the whole, in either order
            self.sent_bytes[collective] += RING_ROUNDS[collective] * whole_bytes * (n - 1) // n


def list_tensors(nest: Any) -> list[Tensor]:
    """All tensors in nested arguments."""
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
