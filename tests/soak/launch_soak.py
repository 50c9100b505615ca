"""Killed and hung ranks and slow steps of a job that a launcher watches.

    python -m tests.soak.launch_soak --kills 40 --hangs 100 --slow 1000

Prints one JSON line at the end. A callback of rank 1 does what a file asks for, in the middle of
training; times are seconds from there to the line that names the rank, and to the next step that is
trained.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatoken.errors import ExitCode
from tests.processes import find_processes
from tests.soak.options import parse_options, report
from tests.tiny_run import read_column, write_shards

# A rank of a run. `out.order`, read by rank 1 after a step, names a fault; `out.at` is when it began.
RANK = r"""
import os, re, signal, sys, time
from pathlib import Path
import torch.distributed
from tests.tiny_run import train

out, *words = sys.argv[1:]
limit_file = Path(os.environ["MEGATOKEN_HEARTBEAT"])

def slow():
    time.sleep(float(limit_file.read_text().split()[0]) / 2)

faults = {
    "sleep": lambda: time.sleep(1e6),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "regex": lambda: re.match("(a+)+$", "a" * 60 + "b"),
    "collective": lambda: torch.distributed.barrier(),
    "read": lambda: open(out + ".fifo").read(),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}

def act(row):
    if row["kind"] != "train" or os.environ["RANK"] != "1":
        return
    if os.path.exists(out + ".slow") and row["step"] % 70 == 0:
        slow()
    if os.path.exists(out + ".order"):
        fault = Path(out + ".order").read_text()
        os.rename(out + ".order", out + ".taken")
        Path(out + ".at").write_text(str(time.monotonic()))
        faults[fault]()

sys.exit(train(Path(out), *words, callbacks=[act]).code)
"""
LAUNCH = "import sys; from megatoken.launch.local import launch; "
LAUNCH += "sys.exit(launch([sys.executable, *sys.argv[2:]], int(sys.argv[1]), 3))"
HANGS = "sleep", "stop", "regex", "collective", "read"


class Run:
    """A run whose launcher's messages are kept with the time they came."""

    def __init__(self, out: Path, data: str, nproc: int, *settings: str) -> None:
        self.out, self.lines = out, list[tuple[float, str]]()
        words = [data, "evaluate.every=0 machine.micro_batch=2", *settings]
        command = [sys.executable, "-c", LAUNCH, str(nproc), "-c", RANK, str(out), *words]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.lines.append((time.monotonic(), line))

    def steps(self) -> list[int]:
        return list(read_column(self.out, "loss"))

    def is_training(self, size: int = 0) -> bool:
        """Whether the log has grown beyond `size` bytes by a step."""
        log = self.out / "metrics.jsonl"
        return log.is_file() and b'"kind": "train"' in log.read_bytes()[size:]

    def wait(self, condition: Callable[[], bool], seconds: float = 300.0) -> float:
        """Wait; the time on the monotonic clock."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.02)
        return time.monotonic()

    def file(self, suffix: str) -> Path:
        return Path(f"{self.out}.{suffix}")

    def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal, wait for the launcher, and return its exit code."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait()
        self._reader.join()
        return code


def run_faults(
    folder: Path, data: str, count: int, faults: tuple[str, ...], nproc: int
) -> dict[str, Any]:
    """Cause faults in rank 1 of one run; it is named and all ranks start again each time."""
    out = folder / faults[0]
    os.mkfifo(f"{out}.fifo")
    run = Run(out, data, nproc, "budget.steps=1000000 save.every=10")
    named, again, right = list[float](), list[float](), 0
    run.wait(run.is_training)
    for index in range(count):
        n_lines, first = len(run.lines), run.steps()[-1]
        # The limits of a step are measured again after a start.
        run.wait(lambda first=first: run.steps()[-1] >= first + 5)  # type: ignore[misc]
        run.file("at").unlink(missing_ok=True)
        run.file("order").write_text(faults[index % len(faults)])
        run.wait(lambda: run.file("at").exists() and bool(run.file("at").read_text()))
        start = float(run.file("at").read_text())

        def warnings(n_lines: int = n_lines) -> list[tuple[float, str]]:
            return [(at, line) for at, line in run.lines[n_lines:] if line.startswith("warning: ")]

        run.wait(lambda: bool(warnings()))
        size = (out / "metrics.jsonl").stat().st_size
        again.append(run.wait(lambda size=size: run.is_training(size)) - start)  # type: ignore[misc]
        ((at, line),) = warnings()
        named.append(at - start)
        right += line.startswith("warning: rank 1 ") and " in phase 'step' after step " in line
    stopped = run.end(signal.SIGTERM) == ExitCode.STOPPED
    times = {"named_seconds": spread(named), "training_again_seconds": spread(again)}
    return {"faults": count, "right_rank_and_phase": right, "stopped": stopped, **times}


def run_slow(folder: Path, data: str, count: int, parallel: int) -> dict[str, Any]:
    """Make steps that take half their limit, each after as many short ones as it remembers."""
    slow = -(-count // parallel)

    def run_one(index: int) -> int:
        out = folder / f"slow-{index}"
        Path(f"{out}.slow").touch()
        run = Run(out, data, 2, f"budget.steps={70 * slow + 1} save.every=0")
        assert run.end() == ExitCode.DONE, run.lines
        kills = sum(line.startswith("warning: ") for _, line in run.lines)
        return kills + (len(run.steps()) != 70 * slow + 1)

    with ThreadPoolExecutor(parallel) as pool:
        kills = sum(pool.map(run_one, range(parallel)))
    return {"slow_steps": slow * parallel, "false_kills": kills}


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return (
        {"median": round(ordered[len(ordered) // 2], 2), "largest": round(ordered[-1], 2)}
        if ordered
        else {}
    )


def main() -> int:
    counts = {"kills": 40, "hangs": 100, "slow": 1000}
    options = parse_options(__doc__, **counts, parallel=4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_shards(folder / "data")
        answer = {
            "kills": run_faults(folder, data, options.kills, ("kill",), 2),
            "hangs": run_faults(folder, data, options.hangs, HANGS, 3),
            "slow": run_slow(folder, data, options.slow, options.parallel),
            "orphans": len(find_processes(name)),
        }
    is_good = (
        answer["kills"]["right_rank_and_phase"] == options.kills
        and answer["hangs"]["right_rank_and_phase"] == options.hangs
        and not answer["slow"]["false_kills"]
        and not answer["orphans"]
    )
    return report("launch", is_good, **answer)


if __name__ == "__main__":
    sys.exit(main())
