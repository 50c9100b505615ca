"""Communicate between the processes of a run; with a single process, no call waits.

Tensors are sent by NCCL on CUDA devices and by gloo otherwise. Flags and Python objects are always
sent by gloo, so that they never wait for queued GPU work.
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

from megatoken.base.errors import ExitCode, MegatokenError, PeerError
from megatoken.base.system.machine import allow_open_files
from megatoken.base.system.torch_compat import abort_nccl
from megatoken.distributed.env import DistEnv, prepare_gloo
from megatoken.distributed.parallel_dims import ParallelDims

# Limits for fewer than RANKS processes; for more, their multiples.
JOIN_SECONDS = 120  # for all processes to join, and for collectives of device tensors
ANSWER_SECONDS = 400  # torch waits forever if something else accepts connections at the address
RANKS = 256
WAIT_SECONDS = 1800  # limit for flags and objects: rank 0 may be tuning, sampling or pruning
COUNT_BITS = 36  # of the number in `sum_count`, below
FLAG_BITS = 16
VALUE_BITS = 10
PEER_LOST = re.compile("gloo|NCCL|closed by peer|timed out", re.IGNORECASE)

T = TypeVar("T")
# The stores that this process opened, each with a counter of the groups that used it.
_stores: dict[DistEnv, tuple[Store, Iterator[int]]] = {}


class Comm:
    """Collectives over all processes of a run, which must make the same calls in the same order.

    Every method raises PeerError if another process is lost.
    """

    def __init__(self, dist_env: DistEnv, gloo_group: dist.ProcessGroup | None = None) -> None:
        self.dist_env = dist_env
        self._gloo_group = gloo_group

    @property
    def is_single_process(self) -> bool:
        return self.dist_env.world_size == 1

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum a tensor over all processes in place, and return it."""
        if not self.is_single_process:
            with peer_errors(self.dist_env):
                dist.all_reduce(numbers)
        return numbers

    def sum_count(self, count: Tensor, *, flag: bool, value: int) -> tuple[Tensor, bool, int]:
        """Return the sum of `count`, whether `flag` is True on any process, and rank 0's `value`.

        One number carries all three, because gloo takes longer for several. On CUDA, the host waits
        for the sum.

        count: 0-d int64 tensor, whose sum is below 2**COUNT_BITS. value: below 2**VALUE_BITS.
        """
        if self.is_single_process:
            return count, flag, value
        high = flag + (value << FLAG_BITS) * self.dist_env.is_main_process
        total = self.sum(count + (high << COUNT_BITS))
        value, n_flags = divmod(int(total) >> COUNT_BITS, 1 << FLAG_BITS)
        return total % (1 << COUNT_BITS), n_flags > 0, value

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True on any process."""
        return self.any_of_each([flag])[0]

    def any_of_each(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether any process set it, with one collective for all flags."""
        if self.is_single_process:
            return list(flags)
        totals = torch.tensor(flags, dtype=torch.float32)
        with peer_errors(self.dist_env):
            dist.all_reduce(totals, group=self._gloo_group)
        return [total > 0 for total in totals.tolist()]

    def broadcast_from_rank0(self, value: Any) -> Any:
        """Return rank 0's `value`, sent as a pickle, on every process."""
        values = [value]
        if not self.is_single_process:
            with peer_errors(self.dist_env):
                dist.broadcast_object_list(values, src=0, group=self._gloo_group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in rank order, sent as pickles, on every process."""
        if self.is_single_process:
            return [value]
        values = [None] * self.dist_env.world_size
        with peer_errors(self.dist_env):
            dist.all_gather_object(values, value, group=self._gloo_group)
        return values

    def run_on_rank0(self, call: Callable[[], T]) -> T:
        """Call a function on rank 0 and return its result on all ranks.

        If the function raises a MegatokenError or OSError, that error is raised on all ranks.
        """
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
        """Wait for all processes."""
        self.any(False)


SINGLE_PROCESS = Comm(DistEnv())


@contextmanager
def peer_errors(dist_env: DistEnv | ParallelDims) -> Iterator[None]:
    """Convert torch's errors about a lost process to PeerError; let other errors through.

    dist_env: has the rank and world size that the error names.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not PEER_LOST.search(str(error)):
            raise
        # The first sentence, without the location in torch's source.
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[0]).split(". ")[0]
        what = f"rank {dist_env.rank} lost another rank: {reason}"
        fix = "see the other ranks' last messages; rerun the command to resume"
        raise PeerError(what, f"{dist_env.world_size} ranks", fix) from None


@contextmanager
def join_process_group(dist_env: DistEnv, device_type: str) -> Iterator[Comm]:
    """Join the process group, and leave it at the end, after waiting for all processes.

    Raises PeerError if a process does not join or is lost.
    """
    if dist_env.world_size == 1:
        yield Comm(dist_env)
        return
    if sys.platform == "linux":  # elsewhere, gloo's transport is libuv, which cannot
        prepare_gloo()
    allow_open_files()  # rank 0 has a connection to each rank
    with _join_errors(dist_env):
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=_open_store(dist_env),
            rank=dist_env.rank,
            world_size=dist_env.world_size,
            timeout=_join_limit(dist_env),
        )
        gloo_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_SECONDS))
        comm = Comm(dist_env, gloo_group)
        comm.barrier()
        if device_type != "cuda":
            comm.sum(torch.zeros(1))  # connects neighbors, which then notice if one is lost
    try:
        with ignore_view_warning(), peer_errors(dist_env):
            yield comm
        comm.barrier()  # gloo aborts if a process leaves while another still communicates
    except BaseException:
        if device_type == "cuda":
            abort_nccl()  # destroying the group would wait for kernels that wait for other ranks
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _patience(dist_env: DistEnv) -> int:
    return 1 + dist_env.world_size // RANKS


def _join_limit(dist_env: DistEnv) -> timedelta:
    return timedelta(seconds=JOIN_SECONDS * _patience(dist_env))


@contextmanager
def _join_errors(dist_env: DistEnv) -> Iterator[None]:
    """Convert errors in joining to PeerError.

    If joining takes longer than ANSWER_SECONDS permit, prints an error and ends the process.
    """
    rank = f"rank {dist_env.rank} of {dist_env.world_size}"
    limit = ANSWER_SECONDS * _patience(dist_env)
    address = f"{dist_env.address}:{dist_env.port}"
    fix = "check that all ranks were started and rank 0 listens at this address"

    def fail() -> None:
        error = PeerError(f"{rank} could not join within {limit} s", address, fix)
        sys.stderr.write(f"error: {error}\n")
        os._exit(ExitCode.PEER)

    timer = threading.Timer(limit, fail)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (RuntimeError, ValueError) as error:
        _stores.pop(dist_env, None)
        reason = str(error).splitlines()[0]
        raise PeerError(f"{rank} could not join: {reason}", address, fix) from None
    finally:
        timer.cancel()


def _open_store(dist_env: DistEnv) -> Store:
    """Return an empty store for the next process group. All ranks must call it equally often.

    All groups at an address share one server, which is never closed. If each group had its own
    server, a rank that joins again could connect to the old one before it closes.

    Each group has its own key prefix. Without it, a rank that joins again could read the addresses
    of the old group from torchrun's server, which outlives the group. In both cases, the rank would
    wait for processes that are gone.
    """
    if dist_env not in _stores:
        url = f"tcp://{dist_env.address}:{dist_env.port}"
        limit = _join_limit(dist_env)
        store, *_ = next(rendezvous(url, dist_env.rank, dist_env.world_size, timeout=limit))
        _stores[dist_env] = store, itertools.count()
    store, group_numbers = _stores[dist_env]
    store.set_timeout(_join_limit(dist_env))
    return PrefixStore(f"megatoken-{next(group_numbers)}", store)


@contextmanager
def ignore_view_warning() -> Iterator[None]:
    """Hide FSDP2's warning about blocks that return views; no code here modifies views in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        yield
