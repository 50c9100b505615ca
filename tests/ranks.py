"""Fork test processes from a clean one that has imported torch, which takes seconds."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from megatoken.distributed.env import DistEnv
from megatoken.distributed.local_launch import find_free_port
from tests.tiny_run import train

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "pytest",
        "tests.tiny_run",
        "filelock",
        "megatoken.distributed.parallelize",
        "numpy.random",
        "torch._dynamo",  # imported by the first step of an optimizer
        "torch._inductor",  # of use_deterministic_algorithms
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
    ]
)


# A run in a test measures the machine's peak and its kernels for milliseconds, not for seconds, and
# tries again at once what has failed.
SHORT_MEASUREMENTS = {
    "megatoken.plan.tuning.peak.PEAK_SIZES": {"cpu": (64, 128)},
    "megatoken.plan.tuning.kernels.TRIAL": {"repeats": 5, "longest": 0.05, "fewest": 2},
    "megatoken.store.commit.RETRY_SECONDS": (0.0, 0.0),
    "megatoken.train.checkpoint_saver.LAST_SAVE_RETRY_SECONDS": (0.0, 0.0),
    "megatoken.store.live_mirror.RETRY_SECONDS": (0.0,),
    "megatoken.store.objects.RETRY_SECONDS": (0.0,),
}


def make_process(
    target: Callable[..., None], args: tuple[object, ...], **options: bool
) -> ForkServerProcess:
    """Return a process that will call `target(*args)` with the environment of this moment."""
    return FORKS.Process(target=run_shortened, args=(dict(os.environ), target, *args), **options)


def start_process(work: Callable[..., None], *args: object) -> ForkServerProcess:
    process = make_process(work, args)
    process.start()
    return process


def run_ranks(work: Callable[..., None], *args: object, nprocs: int) -> None:
    """Run `work(rank, *args)` in `nprocs` processes, with the environment of a launcher's ranks.

    Raises the exception that one of them raised.
    """
    torch.multiprocessing.start_processes(
        _work_of_rank,
        args=(nprocs, find_free_port(), dict(os.environ), work, *args),
        nprocs=nprocs,
        start_method="forkserver",
    )


def train_on_ranks(nprocs: int, out: Path, *settings: str, **options: object) -> None:
    """Train as `tests.tiny_run.train` does, on several processes."""
    run_ranks(_train_rank, out, settings, options, nprocs=nprocs)


def _train_rank(rank: int, out: Path, settings: list[str], options: dict[str, object]) -> None:
    train(out, *settings, **options)  # type: ignore[arg-type]


def _work_of_rank(
    rank: int, world_size: int, port: int, environment: Mapping[str, str],
    work: Callable[..., None], *args: object,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    dist_env = DistEnv(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, port=port
    )
    run_shortened({**environment, **dist_env.variables()}, work, rank, *args)


def run_shortened(environment: Mapping[str, str], work: Callable[..., None], *args: object) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for name, value in SHORT_MEASUREMENTS.items():
        pytest.MonkeyPatch().setattr(name, value)
    work(*args)
