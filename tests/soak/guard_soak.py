"""Bad batches, spikes, flipped bits of replicas and slow ranks, at random.

    python -m tests.soak.guard_soak --nan 60 --spike 30 --flip 100 --slow 20 --clean 10

Runs of a tiny model on the CPU, one thread a process. A bad batch or a skipped spike must end with
the bits of a run that lacked this batch from the start; a flipped bit must be found, its rank
named, and the run end with the bits of an undisturbed one; a slow rank must be named with its
phase, and a clean run name none. Prints one JSON line at the end.
"""

import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak.options import parse_options, report
from tests.tiny_run import read_events, write_shards
from tests.train.faulty_run import Job, count_false_alarms, final_bits, run_jobs

LAYOUTS = {
    "": 1,
    "machine.adamw=loop": 1,
    "machine.sharding=none": 2,
    "machine.sharding=none machine.adamw=loop": 2,
    "machine.sharding=none machine.micro_batch=4": 3,
    "machine.sharding=zero1": 2,
    "machine.sharding=zero3": 2,
    "machine.sharding=zero3 machine.adamw=loop": 2,
    "machine.tensor_parallel=2": 2,
}
AT_ONCE = 10  # cases that share their processes, which start slowly


@dataclass(frozen=True)
class Case:
    """A run with a fault, and the run that it must equal, if any."""

    kind: str
    nproc: int
    job: Job
    twin: Job | None = None


def make_case(kind: str, name: str, rng: random.Random) -> Case:
    """Return a case of a kind: nan, spike, flip, slow or clean."""
    if kind == "nan":
        settings = rng.choice(list(LAYOUTS))
        nproc = LAYOUTS[settings]
        batches = tuple(sorted(rng.sample(range(12), rng.randint(1, 2))))
        late = settings == "machine.sharding=none" and rng.random() < 0.5
        where: dict[str, Any] = {"rank": rng.randrange(nproc), "batches": batches, "late": late}
        job = Job(name=name, settings=settings, fault="nan", **where)
        return Case(kind, nproc, job, Job(name=f"{name}-twin", settings=settings, skipped=batches))
    if kind == "spike":
        settings = "budget.steps=100 optim.warmup=0 optim.lr=1e-3 optim.spike=skip save.every=0"
        batches = (rng.randrange(64, 100),)
        job = Job(name=name, settings=settings, fault="spike", rank=0, batches=batches)
        return Case(kind, 1, job, Job(name=f"{name}-twin", settings=settings, skipped=batches))
    if kind == "flip":
        where = {"tensor": rng.randrange(1000), "bit": rng.randrange(1 << 30)}
        where |= {"rank": rng.randrange(3), "batches": (rng.randrange(5, 12),)}
        return Case(kind, 3, Job(name=name, fault="flip", **where), Job(name="flip-twin"))
    settings = "budget.steps=101 machine.micro_batch=6 save.every=0"
    if kind == "clean":
        return Case(kind, 2, Job(name=name, settings=settings))
    fault = rng.choice(["slow_data", "slow_compute"])
    where = {"rank": rng.randrange(2), "batches": (rng.randrange(20),), "seconds": 0.05}
    return Case(kind, 2, Job(name=name, settings=settings, fault=fault, **where))


def judge(case: Case, answer: dict[str, Any], folder: Path) -> list[str]:
    """Return what is wrong with a case."""
    job, out = case.job, folder / case.job.name
    if answer["code"]:
        return [str(answer)]
    wrong = []
    if case.twin is not None and final_bits(out) != final_bits(folder / case.twin.name):
        wrong.append("other bits than without the fault")
    skipped = [row["batch"] for row in read_events(out, "batch skipped")]
    if case.kind in ("nan", "spike") and skipped != list(job.batches):
        wrong.append(f"skipped: {skipped}")
    ranks = [row["ranks"] for row in read_events(out, "replicas differ")]
    if case.kind == "flip" and ranks != [[job.rank]]:
        wrong.append(f"replicas differ: {ranks}")
    slow = [(row["rank"], row["phase"]) for row in read_events(out, "slow rank")]
    is_named = (job.rank, job.fault.removeprefix("slow_")) in slow
    if (case.kind == "clean" and slow) or (case.kind == "slow" and not is_named):
        wrong.append(f"slow: {slow}")
    return wrong


def run_cases(cases: Sequence[Case], data: str) -> Iterator[list[str]]:
    """Run cases of one number of processes in the same processes; yield what is wrong with each."""
    jobs = {job.name: job for case in cases for job in (case.job, case.twin) if job is not None}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers = run_jobs(list(jobs.values()), data, folder, cases[0].nproc)
        for case in cases:
            yield judge(case, answers[case.job.name], folder)


def main() -> int:
    counts = {"nan": 60, "spike": 30, "flip": 100, "slow": 20, "clean": 10}
    options = parse_options(__doc__, **counts, steps=100_000, seed=0)
    groups = defaultdict(list)
    for kind in counts:
        rng = random.Random(f"{options.seed} {kind}")
        for index in range(getattr(options, kind)):
            case = make_case(kind, f"{kind}-{index}", rng)
            groups[kind, case.nproc].append(case)
    wrong: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        data = write_shards(Path(name))
        for cases in groups.values():
            for first in range(0, len(cases), AT_ONCE):
                batch = cases[first : first + AT_ONCE]
                for case, problems in zip(batch, run_cases(batch, data), strict=True):
                    if problems:
                        wrong[case.job.name] = problems
    spikes = count_false_alarms(options.steps, options.seed)
    answer = {"options": vars(options), "false_spikes": spikes, "wrong": wrong}
    return report("guard", not wrong and not spikes, **answer)


if __name__ == "__main__":
    sys.exit(main())
