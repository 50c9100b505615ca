"""Gradients of several ranks are summed in buckets, once a step, with master weights too."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm, join_process_group
from megatoken.distributed.env import read_dist_env
from megatoken.distributed.grad_reduce import GradBucketReducer, fill_buckets
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.train.step import forward_backward
from tests.ranks import run_ranks
from tests.tiny_model import CPU, tiny_rows, tiny_state, tiny_step_config


def test_buckets_go_from_the_last_parameter_to_the_first():
    tensors = [torch.zeros(size) for size in (100, 10, 20, 30)]
    pairs = [(tensor, tensor) for tensor in tensors]
    sizes = [[pair[0].numel() for pair in bucket] for bucket in fill_buckets(pairs, 4 * 45)]
    assert sizes == [[30, 20], [10, 100]]


def work(rank: int, folder: Path, master_weights: bool) -> None:
    with join_process_group(read_dist_env(), "cpu") as comm:
        reduce_gradients(comm, folder / f"{rank}.pt", master_weights)


def reduce_gradients(comm: Comm, out: Path, master_weights: bool) -> None:
    rank, world = comm.dist_env.rank, comm.dist_env.world_size
    state = tiny_state(dims=ParallelDims(dp_replicate=world, rank=rank))
    if master_weights:
        state.enable_master_weights(torch.bfloat16)
    state.start_grad_reduction(comm)
    assert isinstance(state.grad_reducer, GradBucketReducer)
    calls = []
    reduce = dist.all_reduce

    def count(tensor: torch.Tensor, *args: object, **options: object) -> object:
        calls.append(tensor.numel())
        return reduce(tensor, *args, **options)

    dist.all_reduce = count
    inputs, targets = (part.chunk(world)[rank] for part in tiny_rows())
    targets = targets.clone()
    if rank:
        targets[:, :5] = -1  # ranks have different numbers of targets
    loss = forward_backward(state, tiny_step_config(1), CPU, Batch(inputs, targets))
    sizes = [numel for numel in calls if numel > 1]
    gradients = {name: p.grad for name, p in state.model.named_parameters()}
    torch.save({"loss": loss, "sizes": sizes, "gradients": gradients}, out)


@pytest.mark.usefixtures("one_thread")  # bf16 sums in other pieces round to other numbers
def test_one_all_reduce_gives_the_gradient_of_the_whole_batch(tmp_path: Path):
    for master_weights in (False, True):
        folder = tmp_path / str(master_weights)
        folder.mkdir()
        run_ranks(work, folder, master_weights, nprocs=2)
        found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]
        single = tiny_state()
        if master_weights:
            single.enable_master_weights(torch.bfloat16)
        inputs, targets = tiny_rows()
        targets = targets.clone()
        targets[4:, :5] = -1
        loss = forward_backward(single, tiny_step_config(1), CPU, Batch(inputs, targets))
        parameters = sum(p.numel() for p in single.model.parameters())
        for result in found:
            assert result["sizes"] == [parameters]  # four micro-batches, one sum of everything
            torch.testing.assert_close(result["loss"], loss, rtol=1e-6, atol=0)
            for name, parameter in single.model.named_parameters():
                torch.testing.assert_close(
                    result["gradients"][name], parameter.grad, rtol=1e-5, atol=1e-7
                )
                assert torch.equal(result["gradients"][name], found[0]["gradients"][name])
