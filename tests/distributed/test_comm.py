"""A process group that not all can join ends in one error within the time limit."""

import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from megatoken.distributed import comm
from megatoken.distributed.comm import join_process_group
from megatoken.distributed.env import DistEnv, read_dist_env
from megatoken.errors import ExitCode, PeerError
from megatoken.launch.local import find_free_port
from tests.ranks import run_ranks

pytestmark = pytest.mark.fault(50)
# Rank 1 of 2, whose address belongs to a program that accepts connections and never answers.
SILENT = """
import socket
from megatoken.distributed import comm
from megatoken.distributed.env import DistEnv
comm.ANSWER_SECONDS = 1
with socket.socket() as other:
    other.bind(("127.0.0.1", 0))
    other.listen()
    dist_env = DistEnv(rank=1, world_size=2, local_rank=0, local_world_size=1, port=other.getsockname()[1])
    with comm.join_process_group(dist_env, "cpu"):
        pass
"""


def taken_port() -> int:
    taken_port.socket = socket.create_server(("", 0))  # type: ignore[attr-defined]  # open to the end
    return int(taken_port.socket.getsockname()[1])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rank", "find_port", "reason"),
    [
        (0, taken_port, "address already in use"),
        (
            1,
            find_free_port,
            "timed out after 1000ms",
        ),  # nobody listens: a wrong address, or rank 0 is missing
        (0, find_free_port, "1/2 clients joined"),  # rank 1 is missing
    ],
)
def test_ranks_that_do_not_meet(
    rank: int, find_port: Callable[[], int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "JOIN_SECONDS", 1)
    port = find_port()
    dist_env = DistEnv(rank=rank, world_size=2, local_rank=0, local_world_size=1, port=port)
    with pytest.raises(PeerError, match=reason), join_process_group(dist_env, "cpu"):
        pass


def join_often(rank: int, port: int) -> None:
    """Join again and again at one address, as a program does that trains twice."""
    pytest.MonkeyPatch().setattr(comm, "JOIN_SECONDS", 20)
    dist_env = replace(read_dist_env(), port=port)
    for _ in range(20):
        with join_process_group(dist_env, "cpu") as two:
            assert two.gather(rank) == [0, 1]
            assert two.sum(torch.ones(1)) == 2


@pytest.mark.parametrize("agent", [False, True])
def test_ranks_that_join_again_at_the_same_address(
    agent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """agent: torchrun's own store, in which the keys of earlier joinings stay."""
    port = find_free_port()
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        kept = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert kept.port == port
    run_ranks(join_often, port, nprocs=2)


def test_a_program_that_does_not_answer_at_the_address() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SILENT], stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert done.returncode == ExitCode.PEER
    assert "error: rank 1 of 2 could not join within 1 s" in done.stderr
