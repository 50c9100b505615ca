"""Time several workers in rounds, and probe how fast the processor is at that moment.

On a CPU, a matmul is timed between rounds, because other programs and power limits change the
speed. A round before or after a slow probe counts as disturbed.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console
from megatoken.base.system.device import Device, open_device
from megatoken.base.system.metrics_log import Row
from megatoken.base.system.timing import Timing, time_once
from megatoken.model.flops import describe_mfu
from megatoken.plan.tuning.peak import product_calls, random_square
from megatoken.study.bench.runner import Worker, count_steps
from megatoken.study.bench.worker import WorkerSpec

DISTURBED = 0.85  # a round is disturbed if its slowest probe is below this share of the fastest
PROBE_SIZE = 1024
PROBE_CALLS = 6


def probe_flops(device: Device) -> float:
    """Return the FLOP/s that the device reaches now, measured for a few milliseconds."""
    square = random_square(device, PROBE_SIZE)
    call = product_calls(square, square)["torch"]
    call()
    seconds = sum(time_once(call, device.synchronize) for _ in range(PROBE_CALLS))
    return PROBE_CALLS * 2.0 * PROBE_SIZE**3 / seconds


@dataclass(kw_only=True)
class ProbedWorker(Worker):
    """A worker with the speed of the processor in its rounds.

    ratios: speed relative to the reference worker in the same rounds. probes: for each round,
    FLOP/s of the slowest probe next to it.
    """

    ratios: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    fastest_probe: ClassVar[float] = 0.0  # of all workers

    def select_undisturbed(self, values: Sequence[float]) -> tuple[float, ...]:
        """Select the values (one per round) of undisturbed rounds; all if there are no probes."""
        if not self.probes:
            return tuple(values)
        limit = DISTURBED * self.fastest_probe
        rounds = zip(values, self.probes, strict=False)
        return tuple(value for value, probe in rounds if probe >= limit)

    def describe(self, device: Device) -> Row:
        """Build the record's row of measurements, with None for what was not measured.

        mfu_probe is relative to the median probe. undisturbed: tokens/s in undisturbed rounds.
        """
        row = super().describe(device)
        row |= dict.fromkeys(("undisturbed", "probe_flops", "mfu_probe"))
        undisturbed = self.select_undisturbed(self.seconds)
        if self.probes and undisturbed and not self.skipped:
            row["undisturbed"] = Timing(undisturbed).rate(self.spec.batch_tokens)
            row["probe_flops"] = median(self.probes)
            speed = row["tokens_per_second"]["median"]
            row["mfu_probe"] = describe_mfu(speed, self.spec.model_config, row["probe_flops"])[
                "mfu"
            ]
        return row


def run_rounds(
    reference: ProbedWorker | None, worker: ProbedWorker, repeats: int, steps: int, console: Console
) -> None:
    """Run `repeats` rounds of a worker, each after a round of the reference if there is one.

    steps: timed steps per round.
    """
    device = open_device(MachineConfig(device=worker.spec.device))
    workers = [worker] if reference is None else [reference, worker]
    probe = _probe(device)
    label = f"{worker.spec.name} {worker.spec.configuration}"
    for number in range(repeats):
        console.step(f"{label}: round {number + 1} of {repeats}")
        probes = [probe]
        seconds = []
        for timed_worker in workers:
            seconds.append(timed_worker.run_round(steps))
            probe = _probe(device)
            probes.append(probe)
        slowest = min(probes)
        ProbedWorker.fastest_probe = max(ProbedWorker.fastest_probe, slowest)
        for timed_worker, step_seconds in zip(workers, seconds, strict=True):
            if step_seconds and probe:
                timed_worker.probes.append(slowest)
        first, last = seconds[0], seconds[-1]
        if len(workers) == 2 and first and last:
            worker.ratios.append(first / last)


def _probe(device: Device) -> float:
    return probe_flops(device) if device.type == "cpu" else 0.0


def measure_workers(
    specs: Sequence[WorkerSpec], repeats: int, console: Console
) -> Iterator[list[ProbedWorker]]:
    """Measure each spec; after each, yield the workers so far.

    The reference is the first spec that runs. It is measured alone, then in rounds that alternate
    with rounds of each other spec. Its reported loss is that after its first rounds, when it
    has taken as many steps as the others.
    """
    workers: list[ProbedWorker] = []
    reference: ProbedWorker | None = None
    loss: float | None = None
    steps = trained = 0
    with ExitStack() as stack:
        stack.callback(console.close)
        for spec in specs:
            worker = ProbedWorker(spec=spec)
            stack.callback(worker.close)
            workers.append(worker)
            console.step(f"{spec.name} {spec.configuration}: first steps")
            if seconds := worker.warm_up():
                steps = steps or count_steps(seconds)
                run_rounds(reference, worker, repeats, steps, console)
            if reference is not None:
                worker.close()
                reference.loss, reference.steps = loss, trained
            elif worker.loss is not None:
                reference, loss, trained = worker, worker.loss, worker.steps
            yield workers
