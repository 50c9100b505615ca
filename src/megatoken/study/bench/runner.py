"""Run worker processes in interleaved rounds, so that all see the same state of the machine.

Each worker is a process with its own allocator, threads and compiler; only one computes at a time.
"""

import multiprocessing
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatoken.base.console import Console
from megatoken.base.system.device import Device
from megatoken.base.system.environment import given_environment
from megatoken.base.system.metrics_log import Row
from megatoken.base.system.timing import Timing
from megatoken.distributed.local_launch import find_free_port
from megatoken.model.flops import describe_mfu
from megatoken.study.bench.worker import WorkerSpec, serve

WARMUP_STEPS = 2  # the first compiles and allocates, the second shows how long a step takes
ROUND_SECONDS = 0.5  # target length of the reference's round
MOST_STEPS = 20  # per round
STOP_SECONDS = 10.0  # for a worker to end once its connection is closed
SPAWN = multiprocessing.get_context("spawn")


@dataclass(kw_only=True)
class Worker:
    """A worker process and its measurements. If it fails, `skipped` holds the reason.

    seconds: mean step time of each round. loss: the loss after `steps` steps.
    """

    spec: WorkerSpec
    seconds: list[float] = field(default_factory=list)
    chosen: str = ""
    first_step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    loss: float | None = None
    steps: int = 0
    skipped: str = ""
    processes: list[BaseProcess] = field(default_factory=list)
    _connections: list[Connection] = field(default_factory=list)
    _log: Any = None  # temporary file with the output

    def warm_up(self) -> float | None:
        """Start the process and run untimed steps.

        Return the seconds of the last one, or None on failure.
        """
        self._start()
        built = self._receive()
        if built is None:
            return None
        result = self._request_steps(WARMUP_STEPS)
        if result is None:
            return None
        self.chosen = built["chosen"]
        self.first_step_seconds = built["tuning_seconds"] + result["seconds"][0]
        return float(result["seconds"][-1])

    def run_round(self, steps: int) -> float | None:
        """Run `steps` timed steps; return the mean seconds per step, or None on failure.

        A round of several steps starts with an untimed step, because the caches are cold. On CUDA,
        a round of one step does too, because each round frees its memory for the next worker.
        """
        if self.skipped:
            return None
        untimed = int(steps > 1 or self.spec.device.startswith("cuda"))
        result = self._request_steps(steps + untimed)
        if result is None:
            return None
        self.seconds.append(sum(result["seconds"][untimed:]) / steps)
        self.peak_memory_bytes = result["peak_memory_bytes"]
        self.loss = result["loss"]
        return self.seconds[-1]

    def describe(self, device: Device) -> Row:
        """Build the record's row of measurements, with None for what was not measured."""
        measures = ("first_step_seconds", "peak_memory_bytes", "loss", "steps")
        rates = ("tokens_per_second", "best", "mfu", "mfu_causal", "seconds")
        row: Row = dict.fromkeys((*rates, *measures))
        row |= {"chosen": self.chosen, "skipped": self.skipped or None}
        if not self.seconds or self.skipped:
            return row
        tokens = self.spec.batch_tokens
        timing = Timing(tuple(self.seconds))
        n_peaks = self.spec.nproc if device.type == "cuda" else 1
        row |= {name: getattr(self, name) for name in measures}
        row["tokens_per_second"] = timing.rate(tokens)
        row["best"] = tokens / timing.best
        row["seconds"] = timing.median
        speed = tokens / timing.median
        return row | describe_mfu(speed, self.spec.model_config, n_peaks * device.peak_flops)

    def close(self) -> None:
        """Close the connections so that the processes end; terminate those that do not."""
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.join(STOP_SECONDS)
            process.terminate()
            process.join()
        if self._log:
            self._log.close()
        self.processes = []
        self._connections = []

    def _start(self) -> None:
        if self.spec.nproc > 1:
            self.spec = replace(self.spec, port=find_free_port())
        self._log = tempfile.NamedTemporaryFile(prefix="megatoken-bench-")  # noqa: SIM115
        for rank in range(self.spec.nproc):
            ours, theirs = SPAWN.Pipe()
            spec = replace(self.spec, rank=rank)
            arguments = (theirs, spec, self._log.name, given_environment())
            process = SPAWN.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(ours)

    def _request_steps(self, steps: int) -> Row | None:
        for connection in self._connections:
            with suppress(OSError):  # the process has died; `_receive` reports it
                connection.send(steps)
        self.steps += steps
        return self._receive()

    def _receive(self) -> Row | None:
        """Return rank 0's result, or None if any rank failed."""
        results: list[Row] = []
        for process, connection in zip(self.processes, self._connections, strict=True):
            try:
                results.append(connection.recv())
            except (EOFError, OSError):
                results.append({"failed": self._find_cause(process)})
            if "failed" in results[-1]:
                self.skipped = results[-1]["failed"]
                self.close()
                return None
        return results[0]

    def _find_cause(self, process: BaseProcess) -> str:
        process.join()
        if process.exitcode == -signal.SIGKILL:
            return "its process was killed (out of memory?)"
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        return ": ".join([f"its process ended with code {process.exitcode}", *lines[-1:]])


def count_steps(seconds: float) -> int:
    """Return the number of steps per round, if a step takes `seconds`."""
    return min(max(round(ROUND_SECONDS / seconds), 1), MOST_STEPS)


def run_rounds(
    reference: Worker | None, worker: Worker, repeats: int, steps: int, console: Console
) -> None:
    """Run `repeats` rounds of a worker, each after a round of the reference if there is one.

    steps: timed steps per round.
    """
    for number in range(repeats):
        console.step(f"{worker.spec.configuration}: round {number + 1} of {repeats}")
        if reference is not None:
            reference.run_round(steps)
        worker.run_round(steps)
