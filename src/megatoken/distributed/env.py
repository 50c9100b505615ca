"""Read the rank and world size of this process from the launcher's environment variables."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatoken.base.errors import ConfigError

PORT = 29500
VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "address": "MASTER_ADDR",
    "port": "MASTER_PORT",
}
# Variables of Open MPI, MPICH (and Intel MPI) and Slurm: rank, world size, local rank, local world
# size, hosts, job. A step of Slurm may have fewer tasks than its job.
LAUNCHERS = (
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE SLURM_JOB_NODELIST PMIX_NAMESPACE",
    "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS SLURM_JOB_NODELIST PMIX_NAMESPACE",
    "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE "
    "SLURM_STEP_NODELIST SLURM_JOB_ID",
)
WHERE = "environment"
FIX = "let torchrun, srun, mpirun or --nproc set the ranks"


@dataclass(frozen=True, kw_only=True)
class DistEnv:
    """This process's rank among all processes and on its machine, and the address of rank 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = PORT

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which prints and writes for all ranks."""
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which torchrun would describe this process."""
        return {name: str(getattr(self, field)) for field, name in VARIABLES.items()}


def read_dist_env(variables: Mapping[str, str] | None = None) -> DistEnv:
    """Read the variables set by torchrun, an MPI or Slurm; without them, return a single process.

    Raises ConfigError if they are incomplete or inconsistent.
    """
    if variables is None:
        variables = os.environ
    if "RANK" not in variables:
        launchers = [names.split() for names in LAUNCHERS]
        found = [names for names in launchers if _read_int(variables, names[1], 1) > 1]
        if not found:
            return DistEnv()
        # srun sets PMI_SIZE as well, but not MPICH's local rank.
        found.sort(key=lambda names: names[2] not in variables)
        return read_dist_env(_translate(variables, *found[0]))
    world_size = _read_int(variables, "WORLD_SIZE")
    env = DistEnv(
        rank=_read_int(variables, "RANK"),
        world_size=world_size,
        local_rank=_read_int(variables, "LOCAL_RANK", 0),
        local_world_size=_read_int(variables, "LOCAL_WORLD_SIZE", world_size),
        address=variables.get("MASTER_ADDR", "127.0.0.1"),
        port=_read_int(variables, "MASTER_PORT", PORT),
    )
    is_local_valid = 0 <= env.local_rank < env.local_world_size <= env.world_size
    if not 0 <= env.rank < env.world_size or not is_local_valid:
        local = f"on this machine {env.local_rank} of {env.local_world_size}"
        raise ConfigError(f"rank {env.rank} of {env.world_size}, {local}", WHERE, FIX)
    return env


def _translate(variables: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return torchrun's variables for a process of another launcher.

    The port depends on the job's name. Raises ConfigError if the address of rank 0 is unknown.
    names: a value of LAUNCHERS.
    """
    *ranks, hosts, job = names
    values = {
        name: str(_read_int(variables, rank))
        for name, rank in zip(VARIABLES.values(), ranks, strict=False)
    }
    address = "127.0.0.1"
    if "MASTER_ADDR" not in variables and values["LOCAL_WORLD_SIZE"] != values["WORLD_SIZE"]:
        if hosts not in variables:
            raise ConfigError(
                "several machines without MASTER_ADDR", WHERE, "set it to rank 0's host"
            )
        address = first_host(variables[hosts])
    port = 10_000 + zlib.crc32(variables.get(job, "").encode()) % 40_000
    values["MASTER_ADDR"] = variables.get("MASTER_ADDR", address)
    values["MASTER_PORT"] = variables.get("MASTER_PORT", str(port))
    return values


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm node list, such as gpu003 for `gpu[003-005,9],cpu1`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise ConfigError(f"no host in '{hosts}'", "SLURM_STEP_NODELIST", "set MASTER_ADDR")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def _read_int(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the variable's number, or the first of a list such as Slurm's 4(x2),3."""
    text = variables.get(name, "" if default is None else str(default))
    match = re.fullmatch(r"(-?\d+)([(,].*)?", text)
    if match is None:
        raise ConfigError(f"{name} is {repr(text) if text else 'not set'}", WHERE, FIX)
    return int(match[1])


def prepare_torchrun() -> None:
    """Set environment variables for torchrun and the processes it starts.

    One gives each restart a new store, because with the old one gloo would wait for processes that
    are gone. The other keeps `python -m` from importing modules from the current folder.
    """
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ["PYTHONSAFEPATH"] = "1"


def prepare_gloo() -> None:
    """Let two processes connect when they first communicate, if the user has not set otherwise.

    Each then has connections to its neighbors in rings and trees, instead of to all processes.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
