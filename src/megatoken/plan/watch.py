"""What one process holds and sends while it computes, found by watching every operation; its tensors may be fake.

In: a computation, run under `Watch`. Out: bytes of the storages that live, the most of them at once, and bytes sent by
kind of collective. Absent: what a kernel allocates within itself, the allocator's rounding and gaps, NCCL's buffers.

Sending is counted as a ring of n processes does it (Patarasuk & Yuan 2009): each sends (n - 1)/n of the whole to
gather, scatter or exchange it, and twice that to reduce it for all.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# By the name of the operation without underscores; how often the whole goes round.
KINDS = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "alltoall": 1, "broadcast": 1}
# How a constant enters a fake computation.
LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
LOOK_AGAIN = 1.001  # gradients at the peak are counted anew when it has grown by so much


class Watch(TorchDispatchMode):
    """live_bytes and peak_bytes of storages made since it was entered; `gradients_at_peak` of them, to 0.1%."""

    def __init__(self, count_gradients: Callable[[], int] = lambda: 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = self.gradients_at_peak = 0
        self.sent_bytes: Counter[str] = Counter()
        self.count_gradients = count_gradients
        self._held: dict[int, tuple[object, int]] = {}
        self._looked_at = 0.0

    def forget_peak(self) -> None:
        """What is held now is the most so far."""
        self.peak_bytes, self._looked_at = 0, 0.0
        self._note_peak()

    def __enter__(self) -> Self:
        # Propagation of DTensor's shapes runs in a fake mode of its own: only what runs in ours, or in none, is real.
        self._mode = active_fake_mode()
        self._resize = torch.UntypedStorage.resize_
        watch = self

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            watch._resize(storage, size)
            watch._hold(storage)
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]  # FSDP frees by it, unseen
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it will come again as what it does to the local part
        given = list_tensors(args)
        if self._mode and given and func not in LIFTS and all(type(tensor) is Tensor for tensor in given):
            with unset_fake_temporarily():  # the ranks of a mesh, which are no part of the computation
                return func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            result = args[0]  # the real one returns it, the fake one a copy
        else:
            result = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._mode:
            for tensor in list_tensors(result):
                self._hold(tensor.untyped_storage())
            self._count_sent(func, args, result)
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._held.get(key)
        if known is None:
            self._held[key] = (weakref.ref(storage, partial(self._let_go, key)), size)
            self.live_bytes += size
        elif known[1] != size:
            self._held[key] = (known[0], size)
            self.live_bytes += size - known[1]
        self._note_peak()

    def _let_go(self, key: int, _: object) -> None:
        self.live_bytes -= self._held.pop(key)[1]

    def _note_peak(self) -> None:
        if self.live_bytes <= self.peak_bytes:
            return
        self.peak_bytes = self.live_bytes
        if self.live_bytes > LOOK_AGAIN * self._looked_at:
            self._looked_at = self.live_bytes
            self.gradients_at_peak = self.count_gradients()

    def _count_sent(self, func: Any, args: Any, result: Any) -> None:
        space, _, name = func._schema.name.partition("::")
        if "c10d" not in space and space != "_dtensor":
            return
        kind = next((kind for kind in KINDS if kind in name.replace("_", "")), "")
        if kind:
            processes = CollectiveOp.get_process_group(func, args).size()
            whole = max(count_bytes(each) for each in (*args, result))  # of a part and all parts, in either order
            self.sent_bytes[kind] += KINDS[kind] * whole * (processes - 1) // processes


def list_tensors(nest: Any) -> list[Tensor]:
    """All tensors in a nest of them and other things."""
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def count_bytes(nest: Any) -> int:
    """Bytes of what the tensors in a nest show."""
    return sum(tensor.numel() * tensor.element_size() for tensor in list_tensors(nest))
