"""A process group that not all can join ends in one error within the time limit."""

import re
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from megatoken.distributed import comm
from megatoken.distributed.comm import join_process_group
from megatoken.distributed.env import DistEnv
from megatoken.errors import ExitCode, PeerError
from megatoken.launch.local import find_free_port

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
        (1, find_free_port, "timed out after 1000ms"),  # nobody listens: a wrong address, or rank 0 is missing
        (0, find_free_port, "1/2 clients joined"),  # rank 1 is missing
    ],
)
def test_ranks_that_do_not_meet(
    rank: int, find_port: Callable[[], int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "JOIN_SECONDS", 1)
    port = find_port()
    dist_env = DistEnv(rank=rank, world_size=2, local_rank=0, local_world_size=1, port=port)
    what = rf"rank {rank} of 2 could not join: .*{reason}.* — 127.0.0.1:{port} — check that all ranks were started"
    with pytest.raises(PeerError, match=what), join_process_group(dist_env, "cpu"):
        pass


def test_a_program_that_does_not_answer_at_the_address() -> None:
    done = subprocess.run([sys.executable, "-c", SILENT], stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == ExitCode.PEER
    what = r"^error: rank 1 of 2 could not join within 1 s — 127.0.0.1:\d+ — check that rank 0 listens there"
    assert re.search(what, done.stderr, re.MULTILINE)
