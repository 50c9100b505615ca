"""Processes for tests: forks of one clean process that has imported torch, which would take each of them seconds."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess

import pytest
import torch.multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "megatoken.train.train",
        "megatoken.distributed.parallelize",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
    ]
)


# A run in a test measures the machine's peak and its kernels for milliseconds, not for seconds.
SHORT_MEASUREMENTS = {
    "megatoken.system.device.PEAK_SIZES": {"cpu": (64, 128)},
    "megatoken.train.kernel_autotune.TRIAL": {"repeats": 5, "longest": 0.05, "fewest": 2},
}


def start_process(work: Callable[..., None], *args: object) -> ForkServerProcess:
    """Start `work(*args)` in a process with the environment of this moment."""
    process = FORKS.Process(target=_work, args=(dict(os.environ), work, *args))
    process.start()
    return process


def run_ranks(work: Callable[..., None], *args: object, nprocs: int) -> None:
    """Run `work(rank, *args)` in `nprocs` processes to their end. Raises what one of them raised."""
    environment = dict(os.environ)
    torch.multiprocessing.start_processes(
        _work_of_rank, args=(environment, work, *args), nprocs=nprocs, start_method="forkserver"
    )


def _work(environment: Mapping[str, str], work: Callable[..., None], *args: object) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for name, value in SHORT_MEASUREMENTS.items():
        pytest.MonkeyPatch().setattr(name, value)
    work(*args)


def _work_of_rank(
    rank: int, environment: Mapping[str, str], work: Callable[..., None], *args: object
) -> None:
    _work(environment, work, rank, *args)
