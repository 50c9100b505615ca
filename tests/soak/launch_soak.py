"""Stop signals, killed and hung ranks, slow steps and crash loops of a tiny job that the launcher watches.

    python -m tests.soak.launch_soak --signals 100 --kills 40 --hangs 100 --slow 1000 --loops 10

Prints one JSON line at the end. A callback of rank 1 does what a file asks for, in the middle of training; times are
seconds from there to the line that names the rank, and to the next step that is trained.
"""

import argparse
import json
import os
import random
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

from benchmarks.ranks_race import write_data
from megatoken.checkpoint.commit import list_steps
from megatoken.errors import ExitCode
from megatoken.system.metrics_log import read_metrics
from tests.distributed.test_training import FIXED
from tests.processes import find_processes

# A rank of a run. `out.order`, read by rank 1 after a step, names a fault; `out.at` is when it began.
RANK = r"""
import os, re, signal, sys, time
from pathlib import Path
import torch.distributed
from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.train.train import Trainer

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
    "abort": os.abort,
}

def act(row):
    if row["kind"] != "train" or os.environ["RANK"] != "1":
        return
    if os.path.exists(out + ".slow") and row["step"] % 70 == 0:
        slow()
    if os.path.exists(out + ".order"):
        fault = Path(out + ".order").read_text()
        if fault != "abort":
            os.rename(out + ".order", out + ".taken")
        Path(out + ".at").write_text(str(time.monotonic()))
        faults[fault]()

sys.exit(Trainer(resolve("quickstart", words), out, callbacks=[act], console=Console(quiet=True)).fit().code)
"""
LAUNCH = "import sys; from megatoken.launch.local import launch; "
LAUNCH += "sys.exit(launch([sys.executable, *sys.argv[2:]], int(sys.argv[1]), 3))"
HANGS = "sleep", "stop", "regex", "collective", "read"
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2


class Run:
    """A run whose launcher's messages are kept with the time they came."""

    def __init__(self, out: Path, data: Path, nproc: int, *words: str) -> None:
        self.out, self.lines = out, list[tuple[float, str]]()
        given = [
            f"data.path={data}",
            *FIXED,
            "log.every=1",
            "evaluate.every=0",
            "machine.micro_batch=2",
            *words,
        ]
        command = [sys.executable, "-c", LAUNCH, str(nproc), "-c", RANK, str(out), *given]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.lines.append((time.monotonic(), line))

    def steps(self) -> list[int]:
        return [row["step"] for row in read_metrics(self.out) if row["kind"] == "train"]

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


def run_signals(folder: Path, data: Path, count: int, rng: random.Random) -> dict[str, Any]:
    """One run, stopped at random moments by each signal in turn, and resumed."""
    out, seconds, no_step_lost, orphans = folder / "signals", [], 0, 0
    for index in range(count):
        done = list_steps(out / "checkpoints")[-1:]
        run = Run(out, data, 2, "budget.steps=1000000", "save.every=25")
        size = (out / "metrics.jsonl").stat().st_size if done else 0
        run.wait(lambda run=run, size=size: run.is_training(size))  # type: ignore[misc]
        time.sleep(rng.uniform(0, 1.0))
        start = time.monotonic()
        code = run.end(SIGNALS[index % len(SIGNALS)])
        seconds.append(time.monotonic() - start)
        no_step_lost += (
            code == ExitCode.STOPPED and list_steps(out / "checkpoints")[-1] == run.steps()[-1]
        )
        orphans += len(find_processes(str(out)))
    return {
        "signals": count,
        "no_step_lost": no_step_lost,
        "orphans": orphans,
        "seconds": spread(seconds),
    }


def run_faults(
    folder: Path, data: Path, count: int, faults: tuple[str, ...], nproc: int
) -> dict[str, Any]:
    """One run of `nproc` ranks; rank 1 does one fault after another, and is named and started again each time."""
    out = folder / faults[0]
    os.mkfifo(f"{out}.fifo")
    run, named, right, again = (
        Run(out, data, nproc, "budget.steps=1000000", "save.every=10"),
        [],
        0,
        [],
    )
    run.wait(run.is_training)
    for index in range(count):
        seen, fault = len(run.lines), faults[index % len(faults)]
        first = run.steps()[-1]
        run.wait(lambda first=first: run.steps()[-1] >= first + 5)  # type: ignore[misc]  # limits are measured again
        run.file("at").unlink(missing_ok=True)
        run.file("order").write_text(fault)
        run.wait(lambda: run.file("at").exists() and bool(run.file("at").read_text()))
        at = float(run.file("at").read_text())

        def warnings(seen: int = seen) -> list[tuple[float, str]]:
            return [(when, line) for when, line in run.lines[seen:] if line.startswith("warning: ")]

        run.wait(lambda: bool(warnings()))
        size = (out / "metrics.jsonl").stat().st_size
        again.append(run.wait(lambda size=size: run.is_training(size)) - at)  # type: ignore[misc]
        ((when, line),) = warnings()
        named.append(when - at)
        right += line.startswith("warning: rank 1 ") and " in phase 'step' after step " in line
    code = run.end(signal.SIGTERM)
    return {
        "faults": count,
        "right_rank_and_phase": right,
        "named_seconds": spread(named),
        "training_again_seconds": spread(again),
        "stopped": code == ExitCode.STOPPED,
        "orphans": len(find_processes(str(out))),
    }


def run_slow(folder: Path, data: Path, count: int, parallel: int) -> dict[str, Any]:
    """Steps that take half their limit, each after as many short ones as the limit remembers, in several runs."""

    def run_one(index: int) -> tuple[int, int]:
        out, slow = folder / f"slow-{index}", -(-count // parallel)
        Path(f"{out}.slow").touch()
        run = Run(out, data, 2, f"budget.steps={70 * slow + 1}", "save.every=0")
        code = run.end()
        assert code == ExitCode.DONE, run.lines
        rows = [row for row in read_metrics(out) if row["kind"] == "train"]
        return slow, sum(line.startswith("warning: ") for _, line in run.lines) + (
            len(rows) != 70 * slow + 1
        )

    with ThreadPoolExecutor(parallel) as pool:
        results = list(pool.map(run_one, range(parallel)))
    return {
        "slow_steps": sum(slow for slow, _ in results),
        "false_kills": sum(kills for _, kills in results),
    }


def run_loops(folder: Path, data: Path, count: int) -> dict[str, Any]:
    """Runs that abort after their first step, every time they are started."""
    ended, starts = 0, set()
    for index in range(count):
        out = folder / f"loop-{index}"
        Path(f"{out}.order").write_text("abort")
        run = Run(out, data, 2, "budget.steps=100", "save.every=0")
        code, (*warnings, error) = (
            run.end(),
            [line for _, line in run.lines if " was killed by SIGABRT " in line],
        )
        starts.add(1 + len(warnings))
        ended += (
            code == ExitCode.PEER
            and error.startswith("error: rank 1 ")
            and "3 restarts brought no" in error
        )
    return {
        "loops": count,
        "ended": ended,
        "starts": sorted(starts),
        "orphans": len(find_processes(str(folder))),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return (
        {"median": round(ordered[len(ordered) // 2], 2), "largest": round(ordered[-1], 2)}
        if ordered
        else {}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, count in {
        "signals": 100,
        "kills": 40,
        "hangs": 100,
        "slow": 1000,
        "loops": 10,
        "parallel": 4,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder)
        answer: dict[str, Any] = {"soak": "launch"}
        if options.signals:
            answer["signals"] = run_signals(
                folder, data, options.signals, random.Random(options.seed)
            )
        if options.kills:
            answer["kills"] = run_faults(folder, data, options.kills, ("kill",), 2)
        if options.hangs:
            answer["hangs"] = run_faults(folder, data, options.hangs, HANGS, 3)
        if options.slow:
            answer["slow"] = run_slow(folder, data, options.slow, options.parallel)
        if options.loops:
            answer["loops"] = run_loops(folder, data, options.loops)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
