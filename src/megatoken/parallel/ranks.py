"""What the processes of a run tell each other: sums, whether anybody wants to stop, what rank 0 decided.

In: a topology. Out: `Ranks`, open while the run lasts; alone, every question answers itself without torch.distributed.
Tensors travel by NCCL between CUDA devices and by gloo otherwise; what hosts tell each other goes by gloo, so that it
never waits for a device. A process that is gone is found out by the others within the time limit.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatoken.errors import Exit, Fault
from megatoken.parallel.topology import Topology

JOIN_SECONDS = 120  # for all to come together
LOST = re.compile("gloo|NCCL|closed by peer|timed out", re.IGNORECASE)  # in what torch throws then
WAIT_SECONDS = 1800  # for an answer later: rank 0 may be writing samples or a checkpoint meanwhile


class Ranks:
    """One process among `topology.world_size`."""

    def __init__(self, topology: Topology, hosts: dist.ProcessGroup | None = None) -> None:
        self.topology = topology
        self._hosts = hosts

    @property
    def alone(self) -> bool:
        return self.topology.world_size == 1

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, in place. Raises Fault(PEER) when one is gone."""
        if not self.alone:
            with naming_the_lost(self.topology):
                dist.all_reduce(numbers)
        return numbers

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        if self.alone:
            return flag
        box = torch.tensor(float(flag))
        with naming_the_lost(self.topology):
            dist.all_reduce(box, group=self._hosts)
        return bool(box > 0)

    def agree(self, value: Any) -> Any:
        """What rank 0 has, for all: anything that JSON can say."""
        if self.alone:
            return value
        said = json.dumps(value if self.topology.is_first else None).encode()
        length = torch.tensor(len(said))
        with naming_the_lost(self.topology):
            dist.broadcast(length, src=0, group=self._hosts)
            text = torch.zeros(int(length), dtype=torch.uint8)
            if self.topology.is_first:
                text.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
            dist.broadcast(text, src=0, group=self._hosts)
        return json.loads(bytes(text.tolist()))

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, in their order, for all: anything that JSON can say."""
        if self.alone:
            return [value]
        said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor(len(said))
        with naming_the_lost(self.topology):
            dist.all_reduce(length, op=dist.ReduceOp.MAX, group=self._hosts)
            padded = torch.full((int(length),), ord(" "), dtype=torch.uint8)
            padded[: len(said)] = said
            texts = [torch.empty_like(padded) for _ in range(self.topology.world_size)]
            dist.all_gather(texts, padded, group=self._hosts)
        return [json.loads(bytes(text.tolist())) for text in texts]

    def wait(self) -> None:
        """Until everybody is here."""
        self.any(False)


@contextmanager
def naming_the_lost(topology: Topology) -> Iterator[None]:
    """Turn what a collective throws when a process is gone into Fault(PEER); it may stand around other computation."""
    try:
        yield
    except RuntimeError as wrong:
        if not isinstance(wrong, dist.DistError) and not LOST.search(str(wrong)):
            raise
        told = re.sub(r"^\[[^]]*\] ", "", str(wrong).strip().splitlines()[0]).split(". ")[0]  # without place and advice
        what = f"rank {topology.rank} lost another rank: {told}"
        fix = "see what the others said last; the same command goes on from the newest checkpoint"
        raise Fault(Exit.PEER, what, f"{topology.world_size} ranks", fix) from None


@contextmanager
def join(topology: Topology, device_type: str) -> Iterator[Ranks]:
    """Come together, and leave together. Raises Fault(PEER) when somebody does not come."""
    if topology.world_size == 1:
        yield Ranks(topology)
        return
    where = f"{topology.address}:{topology.port}"
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            init_method=f"tcp://{where}",
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
        hosts = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_SECONDS))
        ranks = Ranks(topology, hosts)
        ranks.wait()
    except (RuntimeError, ValueError) as wrong:
        what = f"rank {topology.rank} of {topology.world_size} could not join: {str(wrong).splitlines()[0]}"
        fix = "see that all ranks were started and reach this address"
        raise Fault(Exit.PEER, what, where, fix) from None
    try:
        yield ranks
        ranks.wait()  # gloo aborts when one leaves while another is still talking
    finally:
        dist.destroy_process_group()
