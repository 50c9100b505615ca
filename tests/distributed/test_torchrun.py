"""The torchrun script returns the run's exit code, forwards signals, and restarts hung ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from megatoken.base.system.environment import HEARTBEAT
from megatoken.distributed.local_launch import find_free_port
from megatoken.plan.scripts import Job, write_script
from tests.processes import HANG_SECONDS, children, read_variable, wait_until
from tests.tiny_run import TINY, newest_step, write_shards

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="finds processes in /proc"
)


def write_command(folder: Path) -> list[str]:
    """Write the script for a run in `folder / "run"`; return the command that starts it."""
    data = write_shards(folder / "shards")
    arguments = f"{TINY} --out {folder}/run {data} machine.micro_batch=2 budget.steps=100000"
    arguments += " save.every=5 evaluate.every=0"
    job = Job(
        name="here", train_args=arguments.split(), nodes=1, nproc=2, gpus="none", time="1:00:00"
    )
    text = write_script("torchrun", job).replace("exec python ", f"exec {sys.executable} ")
    script = folder / "run.sh"
    script.write_text(text.replace("$head:29500", f"$head:{find_free_port()}"))
    return ["bash", str(script), "127.0.0.1"]


@contextmanager
def run(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in pipes, which does not outlive a failed test."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            yield running
        finally:
            running.kill()


def wait_for_step(out: Path, step: int, running: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: newest_step(out) >= step, running)


def find_ranks(pid: int) -> dict[int, int]:
    """Processes by rank, started by the one that torchrun, `pid`, has started."""
    ranks = [child for launcher in children(pid) for child in children(launcher)]
    return {
        int(rank): child for child in ranks if (rank := read_variable(child, "RANK")) is not None
    }


def stop_in_a_step(pid: int) -> None:
    """Stop a rank in a step: a save has a limit of half an hour."""
    heartbeat = Path(read_variable(pid, HEARTBEAT) or "")
    while True:
        os.kill(pid, signal.SIGSTOP)
        if heartbeat.read_text().split()[2] == "step":
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.fault(12, 47)
def test_a_signal_saves_and_a_rank_that_hangs_is_restarted(tmp_path: Path):
    out, command = tmp_path / "run", write_command(tmp_path)
    with run(command) as running:
        wait_for_step(out, 5, running)
        running.send_signal(signal.SIGUSR1)
        _, errors = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == ExitCode.STOPPED, errors.decode()
    stopped_at = newest_step(out)
    assert stopped_at >= 5

    with run(command) as running:
        wait_for_step(out, stopped_at + 5, running)
        lost = find_ranks(running.pid)[1]
        stop_in_a_step(lost)
        wait_until(lambda: not Path(f"/proc/{lost}").exists(), running)
        wait_for_step(out, newest_step(out) + 5, running)
        running.terminate()
        output, errors = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == ExitCode.STOPPED, errors.decode()
    assert output.count(b"resuming from step-") == 2
    assert b"warning: rank 1 hangs, silent for " in errors
    assert b"no answer: stopped by a signal" in errors
    assert b"Traceback" not in errors.replace(b"traceback : Signal", b"")
