"""The rank and world size of this process: the only reader of the launchers' environment variables."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatoken.errors import ConfigError

PORT = 29500
VARIABLES = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
VARIABLES |= {
    "local_world_size": "LOCAL_WORLD_SIZE",
    "address": "MASTER_ADDR",
    "port": "MASTER_PORT",
}
FIX = "let torchrun, srun, mpirun or --nproc set the ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistEnv:
    """rank of world_size in all, local_rank of local_world_size on this machine, and the address of rank 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = PORT

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    def variables(self) -> dict[str, str]:
        """The environment variables that torchrun would set."""
        return {name: str(getattr(self, field)) for field, name in VARIABLES.items()}


def read_dist_env(variables: Mapping[str, str] | None = None) -> DistEnv:
    """Read the variables of torchrun (RANK, WORLD_SIZE, ...), of Open MPI or of a Slurm task; without any: one process.

    Raises ConfigError when they are incomplete or contradict each other.
    """
    variables = os.environ if variables is None else variables
    if "RANK" not in variables and _read_int(variables, "OMPI_COMM_WORLD_SIZE", 1) > 1:
        variables = _translate_open_mpi(variables)
    if (
        "RANK" not in variables
        and "SLURM_STEP_ID" in variables
        and _read_int(variables, "SLURM_NTASKS", 1) > 1
    ):
        variables = _translate_slurm(variables)
    if "RANK" not in variables:
        return DistEnv()
    world_size = _read_int(variables, "WORLD_SIZE")
    env = DistEnv(
        rank=_read_int(variables, "RANK"),
        world_size=world_size,
        local_rank=_read_int(variables, "LOCAL_RANK", 0),
        local_world_size=_read_int(variables, "LOCAL_WORLD_SIZE", world_size),
        address=variables.get("MASTER_ADDR", "127.0.0.1"),
        port=_read_int(variables, "MASTER_PORT", PORT),
    )
    if not (
        0 <= env.rank < env.world_size
        and 0 <= env.local_rank < env.local_world_size <= env.world_size
    ):
        what = f"rank {env.rank} of {env.world_size}, on this machine {env.local_rank} of {env.local_world_size}"
        raise ConfigError(what, "environment", FIX)
    return env


def _translate_open_mpi(variables: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables from those of mpirun; jobs on one machine have different ports, by their names.

    Raises ConfigError for processes on several machines without the address of rank 0, which mpirun does not tell.
    """
    found = {key: variables.get(f"OMPI_COMM_WORLD_{key}", "") for key in ("RANK", "LOCAL_RANK")}
    found |= {
        f"{word}WORLD_SIZE": variables.get(f"OMPI_COMM_WORLD_{word}SIZE", "")
        for word in ("", "LOCAL_")
    }
    address = variables.get("MASTER_ADDR")
    if not address and found["LOCAL_WORLD_SIZE"] != found["WORLD_SIZE"]:
        if "SLURM_JOB_NODELIST" not in variables:
            fix = "give the host of rank 0: mpirun -x MASTER_ADDR=HOST ..."
            raise ConfigError(
                "mpirun on several machines, and MASTER_ADDR is not set", "environment", fix
            )
        address = first_host(variables["SLURM_JOB_NODELIST"])
    port = 10_000 + zlib.crc32(variables.get("PMIX_NAMESPACE", "").encode()) % 40_000
    return found | {
        "MASTER_ADDR": address or "127.0.0.1",
        "MASTER_PORT": variables.get("MASTER_PORT", str(port)),
    }


def _translate_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables from those of a Slurm task; jobs on one node have different ports, by their ids."""
    nodes, port = (
        _read_int(variables, "SLURM_STEP_NUM_NODES", 1),
        _read_int(variables, "SLURM_JOB_ID", 0) % 40_000,
    )
    return {
        "RANK": variables.get("SLURM_PROCID", ""),
        "WORLD_SIZE": variables["SLURM_NTASKS"],
        "LOCAL_RANK": variables.get("SLURM_LOCALID", ""),
        "LOCAL_WORLD_SIZE": str(-(-int(variables["SLURM_NTASKS"]) // nodes)),
        "MASTER_ADDR": variables.get("MASTER_ADDR")
        or first_host(variables.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        "MASTER_PORT": variables.get("MASTER_PORT", str(10_000 + port)),
    }


def first_host(hosts: str) -> str:
    """The first host of a Slurm list: gpu[003-005,9],cpu1 -> gpu003."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise ConfigError(f"no host in '{hosts}'", "SLURM_STEP_NODELIST", "set MASTER_ADDR")
    return f"{match[1]}{match[2] or ''}{match[3] or ''}"


def _read_int(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"-?\d+", text):
        raise ConfigError(f"{name} is {repr(text) if text else 'not set'}", "environment", FIX)
    return int(text)


def prepare_torchrun() -> None:
    """Let torchrun open a new store at every restart: in an old one gloo waits for processes that are gone.

    Its processes, which it starts by -m, import nothing from the current folder.
    """
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ["PYTHONSAFEPATH"] = "1"
