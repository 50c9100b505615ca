"""Gradients of several ranks are summed in buckets, once a step, with master weights too."""

from pathlib import Path

import torch
import torch.distributed as dist

from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.distributed.grad_reduce import GradBucketReducer, fill_buckets
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.train.step import forward_backward
from tests.ranks import run_ranks
from tests.tiny_model import CPU, tiny_batch, tiny_state, tiny_step_config


def test_buckets_go_from_the_last_parameter_to_the_first() -> None:
    tensors = [torch.zeros(size) for size in (100, 10, 20, 30)]
    pairs = [(tensor, tensor) for tensor in tensors]
    sizes = [[pair[0].numel() for pair in bucket] for bucket in fill_buckets(pairs, 4 * 45)]
    assert sizes == [[30, 20], [10, 100]]


def work(rank: int, world: int, folder: str, master_weights: bool) -> None:
    torch.set_num_threads(1)
    file = Path(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{file / 'join'}", rank=rank, world_size=world
    )
    state = tiny_state(dims=ParallelDims(dp_replicate=world, rank=rank))
    if master_weights:
        state.enable_master_weights(torch.bfloat16)
    state.start_grad_reduction(
        Comm(
            DistEnv(rank=rank, world_size=world, local_rank=rank, local_world_size=world),
            dist.group.WORLD,
        )
    )
    assert isinstance(state.grad_reducer, GradBucketReducer)
    calls = []
    reduce = dist.all_reduce

    def count(tensor: torch.Tensor, *args: object, **options: object) -> object:
        calls.append(tensor.numel())
        return reduce(tensor, *args, **options)

    dist.all_reduce = count
    inputs, targets = (part.chunk(world)[rank] for part in tiny_batch())
    targets = targets.clone()
    if rank:
        targets[:, :5] = -1  # ranks have different numbers of targets
    loss = forward_backward(state, tiny_step_config(1), CPU, Batch(inputs, targets))
    sizes = [numel for numel in calls if numel > 1]
    gradients = {name: p.grad for name, p in state.model.named_parameters()}
    torch.save({"loss": loss, "sizes": sizes, "gradients": gradients}, file / f"{rank}.pt")
    dist.destroy_process_group()


def test_one_all_reduce_gives_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    for master_weights in (False, True):
        folder = tmp_path / str(master_weights)
        folder.mkdir()
        run_ranks(work, 2, str(folder), master_weights, nprocs=2)
        found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]
        single = tiny_state()
        if master_weights:
            single.enable_master_weights(torch.bfloat16)
        inputs, targets = tiny_batch()
        targets = targets.clone()
        targets[4:, :5] = -1
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as the ranks: bf16 sums in other pieces round to other numbers
        try:
            loss = forward_backward(single, tiny_step_config(1), CPU, Batch(inputs, targets))
        finally:
            torch.set_num_threads(threads)
        parameters = sum(p.numel() for p in single.model.parameters())
        for result in found:
            assert result["sizes"] == [parameters]  # four micro-batches, one sum of everything
            torch.testing.assert_close(result["loss"], loss, rtol=1e-6, atol=0)
            for name, parameter in single.model.named_parameters():
                torch.testing.assert_close(
                    result["gradients"][name], parameter.grad, rtol=1e-5, atol=1e-7
                )
                assert torch.equal(result["gradients"][name], found[0]["gradients"][name])
