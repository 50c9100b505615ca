"""Signals to the launcher: before training, to its group, twice; ranks of several machines."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from megatoken import __main__
from megatoken.base.errors import ExitCode
from megatoken.distributed.env import DistEnv
from megatoken.distributed.local_launch import launch, reserve_port
from megatoken.distributed.signals import STOP_SIGNALS
from tests.processes import HANG_SECONDS, wait_until

PROGRAM = """
import sys, time
from pathlib import Path
from megatoken.distributed.signals import stop_at_once
with stop_at_once(*map(Path, sys.argv[1:])):
    print("ready", flush=True)
    time.sleep(1000)
"""
# A rank that is asked to stop, computes something, and saves.
RANK = """
import os, sys, time
from pathlib import Path
from megatoken.distributed.preemption import PreemptionHandler
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
with PreemptionHandler() as handler:
    (folder / f"ready-{rank}").touch()
    while not handler.stop_reason:
        time.sleep(0.01)
    (folder / f"asked-{rank}").touch()
    exec(sys.argv[2])
    (folder / f"saved-{rank}").write_text(handler.stop_reason)
    sys.exit(75)
"""
LAUNCH = """
import sys
from megatoken.distributed.local_launch import launch
sys.exit(launch([sys.executable, *sys.argv[1:]], 2, 2))
"""


# A process that gets a signal while the command is imported, before any module of megatoken but
# __main__ has run.
EARLY = """
import os, signal, sys
from megatoken import __main__
class Finder:
    def find_spec(self, name, *_):
        if name == "megatoken.cli":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
sys.exit(__main__.main())
"""


# Ranks that write their variables; one aborts.
ABORT = """
import os, sys
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_PORT".split()
with open(sys.argv[1] + os.environ["RANK"], "x") as file:
    file.write(" ".join(os.environ[name] for name in names))
os.environ["RANK"] == "3" and os.abort()
"""


@contextmanager
def start(folder: Path, work: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Start two ranks by a launcher in its own process group; return it once both handle signals."""
    command = [sys.executable, "-c", LAUNCH, "-c", RANK, folder, work]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            wait_for(folder, "ready")
            yield process
        finally:
            process.kill()


def wait_for(folder: Path, word: str) -> None:
    wait_until(lambda: all((folder / f"{word}-{rank}").exists() for rank in range(2)))


@pytest.mark.fault(15)
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="Windows has no process groups")
def test_a_signal_to_the_group_is_one_request(tmp_path: Path):
    """Every rank gets the signal twice. During a long call, Python runs the second handler late."""
    with start(tmp_path, "sum(range(3 * 10**7))") as process:
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=HANG_SECONDS) == ExitCode.STOPPED
    wait_for(tmp_path, "saved")


@pytest.mark.fault(9)
def test_ranks_whose_launcher_is_killed_say_so(tmp_path: Path):
    with start(tmp_path, "while handler.stop_reason == 'SIGTERM': time.sleep(0.01)") as process:
        process.kill()
        process.wait()
        said = {"the death of its launcher"}
        wait_until(lambda: {path.read_text() for path in tmp_path.glob("saved-*")} == said)


@pytest.mark.fault(14)
def test_a_signal_before_the_command_is_imported_is_a_stop_of_training():
    codes = {"train": ExitCode.STOPPED, "describe": -signal.SIGTERM}
    codes["train --ending x"] = -signal.SIGTERM
    for line, code in codes.items():
        command = [sys.executable, "-c", EARLY, *line.split()]
        assert subprocess.run(command).returncode == code, line
    assert (__main__.STOP_SIGNALS, __main__.STOPPED) == (STOP_SIGNALS, ExitCode.STOPPED)


@pytest.mark.fault(50)
def test_a_reserved_port_is_free_for_rank_0_only():
    with reserve_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
        assert store.port == port


@pytest.mark.fault(14)
def test_a_second_signal_kills_the_ranks(tmp_path: Path):
    with start(tmp_path, "time.sleep(1000)") as process:
        process.send_signal(signal.SIGTERM)
        wait_for(tmp_path, "asked")
        time.sleep(0.6)  # sooner, it counts as a copy
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=HANG_SECONDS) == ExitCode.STOPPED
    assert not list(tmp_path.glob("saved-*"))


@pytest.mark.fault(6, 8)
def test_a_lost_rank_of_one_machine_is_named_and_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """torchrun or Slurm starts all machines again."""
    sizes = {"rank": 1, "world_size": 2, "local_rank": 0, "local_world_size": 1}
    machine = DistEnv(**sizes, address="head", port=1234)
    command = [sys.executable, "-c", ABORT, f"{tmp_path}/"]
    assert launch(command, 2, 3, machine) == ExitCode.PEER
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    assert (tmp_path / "3").read_text() == "3 4 1 2 1234"
    error = capfd.readouterr().err
    assert error.startswith("error: rank 3 was killed by SIGABRT ")
    assert error.count("\n") == 1


@pytest.mark.fault(14)
@pytest.mark.parametrize("with_marker", [False, True])
def test_an_early_signal_is_a_stop(with_marker: bool, tmp_path: Path):
    marker = tmp_path / "ending"
    command = [sys.executable, "-c", PROGRAM, *([marker] if with_marker else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
    assert process.returncode == (ExitCode.DONE if with_marker else ExitCode.STOPPED)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["75"] * with_marker
