"""Count the bytes of live tensors and of collectives during a computation; tensors may be fake.

Not counted are memory allocated inside a kernel, the allocator's rounding and fragmentation, and
NCCL's buffers.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatoken.base.system.torch_compat import (
    READ_BY_HOST,
    CollectiveOp,
    TorchDispatchMode,
    active_fake_mode,
    tree_leaves,
    unset_fake_temporarily,
)

# Rounds of the ring by collective (operator name without underscores). In each, every one of n
# processes sends (n - 1)/n of the full tensor (Patarasuk & Yuan 2009).
RING_ROUNDS = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "alltoall": 1, "broadcast": 1}
# Operators that bring constants into a fake computation.
LIFT_OPS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
RECOUNT = 1.001  # count gradients again when the peak has grown by this factor


class MemoryTracker(TorchDispatchMode):  # type: ignore[misc]  # looked up lazily: of type Any
    """Context manager that tracks the storages created inside it.

    Attributes: live_bytes; peak_bytes; gradients_at_peak, what `count_gradients()` returned at the
    peak, or when live_bytes was within 0.1% of it; sent_bytes, by collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.gradients_at_peak = 0
        self.sent_bytes: Counter[str] = Counter()
        self.count_gradients: Callable[[], int] = lambda: 0
        self._storages: dict[int, tuple[object, int]] = {}  # id -> (weak reference, bytes)
        self._counted_at = 0.0

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self.peak_bytes, self._counted_at = 0, 0.0
        self._update_peak()

    def __enter__(self) -> Self:
        # Only operations in the fake mode that is active now, if any, are part of the run: DTensor
        # propagates shapes in a fake mode of its own.
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
            return NotImplemented  # dispatched again on the local tensor
        inputs = list_tensors(args)
        kwargs = kwargs or {}
        is_plain = bool(inputs) and all(type(tensor) is Tensor for tensor in inputs)
        if self._fake_mode and is_plain and func not in LIFT_OPS:
            with unset_fake_temporarily():  # ranks of a mesh, not part of the run
                return func(*args, **kwargs)
        if self._fake_mode and func is READ_BY_HOST:
            return float(inputs[0].is_floating_point())  # 1 for a loss or norm, 0 for a comparison
        # wait_tensor returns its input; the fake one returns a copy.
        is_wait = func.name() == "_c10d_functional::wait_tensor"
        result = args[0] if is_wait else func(*args, **kwargs)
        if active_fake_mode() is self._fake_mode:
            for tensor in list_tensors(result):
                self._track(tensor.untyped_storage())
            self._count_sent(func, args, result)
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # torch keeps one Python object per storage
        if key not in self._storages:
            self._storages[key] = (weakref.ref(storage, partial(self._forget, key)), 0)
        reference, old_size = self._storages[key]
        self._storages[key] = (reference, storage.nbytes())
        self.live_bytes += storage.nbytes() - old_size
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
        for collective, rounds in RING_ROUNDS.items():
            if collective in name.replace("_", ""):
                n = CollectiveOp.get_process_group(func, args).size()
                sizes = [
                    sum(tensor.nbytes for tensor in list_tensors(value))
                    for value in (*args, result)
                ]
                # The largest is the full tensor; the other is a shard.
                self.sent_bytes[collective] += rounds * max(sizes) * (n - 1) // n
                return


def list_tensors(nest: Any) -> list[Tensor]:
    """Return the tensors in a nested structure of arguments."""
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
