"""Rank and world size from the variables of launchers."""

import pytest

from megatoken.distributed.env import DistEnv, first_host, read_dist_env
from megatoken.errors import ConfigError

SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def test_one_process_without_launcher():
    assert read_dist_env({}) == DistEnv()
    assert (
        read_dist_env({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) == DistEnv()
    )  # a shell inside an allocation
    assert read_dist_env({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}) == DistEnv()


def test_variables_round_trip():
    dist_env = DistEnv(
        rank=5, world_size=8, local_rank=1, local_world_size=4, address="node-0", port=1234
    )
    assert read_dist_env(dist_env.variables()) == dist_env
    assert not dist_env.is_main_process


def test_slurm_variables():
    found = read_dist_env(SLURM)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 7, 1, 4)
    assert found.address == "gpu003"
    assert found.port == 10_000 + 123456 % 40_000
    assert read_dist_env(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "7"}).address == "head"
    assert read_dist_env(SLURM | {"SLURM_NTASKS": "8"}).local_world_size == 4
    assert read_dist_env(SLURM | {"SLURM_STEP_NUM_NODES": "1"}).local_world_size == 7


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "PMIX_NAMESPACE": "2391867393",
}


def test_open_mpi_variables():
    found = read_dist_env(OPEN_MPI)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 8)
    assert found.address == "127.0.0.1"
    assert 10_000 <= found.port < 50_000
    assert read_dist_env(OPEN_MPI | {"PMIX_NAMESPACE": "2391867394"}).port != found.port
    machines = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert read_dist_env(machines | {"MASTER_ADDR": "head", "MASTER_PORT": "7"}).address == "head"
    assert (
        read_dist_env(machines | SLURM | {"SLURM_JOB_NODELIST": "gpu[003-004]"}).address == "gpu003"
    )
    assert (
        read_dist_env(OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1
    )  # torchrun's come first
    assert read_dist_env({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == DistEnv()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[003-005,9],cpu1", "gpu003"),
        ("node7", "node7"),
        ("a1,a2", "a1"),
        ("rack[1,3]-ib", "rack1-ib"),
    ],
)
def test_first_host_of_a_list(hosts: str, first: str):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "one"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"},
    ],
)
def test_invalid_variables_are_refused(variables: dict[str, str]):
    with pytest.raises(ConfigError):
        read_dist_env(variables)
