"""If a rank cannot join, the others end with one error within the time limit."""

import socket
from dataclasses import replace

import pytest
import torch

from megatoken.base.errors import ExitCode, PeerError
from megatoken.distributed import comm
from megatoken.distributed.comm import join_process_group
from megatoken.distributed.env import DistEnv, read_dist_env
from megatoken.distributed.local_launch import find_free_port
from tests.processes import HANG_SECONDS
from tests.ranks import run_ranks, start_process

pytestmark = pytest.mark.fault(50)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "is_taken", "reason"),
    [
        (0, True, "address already in use"),
        # Nobody listens: a wrong address, or rank 0 is missing.
        (1, False, "timed out after 1000ms"),
        (0, False, "1/2 clients joined"),  # rank 1 is missing
    ],
)
def test_ranks_that_do_not_meet(
    rank: int, is_taken: bool, reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(comm, "JOIN_SECONDS", 1)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1] if is_taken else find_free_port()
        dist_env = DistEnv(rank=rank, world_size=2, port=port)
        with pytest.raises(PeerError, match=reason), join_process_group(dist_env, "cpu"):
            pass


def join_often(rank: int, port: int) -> None:
    """Join again and again at one address, as a program does that trains twice."""
    dist_env = replace(read_dist_env(), port=port)
    for _ in range(20):
        with join_process_group(dist_env, "cpu") as two:
            assert two.gather(rank) == [0, 1]
            count = torch.tensor(2**34 + rank)
            summed = two.sum_count(count, flag=rank == 1, value=1000 - rank)
            assert summed == (2**35 + 1, True, 1000)


@pytest.mark.parametrize("agent", [False, True])
def test_ranks_that_join_again_at_the_same_address(agent: bool, monkeypatch: pytest.MonkeyPatch):
    """agent: torchrun's own store, in which the keys of earlier joinings stay."""
    port = find_free_port()
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        kept = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert kept.port == port
    run_ranks(join_often, port, nprocs=2)


def join_at(port: int) -> None:
    pytest.MonkeyPatch().setattr(comm, "ANSWER_SECONDS", 1)
    dist_env = DistEnv(rank=1, world_size=2, port=port)
    with join_process_group(dist_env, "cpu"):
        pass


def test_a_program_that_does_not_answer_at_the_address():
    """It accepts connections, for which torch alone would wait forever."""
    with socket.create_server(("", 0)) as server:
        process = start_process(join_at, server.getsockname()[1])
        process.join(HANG_SECONDS)
    assert process.exitcode == ExitCode.PEER
