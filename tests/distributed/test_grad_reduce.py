"""Gradients of several ranks are summed in buckets, once a step, with master weights too."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import join_process_group
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


def whole_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Halves of it, for two ranks, have different numbers of targets."""
    inputs, targets = tiny_rows()
    targets = targets.clone()
    targets[4:, :5] = -1
    return inputs, targets


def work(rank: int, folder: Path) -> None:
    calls: list[int] = []
    reduce = dist.all_reduce

    def count(tensor: torch.Tensor, *args: object, **options: object) -> object:
        calls.append(tensor.numel())
        return reduce(tensor, *args, **options)

    dist.all_reduce = count
    with join_process_group(read_dist_env(), "cpu") as comm:
        for master_weights in (False, True):
            state = tiny_state(dims=ParallelDims(dp_replicate=2, rank=rank))
            if master_weights:
                state.enable_master_weights(torch.bfloat16)
            state.start_grad_reduction(comm)
            assert isinstance(state.grad_reducer, GradBucketReducer)
            calls.clear()
            batch = Batch(*(part.chunk(2)[rank] for part in whole_batch()))
            loss = forward_backward(state, tiny_step_config(1), CPU, batch)
            sizes = [numel for numel in calls if numel > 1]
            gradients = {name: p.grad for name, p in state.model.named_parameters()}
            found = {"loss": loss, "sizes": sizes, "gradients": gradients}
            torch.save(found, folder / f"{master_weights} {rank}.pt")


@pytest.mark.usefixtures("one_thread")  # bf16 sums in other pieces round to other numbers
def test_one_all_reduce_gives_the_gradient_of_the_whole_batch(tmp_path: Path):
    run_ranks(work, tmp_path, nprocs=2)
    for master_weights in (False, True):
        paths = [tmp_path / f"{master_weights} {rank}.pt" for rank in range(2)]
        found = [torch.load(path, weights_only=True) for path in paths]
        single = tiny_state()
        if master_weights:
            single.enable_master_weights(torch.bfloat16)
        loss = forward_backward(single, tiny_step_config(1), CPU, Batch(*whole_batch()))
        parameters = sum(p.numel() for p in single.model.parameters())
        for result in found:
            assert result["sizes"] == [parameters]  # four micro-batches, one sum of everything
            torch.testing.assert_close(result["loss"], loss, rtol=1e-6, atol=0)
            for name, parameter in single.model.named_parameters():
                torch.testing.assert_close(
                    result["gradients"][name], parameter.grad, rtol=1e-5, atol=1e-7
                )
                assert torch.equal(result["gradients"][name], found[0]["gradients"][name])
