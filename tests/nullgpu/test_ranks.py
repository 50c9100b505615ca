"""Two NCCL ranks on CUDA: every layout trains, and gradients are reduced during the backward."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatoken.distributed import grad_reduce
from megatoken.distributed.comm import join_process_group
from megatoken.distributed.env import read_dist_env
from megatoken.study.bench.workload import draw_batch
from megatoken.train.step import train_step_async
from tests.nullgpu import counters
from tests.nullgpu.models import shrink, train_and_extend
from tests.nullgpu.test_step import LAYERS, build
from tests.ranks import run_ranks
from tests.tiny_run import TINY, read_losses, write_shards

LAYOUTS = """\
machine.sharding=none
machine.sharding=zero1
machine.sharding=zero2
machine.sharding=zero3
machine.sharding=zero3 machine.precision=bf16 machine.fp8=head
machine.tensor_parallel=2
machine.sharding=none optim.name=muon
machine.sharding=zero3 optim.name=muon
"""


@pytest.fixture(autouse=True)
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULLGPU_COUNT", "2")


@pytest.mark.parametrize("layout", LAYOUTS.splitlines())
def test_two_ranks_train_and_resume(tmp_path: Path, layout: str):
    data = write_shards(tmp_path / "data")
    line = f"train {TINY} {data} machine.device=cuda {layout} --nproc 2 budget.steps=3"
    line += f" save.every=2steps --out {tmp_path}/run"
    train_and_extend(line)
    assert read_losses(tmp_path / "run") == [0.0] * 4


def record_reductions(rank: int, mode: str, out: Path) -> None:
    """Write the launches of the backward before each bucket's all-reduce, and in all."""
    env = read_dist_env()
    config = shrink("gpt2-124m", LAYERS)
    launches = []
    reduce = grad_reduce.GradBucketReducer._reduce
    backward = Tensor.backward

    def count_reduce(reducer, index):
        launches.append(counters.read().total)
        reduce(reducer, index)

    def count_backward(tensor):
        counters.reset()
        launches.clear()
        backward(tensor)
        launches.append(counters.read().total)

    with join_process_group(env, "cuda") as comm:
        workload = build(config, mode, comm=comm, batch_seqs=4, micro_batch=2)
        grad_reduce.GradBucketReducer._reduce = count_reduce  # type: ignore[method-assign]
        torch.Tensor.backward = count_backward  # type: ignore[assignment, method-assign]
        batch = draw_batch(config, 4, 0, workload.device, rank=rank, nproc=2)
        train_step_async(workload.state, workload.step_config, workload.device, batch)
    if rank == 0:
        out.write_text(json.dumps(launches))


@pytest.mark.parametrize("mode", ["off", "blocks"])
def test_buckets_are_reduced_during_the_backward(tmp_path: Path, mode: str):
    run_ranks(record_reductions, mode, tmp_path / "launches.json", nprocs=2)
    *buckets, end = json.loads((tmp_path / "launches.json").read_text())
    shares = [launches / end for launches in buckets]
    assert len(shares) >= 4
    assert shares[0] < 0.4
    assert max(after - before for before, after in zip([0.0, *shares], shares, strict=False)) < 0.4
