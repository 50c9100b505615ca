"""Which of how many processes this is: the only reader of what launchers put into the environment.

In: the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or those that
Slurm gives each task of an srun. Out: a Topology; one process where there is neither. Absent: torch.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatoken.errors import Exit, Fault

PORT = 29500
SLURM_PORTS = 10_000, 50_000  # a job's port follows from its number, so that jobs on one node do not meet


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """rank of world_size in all, local_rank of local_world_size on this machine; where rank 0 listens."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = PORT

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """As torchrun would put it into the environment."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def read_topology(environment: Mapping[str, str] | None = None) -> Topology:
    """What the launcher said. Raises Fault(CONFIG) when it makes no sense."""
    given = os.environ if environment is None else environment
    if "RANK" in given:
        world = _read(given, "WORLD_SIZE")
        topology = Topology(
            rank=_read(given, "RANK"),
            world_size=world,
            local_rank=_read(given, "LOCAL_RANK", 0),
            local_world_size=_read(given, "LOCAL_WORLD_SIZE", world),
            address=given.get("MASTER_ADDR", "127.0.0.1"),
            port=_read(given, "MASTER_PORT", PORT),
        )
    elif "SLURM_STEP_ID" in given and _read(given, "SLURM_NTASKS", 1) > 1:
        topology = _read_slurm(given)
    else:
        return Topology()
    whole = 0 <= topology.rank < topology.world_size and 0 <= topology.local_rank < topology.local_world_size
    if not whole or topology.local_world_size > topology.world_size:
        what = f"rank {topology.rank} of {topology.world_size}, on this machine {topology.local_rank} of "
        what += str(topology.local_world_size)
        raise Fault(Exit.CONFIG, what, "environment", "let torchrun, srun or --nproc set the ranks")
    return topology


def separate_restarts() -> None:
    """Let torchrun open a new store at every restart.

    In one that is kept, which is its default, gloo finds the addresses of earlier processes and waits for them in vain.
    """
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def _read_slurm(given: Mapping[str, str]) -> Topology:
    first, last = SLURM_PORTS
    return Topology(
        rank=_read(given, "SLURM_PROCID"),
        world_size=_read(given, "SLURM_NTASKS"),
        local_rank=_read(given, "SLURM_LOCALID"),
        # "4", or "4(x2),3": of all nodes in order; what this one has is at SLURM_NODEID.
        local_world_size=_expand_tasks(given["SLURM_STEP_TASKS_PER_NODE"])[_read(given, "SLURM_NODEID")]
        if "SLURM_STEP_TASKS_PER_NODE" in given
        else _read(given, "SLURM_NTASKS"),
        address=given.get("MASTER_ADDR") or first_host(given.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        port=_read(given, "MASTER_PORT", first + _read(given, "SLURM_JOB_ID", 0) % (last - first)),
    )


def first_host(hosts: str) -> str:
    """The first of a Slurm list: gpu[003-005,9],cpu1 -> gpu003."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise Fault(Exit.CONFIG, f"no host in '{hosts}'", "SLURM_STEP_NODELIST", "set MASTER_ADDR")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def _expand_tasks(words: str) -> list[int]:
    """Tasks of each node: "4(x2),3" -> [4, 4, 3]."""
    tasks: list[int] = []
    for word in words.split(","):
        count, _, times = word.partition("(x")
        tasks += [int(count)] * int(times.rstrip(")") or 1)
    return tasks


def _read(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = given.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"-?\d+", text):
        what = f"{name} is {'not set' if text is None else repr(text)}"
        raise Fault(Exit.CONFIG, what, "environment", "let torchrun, srun or --nproc set the ranks")
    return int(text)
