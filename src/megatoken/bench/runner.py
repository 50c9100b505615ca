"""Worker processes that take turns, so that those compared see the same minutes of the machine.

A worker is a process of its own: no allocator, thread pool or compiler reaches another. One computes at a time. On a
CPU a product of this process is timed between turns: it shows what the processor gives just now, which neighbours,
power and the two speeds of AMX change. Rounds in which it was slow count as disturbed.
"""

import json
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import IO, Any

from megatoken.bench.spec import OURS, WorkerSpec
from megatoken.bench.workload import describe_mfu
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.launch.local import find_free_port
from megatoken.system.device import Device, open_device, probe_flops
from megatoken.system.environment import given_environment, python_command
from megatoken.system.timing import Timing

WARMUP_STEPS = (
    2  # untimed: the first compiles and allocates, the second shows how long a step takes
)
ROUND_SECONDS = (
    0.5  # about the length of the reference's round; every worker's rounds have as many steps
)
MOST_STEPS = 20  # of a round
DISTURBED = 0.85  # of the fastest probe: a round with a slower one beside it is disturbed
COMMAND = python_command("from megatoken.bench.worker import main; main()")


@dataclass(slots=True, kw_only=True)
class Worker:
    """A worker process and its measurements.

    seconds: of a step, the mean of each round; ratios: speed over the reference's in the same rounds; probes: FLOP/s of
    the slowest probe beside each round; loss: after `steps` steps; skipped: why it was not measured or failed. Nothing
    is raised for a worker that fails.
    """

    spec: WorkerSpec
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    fastest_probe: float = 0.0  # of the bench
    chosen: str = ""
    first_step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    loss: float | None = None
    steps: int = 0
    skipped: str = ""
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _stderr: IO[bytes] | None = None

    def warm_up(self) -> float | None:
        """Start the process, build and take the untimed steps; return the seconds of the last, None on failure."""
        self._start()
        built = self._ask(
            *(replace(self.spec, rank=rank).to_json() for rank in range(self.spec.nproc))
        )
        answer = built and self._ask(*[str(WARMUP_STEPS)] * self.spec.nproc)
        if not built or not answer:
            return None
        self.steps, self.chosen = WARMUP_STEPS, built["chosen"]
        self.first_step_seconds = built["tuning_seconds"] + answer["seconds"][0]
        return float(answer["seconds"][-1])

    def run_round(self, steps: int) -> float | None:
        """Take `steps` timed steps; return the mean seconds of one, None on failure.

        An untimed step precedes short ones: the other worker has emptied the caches.
        """
        untimed = int(steps > 1)
        answer = self._ask(*[str(steps + untimed)] * self.spec.nproc)
        if not answer:
            return None
        self.steps += steps + untimed
        self.seconds.append(sum(answer["seconds"][untimed:]) / steps)
        self.peak_memory_bytes, self.loss = answer["peak_memory_bytes"], answer["loss"]
        return self.seconds[-1]

    def undisturbed(self, values: Sequence[float]) -> tuple[float, ...]:
        """Of a value for each round those of the rounds that nothing disturbed; all where nothing was probed."""
        if not self.probes:
            return tuple(values)
        least = DISTURBED * self.fastest_probe
        return tuple(
            value for value, probe in zip(values, self.probes, strict=False) if probe >= least
        )

    def describe(self, device: Device) -> dict[str, Any]:
        """The measurements as a record's row has them; None where there are none.

        MFU is against `device`'s peak, mfu_probe against the probes beside the rounds; undisturbed: these rounds' rate.
        """
        row: dict[str, Any] = dict.fromkeys(
            ("tokens_per_second", "best", "mfu", "mfu_causal", "seconds")
        )
        row |= dict.fromkeys(("undisturbed", "probe_flops", "mfu_probe"))
        measured = self.seconds and not self.skipped
        if measured:
            timing, peaks = (
                Timing(tuple(self.seconds)),
                self.spec.nproc if device.type == "cuda" else 1,
            )
            rate = timing.rate(self.spec.batch_tokens)
            row |= {
                "tokens_per_second": rate,
                "best": self.spec.batch_tokens / timing.best,
                "seconds": timing.median,
            }
            row |= describe_mfu(rate["median"], self.spec.model_config, device, peaks)
            if self.probes and (seconds := self.undisturbed(self.seconds)):
                row["undisturbed"] = Timing(seconds).rate(self.spec.batch_tokens)
                row["probe_flops"] = median(self.probes)
                probed = replace(device, peak_flops=row["probe_flops"])
                row["mfu_probe"] = describe_mfu(rate["median"], self.spec.model_config, probed)[
                    "mfu"
                ]
        for name in ("first_step_seconds", "peak_memory_bytes", "loss", "steps"):
            row[name] = getattr(self, name) if measured else None
        return row | {"chosen": self.chosen, "skipped": self.skipped or None}

    def close(self) -> None:
        """End the processes, in whatever state they are."""
        for process in self.processes:
            process.terminate()
            with suppress(BrokenPipeError):
                process.communicate()
        self.processes = []
        if self._stderr is not None:
            self._stderr.close()

    def _start(self) -> None:
        spec = self.spec = replace(self.spec, port=find_free_port() if self.spec.nproc > 1 else 0)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self.processes = [
            subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=self._stderr,
                text=True,
                env=None if spec.name == OURS and spec.prepared else given_environment(),
            )
            for rank in range(spec.nproc)
        ]

    def _ask(self, *lines: str) -> dict[str, Any] | None:
        """Send each process its line; return the first one's answer. None ends the worker: `skipped` says why."""
        for process, line in zip(self.processes, lines, strict=True):
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: no answer comes
                process.stdin.write(line + "\n")
                process.stdin.flush()
        assert self.processes[0].stdout is not None
        answer = self.processes[0].stdout.readline()
        values: dict[str, Any] = json.loads(answer) if answer else {"failed": self._find_cause()}
        if "failed" not in values:
            return values
        self.skipped = values["failed"]
        self.close()
        return None

    def _find_cause(self) -> str:
        assert self._stderr is not None
        code = self.processes[0].wait()
        if code == -9:  # SIGKILL, which Windows does not name
            return "its process was killed (out of memory?)"
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().rpartition("\n")[2].strip()
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"its process {how}" + (f": {last}" if last else "")


def count_steps(seconds: float) -> int:
    """Steps of a round where one takes so many seconds."""
    return min(max(round(ROUND_SECONDS / seconds), 1), MOST_STEPS)


def run_rounds(
    reference: Worker | None, worker: Worker, repeats: int, steps: int, console: Console
) -> None:
    """Take `repeats` rounds of a worker, in turn with its reference; `ratios` are to that one's speed in the round."""
    device = open_device(MachineConfig(device=worker.spec.device))

    def probe() -> float:
        return probe_flops(device) if device.type == "cpu" else 0.0

    last = probe()
    for number in range(repeats):
        console.step(
            f"{worker.spec.name} {worker.spec.configuration}: round {number + 1} of {repeats}"
        )
        probes, before, seconds = [last], None, None
        if reference and not reference.skipped:
            before = reference.run_round(steps)
            probes.append(probe())
        if not worker.skipped:
            seconds = worker.run_round(steps)
            probes.append(probe())
        last = probes[-1]
        if last and before and reference:
            reference.probes.append(min(probes))
        if last and seconds:
            worker.probes.append(min(probes))
        if before and seconds:
            worker.ratios.append(before / seconds)
    mark_fastest_probe([worker, *([reference] if reference else [])])


def mark_fastest_probe(workers: Sequence[Worker]) -> None:
    """Tell each worker the fastest probe of all, against which rounds count as disturbed."""
    fastest = max((probe for worker in workers for probe in worker.probes), default=0.0)
    for worker in workers:
        worker.fastest_probe = fastest


def measure_workers(specs: Sequence[WorkerSpec], repeats: int, console: Console) -> list[Worker]:
    """Measure every spec in turn with the first that runs, whose loss is of as many steps as the others'."""
    workers = [Worker(spec=spec) for spec in specs]
    reference, loss, trained = None, None, 0
    with ExitStack() as stack:
        stack.callback(console.close)
        for worker in workers:
            stack.callback(worker.close)
            console.step(f"{worker.spec.name} {worker.spec.configuration}: first steps")
            seconds = worker.warm_up()
            if reference is None and seconds:
                reference, steps = worker, count_steps(seconds)
            elif reference is not None and seconds:
                run_rounds(reference, worker, repeats, steps, console)
                loss, trained = loss or reference.loss, trained or reference.steps
                worker.close()
        if reference is not None and not reference.seconds:
            run_rounds(None, reference, repeats, steps, console)
            loss, trained = reference.loss, reference.steps
    if reference is not None:
        reference.loss, reference.steps = loss, trained
    mark_fastest_probe(workers)
    return workers
