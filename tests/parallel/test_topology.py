"""Who is who, from what launchers say."""

import pytest

from megatoken.errors import Exit, Fault
from megatoken.parallel.topology import Topology, first_host, read_topology

SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def test_one_process_where_nobody_says_otherwise() -> None:
    assert read_topology({}) == Topology()
    assert read_topology({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) == Topology()  # a shell inside an allocation
    assert read_topology({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}) == Topology()


def test_torchrun_and_ours_are_read_back() -> None:
    topology = Topology(rank=5, world_size=8, local_rank=1, local_world_size=4, address="node-0", port=1234)
    assert read_topology(topology.variables()) == topology
    assert not topology.is_first


def test_slurm_tells_node_by_node() -> None:
    found = read_topology(SLURM)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 7, 1, 3)
    assert found.address == "gpu003"
    assert found.port == 10_000 + 123456 % 40_000
    assert read_topology(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "7"}).address == "head"
    assert read_topology(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1"}).local_world_size == 3


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu[003-005,9],cpu1", "gpu003"), ("node7", "node7"), ("a1,a2", "a1"), ("rack[1,3]-ib", "rack1-ib")],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "on this machine 0 of 4"),
    ],
)
def test_nonsense_is_one_line(given: dict[str, str], said: str) -> None:
    with pytest.raises(Fault) as fault:
        read_topology(given)
    assert said in str(fault.value)
    assert fault.value.code == Exit.CONFIG
