"""Gradients of several ranks: in buckets, once a step, for masters too."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatoken.parallel.gradients import GradientSum, fill_buckets
from megatoken.parallel.layout import Layout
from megatoken.parallel.ranks import Ranks
from megatoken.parallel.topology import Topology
from megatoken.train.step import accumulate_gradients
from tests.tiny import CPU, tiny_batch, tiny_plan, tiny_state


def test_buckets_go_from_the_last_parameter_to_the_first() -> None:
    tensors = [torch.zeros(size) for size in (100, 10, 20, 30)]
    pairs = [(tensor, tensor) for tensor in tensors]
    sizes = [[pair[0].numel() for pair in bucket] for bucket in fill_buckets(pairs, 4 * 45)]
    assert sizes == [[30, 20], [10, 100]]


def work(rank: int, world: int, folder: str, masters: bool) -> None:
    torch.set_num_threads(1)
    file = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{file / 'meet'}", rank=rank, world_size=world)
    state = tiny_state(layout=Layout(replicas=world, rank=rank))
    if masters:
        state.hold_masters(torch.bfloat16)
    state.share(Ranks(Topology(rank=rank, world_size=world, local_rank=rank, local_world_size=world), dist.group.WORLD))
    assert isinstance(state.gradient_sum, GradientSum)
    calls = []
    reduce = dist.all_reduce

    def count(tensor: torch.Tensor, *args: object, **options: object) -> object:
        calls.append(tensor.numel())
        return reduce(tensor, *args, **options)

    dist.all_reduce = count
    inputs, targets = (part.chunk(world)[rank] for part in tiny_batch())
    targets = targets.clone()
    if rank:
        targets[:, :5] = -1  # an uneven share of what counts
    loss = accumulate_gradients(state, tiny_plan(1), CPU, inputs, targets)
    wide = [numel for numel in calls if numel > 1]
    gradients = {name: p.grad for name, p in state.model.named_parameters()}
    torch.save({"loss": loss, "wide": wide, "gradients": gradients}, file / f"{rank}.pt")
    dist.destroy_process_group()


def test_ranks_have_the_gradient_of_the_whole_batch_after_one_sum(tmp_path: Path) -> None:
    for masters in (False, True):
        folder = tmp_path / str(masters)
        folder.mkdir()
        mp.spawn(work, args=(2, str(folder), masters), nprocs=2)
        found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]
        alone = tiny_state()
        if masters:
            alone.hold_masters(torch.bfloat16)
        inputs, targets = tiny_batch()
        targets = targets.clone()
        targets[4:, :5] = -1
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as the ranks: bf16 sums in other pieces round to other numbers
        try:
            loss = accumulate_gradients(alone, tiny_plan(1), CPU, inputs, targets)
        finally:
            torch.set_num_threads(threads)
        parameters = sum(p.numel() for p in alone.model.parameters())
        for one in found:
            assert one["wide"] == [parameters]  # four micro-batches, one sum of everything
            torch.testing.assert_close(one["loss"], loss, rtol=1e-6, atol=0)
            for name, parameter in alone.model.named_parameters():
                torch.testing.assert_close(one["gradients"][name], parameter.grad, rtol=1e-5, atol=1e-7)
                assert torch.equal(one["gradients"][name], found[0]["gradients"][name])
