"""Ranks that hang or die are named and started again; slow ones are not."""

import faulthandler
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from megatoken.base.system.environment import HEARTBEAT
from megatoken.distributed.heartbeat import Heartbeat, stacks_file
from megatoken.distributed.watchdog import Watchdog, waits_in_collective
from tests.processes import HANG_SECONDS, find_processes, wait_until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="stops processes, finds them in /proc"
)

# A rank without torch. Its fault occurs at step 5, once or, for SIGSEGV, always. Rank 0 waits for
# rank 1 at every step.
RANK = """
import os, re, signal, sys, time
from pathlib import Path
from megatoken.distributed import heartbeat

heartbeat.MIN_LIMIT_SECONDS["step"] = 4.0
folder, fault, rank = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
marker = folder / "fault"
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))

def wait(step):
    while not (folder / f"step-{step}").exists():
        time.sleep(0.01)

def fail():
    marker.touch()
    time.sleep(0.1)
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    elif fault == "regex":
        re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock
    else:
        time.sleep(float(fault))

beats = heartbeat.Heartbeat()
for step in range(9):
    beats.beat("step", step)
    time.sleep(0.01)
    if rank == "0":
        wait(max(0, step - 1))
        continue
    if step == 5 and (not marker.exists() or fault == "SIGSEGV"):
        fail()
    (folder / f"step-{step}").touch()
"""
LAUNCH = (
    "import sys; from megatoken.distributed import local_launch as local; local.LOST_SECONDS = 0.2; "
    "sys.exit(local.launch([sys.executable, *sys.argv[1:]], 2, 2))"
)


def start(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", LAUNCH, "-c", RANK, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def run(*arguments: object) -> tuple[int, list[str]]:
    """Return the exit code and what was printed on stderr."""
    with start(*arguments) as process:
        _, errors = process.communicate(timeout=HANG_SECONDS)
    assert not find_processes(str(arguments[0])), "orphans"
    return process.returncode, errors.splitlines()


@pytest.mark.long
@pytest.mark.fault(47)
@pytest.mark.parametrize(
    ("fault", "stack"),
    [("SIGSTOP", "no answer: stopped by a signal"), ("1000", "in fail"), ("regex", "in match")],
)
def test_a_rank_that_hangs_is_named_and_the_ranks_start_again(
    fault: str, stack: str, tmp_path: Path
):
    """A stopped rank is not continued for its stack: the others would then be killed in training."""
    code, lines = run(tmp_path, fault)
    assert code == ExitCode.DONE
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert re.match(
        r"warning: rank 1 hangs, silent for \d+ s in phase 'step' after step 5 ", warning
    )
    stacks = "\n".join(lines).split("rank 1:")
    assert len(stacks) == 2
    assert "in wait" in stacks[0]
    assert stack in stacks[1]


@pytest.mark.fault(48)
def test_a_slow_step_is_no_hang(tmp_path: Path):
    assert run(tmp_path, 0.5) == (ExitCode.DONE, [])


@pytest.mark.fault(8, 10)
def test_a_crash_at_the_same_step_every_time_ends(tmp_path: Path):
    code, lines = run(tmp_path, "SIGSEGV")
    assert code == ExitCode.PEER
    where = "rank 1 was killed by SIGSEGV in phase 'step' after step 5"
    assert [line.partition(where)[0] for line in lines] == ["warning: ", "warning: ", "error: "]


@pytest.mark.fault(12)
def test_sigusr2_reaches_the_ranks_and_ends_restarts(tmp_path: Path):
    with start(tmp_path, "1000") as process:
        wait_until((tmp_path / "fault").exists, process)
        process.send_signal(signal.SIGUSR2)
        _, errors = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, errors) == (ExitCode.STOPPED, "")


@pytest.fixture
def beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeat]:
    """Beat as rank 0."""
    monkeypatch.setenv(HEARTBEAT, str(Watchdog(tmp_path, [0], 1).files[0]))
    beats = Heartbeat()
    yield beats
    faulthandler.unregister(signal.SIGQUIT)
    beats._stacks.close()


def test_a_heartbeat_that_cannot_be_written_ends_nothing(beats: Heartbeat, tmp_path: Path):
    with open("/dev/full", "r+b", buffering=0) as full:
        own, beats._file = beats._file, full.fileno()
        beats.beat("step", 1)
        beats._file = own
        beats.beat("step", 2)
    assert Watchdog(tmp_path, [0], 1).read(0)[1:] == (2, "step")


# Phase, step, seconds that it takes, and its limit.
LIMITS = """\
step 80 3.0 8.0
step 81 0.1 15.0
validate 81 100.0 inf
step 82 0.1 15.0
validate 83 1.0 500.0
save 83 1.0 300.0
"""


@pytest.mark.fault(48)
def test_limits_follow_what_was_measured(
    beats: Heartbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watchdog = Watchdog(tmp_path, [0], 1)

    def limit_after(phase, step, seconds):
        beats.beat(phase, step)
        watchdog.all_silent([0])
        now[0] += seconds
        assert watchdog.read(0)[1:] == (step, phase)
        return watchdog.read(0)[0]

    assert not watchdog.all_silent([0])  # nothing noted yet
    # Compilation in the first steps, then short ones; a long one raises the limit; the first
    # evaluation has none.
    limits = [limit_after("step", step, 0.1 if step else 90.0) for step in range(4)]
    assert limits == [inf, inf, inf, 450.0]
    for step in range(4, 80):
        limit_after("step", step, 0.1)
    for line in LIMITS.splitlines():
        phase, number, seconds, limit = line.split()
        assert limit_after(phase, int(number), float(seconds)) == float(limit), line
    limit_after("step", 84, 0.0)
    with beats.during("save", 84):
        assert limit_after("save", 84, 70.0) == 300.0
        for done in range(1, 9):  # its storage is slow, but it writes
            beats.beat("save", 84, done)
            for _ in range(250):
                now[0] += 1.0
                assert not watchdog.all_silent([0])
        silence = 250
        while not watchdog.all_silent([0]):
            now[0] += 1.0
            silence += 1
        assert silence == pytest.approx(5 * 250, abs=2)  # as of any phase
    assert watchdog.read(0)[1:] == (84, "step")
    assert limit_after("step", 85, 14.0) == 15.0
    assert not watchdog.all_silent([0])
    now[0] += 1000  # this process was suspended, perhaps with the ranks
    assert not watchdog.all_silent([0])
    for _ in range(20):
        now[0] += 0.9
        silent = watchdog.all_silent([0])
    assert silent
    beats.beat("step", 86)
    # Of a rank that died after the last poll.
    assert watchdog.describe(0) == " in phase 'step' after step 86"
    assert not watchdog.all_silent([0])


TORCH = '  File "/lib/torch/distributed/distributed_c10d.py", line 3060 in all_reduce\n'
HANGS = "rank 1 hangs, silent for 0 s in phase 'step' after step 7"
WAIT = "all ranks of this machine wait, perhaps for another machine; rank 2 is, "


@pytest.mark.parametrize(
    ("ranks", "world_size", "named"),
    [({0: "train", 1: "validate", 2: "train"}, 3, HANGS), ({2: "train", 3: "train"}, 4, WAIT)],
)
def test_a_collective_that_others_do_not_join_is_named(
    ranks: dict[int, str],
    world_size: int,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """All ranks wait in a collective: one of them in another one, or all for another machine."""

    class Process:
        def __init__(self, rank):
            self.file = stacks_file(watchdog.files[rank])
            self.stack = f'Current thread 0x{rank} (most recent call first):\n{TORCH}  File "a.py" in {ranks[rank]}\n'
            self.file.touch()

        def send(self, number):
            assert number == signal.SIGQUIT
            self.file.write_text(self.stack)

    monkeypatch.setattr("megatoken.distributed.watchdog.DUMP_SECONDS", 0)
    watchdog = Watchdog(tmp_path, list(ranks), world_size)
    for file in watchdog.files.values():
        file.write_text("8.0 7 step")
    what, stacks = watchdog.find_hung({rank: Process(rank) for rank in ranks})  # type: ignore[misc]
    assert what.startswith(named)
    assert re.findall(r"rank (\d):\n.*\n.*\n.*in (\w+)", stacks) == [
        (str(rank), name) for rank, name in ranks.items()
    ]


def test_a_wait_is_told_from_work():
    other = 'Thread 0x1 (most recent call first):\n  File "threading.py", line 3 in run\n\n'
    head, work = "Current thread 0x2 (most recent call first):\n", '  File "a.py", line 2 in b\n'
    assert waits_in_collective(f"{other}{head}{TORCH}{work}")
    assert not waits_in_collective(f"{head}{work * 3}{TORCH}")
