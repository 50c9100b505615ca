"""The watch counts live storages and ring traffic, of real tensors and of fake ones."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from megatoken.plan.dryrun import fake_world
from megatoken.plan.watch import Watch


def test_storages_are_held_once_and_let_go() -> None:
    with Watch() as watch:
        a = torch.zeros(1000)
        b = a.view(10, 100)[3:]
        assert watch.live_bytes == 4000
        c = a + 1
        assert watch.live_bytes == watch.peak_bytes == 8000
        del a
        assert watch.live_bytes == 8000  # b sees it
        del b
        assert (watch.live_bytes, watch.peak_bytes) == (4000, 8000)
        c.untyped_storage().resize_(0)
        assert watch.live_bytes == 0
        c.untyped_storage().resize_(20_000)
        assert watch.peak_bytes == 20_000
        c.untyped_storage().resize_(40)
        watch.forget_peak()
        assert watch.peak_bytes == 40


def test_fake_tensors_are_held_alike() -> None:
    def compute() -> int:
        with Watch() as watch:
            weight = torch.ones(64, 32, requires_grad=True)
            hidden = torch.ones(16, 32) @ weight.T
            torch.nn.functional.gelu(hidden).square().sum().backward()  # type: ignore[no-untyped-call]
        return watch.peak_bytes

    with FakeTensorMode():
        faked = compute()
    assert faked == compute() > 64 * 32 * 4 * 2


def test_gradients_at_the_peak_are_asked_for() -> None:
    with Watch(lambda: 7) as watch:
        torch.zeros(10)
    assert watch.gradients_at_peak == 7


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # newer names are not in the oldest torch
@pytest.mark.parametrize("processes", [2, 8])
def test_rings_send_what_rings_send(processes: int) -> None:
    size, n = 4000, processes
    with fake_world(n):
        mesh = init_device_mesh("cpu", (n,))
        with FakeTensorMode(), Watch() as watch:
            whole, part = torch.zeros(1000), torch.zeros(1000 // n)
            dist.all_reduce(whole)
            assert watch.sent_bytes["allreduce"] == 2 * size * (n - 1) // n
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
            dist.broadcast(whole, src=0)
            sharded = DTensor.from_local(part, mesh, [Shard(0)])
            sharded.redistribute(placements=[Replicate()]).to_local()
            assert watch.sent_bytes["allgather"] == 2 * size * (n - 1) // n
            assert watch.sent_bytes["reducescatter"] == size * (n - 1) // n
            assert watch.sent_bytes["broadcast"] == size * (n - 1) // n
    assert not dist.is_initialized()
