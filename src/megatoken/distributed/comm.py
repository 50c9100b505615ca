"""Collectives between the processes of a run; a single process needs no process group.

Device tensors go by NCCL between CUDA devices and by gloo otherwise; flags and objects go by gloo, so that they never
wait for a device. A process that has died is noticed by the others within the time limit.
"""

import itertools
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatoken.distributed.env import DistEnv
from megatoken.errors import ExitCode, MegatokenError, PeerError
from megatoken.system.torch_compat import abort_nccl

JOIN_SECONDS = (
    120  # for all processes to join the group, and for any to take part in a step: all are at work
)
ANSWER_SECONDS = (
    400  # for what accepts connections at the address; torch waits for its answer without a limit
)
WAIT_SECONDS = (
    1800  # for flags and objects: rank 0 may be choosing kernels, sampling or pruning meanwhile
)
PEER_LOST = re.compile(
    "gloo|NCCL|closed by peer|timed out", re.IGNORECASE
)  # in torch's errors about a lost process

T = TypeVar("T")
_stores: dict[
    DistEnv, tuple[Store, Iterator[int]]
] = {}  # of this process, and the numbers of its joinings


class Comm:
    """The communicator of one process among `dist_env.world_size`; all processes have to make the same calls.

    Every method raises PeerError when another process is gone.
    """

    def __init__(self, dist_env: DistEnv, gloo_group: dist.ProcessGroup | None = None) -> None:
        self.dist_env = dist_env
        self._gloo_group = gloo_group

    @property
    def is_single_process(self) -> bool:
        return self.dist_env.world_size == 1

    def sum(self, numbers: Tensor) -> Tensor:
        """All-reduce a tensor in place."""
        if not self.is_single_process:
            with peer_errors(self.dist_env):
                dist.all_reduce(numbers)
        return numbers

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any process."""
        return self.any_of_each([flag])[0]

    def any_of_each(self, flags: Sequence[bool]) -> list[bool]:
        """For each of several flags whether it is set on any process, in one message."""
        if self.is_single_process:
            return list(flags)
        totals = torch.tensor(flags, dtype=torch.float32)
        with peer_errors(self.dist_env):
            dist.all_reduce(totals, group=self._gloo_group)
        return [total > 0 for total in totals.tolist()]

    def broadcast_from_rank0(self, value: Any) -> Any:
        """Rank 0's value, any that pickle takes."""
        values = [value]
        if not self.is_single_process:
            with peer_errors(self.dist_env):
                dist.broadcast_object_list(values, src=0, group=self._gloo_group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value in order of ranks, on all of them; any that pickle takes."""
        if self.is_single_process:
            return [value]
        gathered = [None] * self.dist_env.world_size
        with peer_errors(self.dist_env):
            dist.all_gather_object(gathered, value, group=self._gloo_group)
        return gathered

    def run_on_rank0(self, call: Callable[[], T]) -> T:
        """The result of rank 0's call, on all ranks; a MegatokenError or OSError of it is raised on all ranks."""
        result: Any = None
        error: Exception | None = None
        if self.dist_env.is_main_process:
            try:
                result = call()
            except (MegatokenError, OSError) as raised:
                error = raised
        result, error = self.broadcast_from_rank0((result, error))
        if error:
            raise error
        return result  # type: ignore[no-any-return]

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.any(False)


@contextmanager
def peer_errors(dist_env: DistEnv) -> Iterator[None]:
    """Turn torch's errors about a lost process into PeerError; others pass."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not PEER_LOST.search(str(error)):
            raise
        # The first sentence, without the place in torch's source.
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[0]).split(". ")[0]
        what = f"rank {dist_env.rank} lost another rank: {reason}"
        fix = "see the last messages of the others; the same command goes on from the newest checkpoint"
        raise PeerError(what, f"{dist_env.world_size} ranks", fix) from None


def open_store(dist_env: DistEnv) -> Store:
    """The keys of the next joining at an address, empty; all ranks join equally often.

    The server is kept as long as this process: were it closed with the group, ranks that join again could still reach
    it, or read in torchrun's the addresses of the time before, and wait for processes that are not there.
    """
    if dist_env not in _stores:
        url = f"tcp://{dist_env.address}:{dist_env.port}"
        timeout = timedelta(seconds=JOIN_SECONDS)
        store, *_ = next(rendezvous(url, dist_env.rank, dist_env.world_size, timeout=timeout))
        _stores[dist_env] = store, itertools.count()
    store, joinings = _stores[dist_env]
    store.set_timeout(timedelta(seconds=JOIN_SECONDS))
    return PrefixStore(f"megatoken-{next(joinings)}", store)


@contextmanager
def join_process_group(dist_env: DistEnv, device_type: str) -> Iterator[Comm]:
    """Join the process group, and leave it together with the others. Raises PeerError when a process does not join."""
    if dist_env.world_size == 1:
        yield Comm(dist_env)
        return
    address = f"{dist_env.address}:{dist_env.port}"

    def fail() -> None:
        what = f"rank {dist_env.rank} of {dist_env.world_size} could not join within {ANSWER_SECONDS} s"
        sys.stderr.write(
            f"error: {PeerError(what, address, 'check that rank 0 listens there, not another program')}\n"
        )
        os._exit(ExitCode.PEER)

    timer = threading.Timer(ANSWER_SECONDS, fail)
    timer.daemon = True
    timer.start()
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=open_store(dist_env),
            rank=dist_env.rank,
            world_size=dist_env.world_size,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
        comm = Comm(
            dist_env, dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_SECONDS))
        )
        comm.barrier()
    except (RuntimeError, ValueError) as error:
        _stores.pop(dist_env, None)
        what = f"rank {dist_env.rank} of {dist_env.world_size} could not join: {str(error).splitlines()[0]}"
        raise PeerError(
            what, address, "check that all ranks were started and reach this address"
        ) from None
    finally:
        timer.cancel()
    try:
        with ignore_view_warning(), peer_errors(dist_env):
            yield comm
        comm.barrier()  # gloo aborts when one process leaves while another still communicates
    except BaseException:
        if device_type == "cuda":
            abort_nccl()  # to destroy the group would wait for kernels that wait for the others
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def ignore_view_warning() -> Iterator[None]:
    """Hide FSDP2's warning about blocks that return views: linear layers do, and no code here changes them in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        yield
