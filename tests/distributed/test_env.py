"""Rank and world size from the variables of launchers."""

import pytest

from megatoken.base.errors import ConfigError
from megatoken.distributed.env import read_dist_env

# As mpirun of Open MPI 5, and mpiexec of MPICH 5.0.2 and Intel MPI 2021.18 set them.
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=8 PMIX_NAMESPACE=2391867393"
)
MPICH = "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=8 PMI_FD=9 HYDI_CONTROL_FD=7"
INTEL = "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=8 I_MPI_PIN_INFO=1"
JOB = "SLURM_JOB_ID=123456 SLURM_NTASKS=7 SLURM_JOB_NODELIST=gpu[001-004]"
STEP = (
    f"{JOB} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=7 SLURM_PROCID=5 SLURM_LOCALID=1 "
    "SLURM_STEP_TASKS_PER_NODE=4,3 SLURM_STEP_NODELIST=gpu[003-004]"
)
# A shell that salloc or srun --pty opened: a step of one task in a job of several.
INTERACTIVE = (
    f"{JOB} SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 "
    "SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NODELIST=gpu001"
)


NAMES = {"OPEN_MPI": OPEN_MPI, "MPICH": MPICH, "INTEL": INTEL, "JOB": JOB, "STEP": STEP}
NAMES["INTERACTIVE"] = INTERACTIVE


def spell(line: str) -> dict[str, str]:
    """Return the variables of a line, in which names stand for those above."""
    values = " ".join(NAMES.get(value, value) for value in line.split())
    return dict(value.split("=", 1) for value in values.split())


# torchrun's variables come first, SLURM_NTASKS is of the job, the variables of PMI next to a step's
# are of srun --mpi=pmi2. In the last two, mpiexec starts a task of Slurm on each machine, which
# starts the ranks.
ROWS = """\
0 of 1, here 0 of 1:
0 of 1, here 0 of 1: JOB
0 of 1, here 0 of 1: INTERACTIVE
0 of 1, here 0 of 1: OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0
0 of 1, here 0 of 1: PMI_SIZE=1 PMI_RANK=0
5 of 8, here 1 of 8: OPEN_MPI
5 of 8, here 1 of 8: MPICH
5 of 8, here 1 of 8: INTEL
0 of 1, here 0 of 1: OPEN_MPI RANK=0 WORLD_SIZE=1
5 of 7, gpu003 1 of 4: STEP
5 of 7, gpu003 1 of 4: STEP SLURM_NTASKS=28
5 of 7, gpu003 1 of 4: STEP SLURM_STEP_TASKS_PER_NODE=4(x2),3
5 of 7, here 1 of 7: STEP SLURM_STEP_TASKS_PER_NODE=7
5 of 7, gpu003 1 of 4: STEP SLURM_STEP_NODELIST=gpu[003-005,9],cpu1
5 of 7, node7 1 of 4: STEP SLURM_STEP_NODELIST=node7
5 of 7, a1 1 of 4: STEP SLURM_STEP_NODELIST=a1,a2
5 of 7, rack1-ib 1 of 4: STEP SLURM_STEP_NODELIST=rack[1,3]-ib
5 of 7, head 1 of 4: STEP MASTER_ADDR=head
5 of 7, gpu003 1 of 4: STEP PMI_RANK=5 PMI_SIZE=7
5 of 8, head 1 of 4: OPEN_MPI OMPI_COMM_WORLD_LOCAL_SIZE=4 MASTER_ADDR=head
5 of 8, gpu001 1 of 4: STEP SLURM_STEP_NUM_TASKS=2 MPICH MPI_LOCALNRANKS=4
5 of 8, gpu001 1 of 4: STEP OPEN_MPI OMPI_COMM_WORLD_LOCAL_SIZE=4
"""


@pytest.mark.parametrize("row", ROWS.splitlines())
def test_ranks_of_launchers(row: str):
    expected, line = row.split(":")
    found = read_dist_env(spell(line))
    address = found.address.replace("127.0.0.1", "here")
    ranks = f"{found.rank} of {found.world_size}, {address} {found.local_rank}"
    assert f"{ranks} of {found.local_world_size}" == expected


def test_jobs_have_ports_of_their_own():
    for other in ("OPEN_MPI PMIX_NAMESPACE=2", "STEP SLURM_JOB_ID=2"):
        ports = {read_dist_env(spell(line)).port for line in ("OPEN_MPI", "STEP", other)}
        assert len(ports) == 3
        assert all(10_000 <= port < 50_000 for port in ports)
        assert read_dist_env(spell(f"{other} MASTER_PORT=7")).port == 7


MISSING = """\
WORLD_SIZE: RANK=0
RANK: RANK=x WORLD_SIZE=2
rank 2 of 2: RANK=2 WORLD_SIZE=2
rank 0 of 2: RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4
MASTER_ADDR: OPEN_MPI OMPI_COMM_WORLD_LOCAL_SIZE=4
MASTER_ADDR: MPICH MPI_LOCALNRANKS=4
OMPI_COMM_WORLD_RANK: OPEN_MPI OMPI_COMM_WORLD_RANK=one
MPI_LOCALRANKID: PMI_RANK=1 PMI_SIZE=2
"""


@pytest.mark.parametrize("row", MISSING.splitlines())
def test_what_is_missing_is_named(row: str):
    named, line = row.split(":")
    with pytest.raises(ConfigError, match=named):
        read_dist_env(spell(line))
