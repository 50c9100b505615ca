"""The script for torchrun, run: its exit code is the run's, signals reach it, and a lost process is started again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megatoken.checkpoint.store import steps
from megatoken.data.prepare import prepare
from megatoken.errors import Exit
from megatoken.parallel.launch import find_free_port
from megatoken.parallel.scripts import Job, write_torchrun
from tests.parallel.test_training import FIXED

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="finds processes in /proc")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run folder and the command that starts the script for it."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "text.txt").write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(400)))
    prepare(str(folder / "text.txt"), folder / "shards", tokenizer="bytes", val_fraction=0.1)
    out = folder / "run"
    words = ["quickstart", "--out", str(out), f"data.path={folder / 'shards'}", *FIXED, "machine.micro_batch=2"]
    job = Job(name="here", words=[*words, "budget.steps=100000", "save.every=20", "evaluate.every=0"], nodes=1, nproc=2,
              gpus="none", time="", image="")  # fmt: skip
    script = folder / "run.sh"
    text = write_torchrun(job).replace("exec python ", f"exec {sys.executable} ")
    script.write_text(text.replace("$head:29500", f"$head:{find_free_port()}"))
    return out, ["bash", str(script), "127.0.0.1"]


@contextmanager
def run(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in pipes, which does not outlive a failed test."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            yield running
        finally:
            running.kill()


def wait_for_step(out: Path, step: int, running: subprocess.Popen[bytes]) -> None:
    while running.poll() is None and not [s for s in steps(out / "checkpoints") if s >= step]:
        time.sleep(0.02)


def find_ranks(pid: int) -> dict[int, int]:
    """Processes below `pid` that have a rank, by it."""
    found: dict[int, int] = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):
            given = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found |= {int(word[5:]): int(child) for word in given if word.startswith(b"RANK=")}
    return found


def test_a_signal_saves_and_a_lost_process_is_started_again(start: tuple[Path, list[str]]) -> None:
    out, command = start
    with run(command) as running:
        wait_for_step(out, 20, running)
        running.send_signal(signal.SIGUSR1)
        _, said = running.communicate(timeout=100)
    assert running.returncode == Exit.STOPPED, said.decode()
    stopped_at = steps(out / "checkpoints")[-1]
    assert stopped_at >= 20

    with run(command) as running:
        wait_for_step(out, stopped_at + 20, running)
        lost = find_ranks(running.pid)[1]
        os.kill(lost, signal.SIGKILL)
        while running.poll() is None and find_ranks(running.pid).get(1, lost) == lost:
            time.sleep(0.02)
        wait_for_step(out, steps(out / "checkpoints")[-1] + 20, running)
        running.terminate()
        heard, said = running.communicate(timeout=100)
    assert running.returncode == Exit.STOPPED, said.decode()
    assert heard.count(b"going on from step-") == 2
    assert b"Traceback" not in said.replace(b"traceback : Signal", b"")


def test_a_mistake_keeps_its_code(start: tuple[Path, list[str]]) -> None:
    _, command = start
    script = Path(command[1])
    wrong = script.with_name("wrong.sh")
    wrong.write_text(
        script.read_text().replace("--max-restarts 3", "").replace(" budget.steps=100000", " budget.stepz=1")
    )
    done = subprocess.run(["bash", str(wrong), "127.0.0.1"], capture_output=True, text=True, timeout=100)
    assert done.returncode == Exit.CONFIG, done.stderr
    assert "did you mean 'budget.steps'?" in done.stderr
