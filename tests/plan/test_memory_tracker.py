"""The tracker counts live storages and ring traffic, of real and of fake tensors."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from megatoken.plan.dry_run import fake_process_group
from megatoken.plan.memory_tracker import MemoryTracker


def test_storages_are_counted_once_until_they_are_freed():
    with MemoryTracker() as tracker:
        a = torch.zeros(1000)
        b = a.view(10, 100)[3:]
        assert tracker.live_bytes == 4000
        c = a + 1
        assert tracker.live_bytes == tracker.peak_bytes == 8000
        del a
        assert tracker.live_bytes == 8000  # b sees it
        del b
        assert (tracker.live_bytes, tracker.peak_bytes) == (4000, 8000)
        c.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        c.untyped_storage().resize_(20_000)
        assert tracker.peak_bytes == 20_000
        c.untyped_storage().resize_(40)
        tracker.reset_peak()
        assert tracker.peak_bytes == 40


def test_gradients_at_the_peak_are_counted():
    with MemoryTracker() as tracker:
        tracker.count_gradients = lambda: 7
        torch.zeros(10)
    assert tracker.gradients_at_peak == 7


# Newer names are not in the oldest torch.
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("processes", [2, 8])
def test_ring_traffic(processes: int):
    with fake_process_group(processes):
        mesh = init_device_mesh("cpu", (processes,))
        with FakeTensorMode(), MemoryTracker() as tracker:
            whole, part = torch.zeros(1000), torch.zeros(1000 // processes)
            dist.all_reduce(whole)
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
            dist.broadcast(whole, src=0)
            sharded = DTensor.from_local(part, mesh, [Shard(0)])
            sharded.redistribute(placements=[Replicate()]).to_local()
    rounds = {"allreduce": 2, "allgather": 2, "reducescatter": 1, "broadcast": 1}
    once = 4000 * (processes - 1) // processes
    assert tracker.sent_bytes == {name: count * once for name, count in rounds.items()}
    assert not dist.is_initialized()
