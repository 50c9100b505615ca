"""Bad batches, spikes, flipped bits of replicas and slow ranks, at random. Prints one JSON line at the end.

    python -m tests.soak.guard_soak --nans 60 --spikes 30 --flips 100 --slow 20 --clean 10 --folder runs/guard-soak

Runs of a tiny model on the CPU, one thread a process. A bad batch or a skipped spike must end with the bits of a run
that lacked this batch from the start; a flipped bit must be found, its rank named, and the run end with the bits of an
undisturbed one; a slow rank must be named with its phase, and a clean run name none. Every answer is kept in
`folder/answers.jsonl`: started again, the program goes on with the cases that are left.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.train.faulty_run import (
    Job,
    count_false_alarms,
    events,
    final_bits,
    run_jobs,
    write_recipe,
)

LAYOUTS = {
    "one": (1, ()),
    "one-loop": (1, ("machine.adamw=loop",)),
    "ddp": (2, ()),
    "ddp-loop": (2, ("machine.adamw=loop",)),
    "ddp-3": (3, ()),
    "zero1": (2, ("machine.sharding=zero1",)),
    "zero3": (2, ("machine.sharding=zero3",)),
    "zero3-loop": (2, ("machine.sharding=zero3", "machine.adamw=loop")),
    "tensor": (2, ("machine.tensor_parallel=2",)),
}
AT_ONCE = 10  # cases that share their processes, which start slowly


@dataclass(frozen=True)
class Case:
    """A run with a fault, and the run that it must equal, if any."""

    kind: str
    nproc: int
    job: Job
    twin: Job | None = None


def list_cases(counts: dict[str, int], seed: int) -> Iterator[Case]:
    """All cases, the same ones for the same seed, whatever the other counts are."""
    for kind, count in counts.items():
        rng = random.Random(f"{seed} {kind}")
        for index in range(count):
            yield make_case(kind, f"{kind}-{index}", rng)


def make_case(kind: str, name: str, rng: random.Random) -> Case:
    """One case of a kind: nan, spike, flip, slow or clean."""
    if kind == "nan":
        nproc, words = LAYOUTS[rng.choice(list(LAYOUTS))]
        batches = tuple(sorted(rng.sample(range(12), rng.randint(1, 2))))
        late = nproc > 1 and not words and rng.random() < 0.5
        job = Job(
            name=name,
            words=words,
            fault="nan",
            rank=rng.randrange(nproc),
            batches=batches,
            late=late,
        )
        return Case(kind, nproc, job, Job(name=f"{name}-twin", words=words, skipped=batches))
    if kind == "spike":
        words = (
            "budget.steps=100",
            "optim.warmup=0",
            "optim.lr=1e-3",
            "optim.spike=skip",
            "save.every=0",
        )
        batches = (rng.randrange(64, 100),)
        job = Job(name=name, words=words, fault="spike", rank=0, batches=batches)
        return Case(kind, 1, job, Job(name=f"{name}-twin", words=words, skipped=batches))
    if kind == "flip":
        where: dict[str, Any] = {"tensor": rng.randrange(1000), "bit": rng.randrange(1 << 30)}
        job = Job(
            name=name, fault="flip", rank=rng.randrange(3), batches=(rng.randrange(5, 12),), **where
        )
        return Case(kind, 3, job, Job(name="flip-twin"))
    words = ("budget.steps=101", "machine.micro_batch=6", "save.every=0")
    if kind == "clean":
        return Case(kind, 2, Job(name=name, words=words))
    fault = rng.choice(["slow_data", "slow_compute"])
    job = Job(
        name=name,
        words=words,
        fault=fault,
        rank=rng.randrange(2),
        batches=(rng.randrange(20),),
        seconds=0.05,
    )
    return Case(kind, 2, job)


def judge(case: Case, answers: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    """What is wrong with a case: nothing, if all is well."""
    job, out = case.job, folder / case.job.name
    wrong = [] if answers[job.name] == {"code": 0, "error": ""} else [str(answers[job.name])]
    if (
        not wrong
        and case.twin is not None
        and final_bits(out) != final_bits(folder / case.twin.name)
    ):
        wrong.append("other bits than without the fault")
    if case.kind in ("nan", "spike") and [
        row["batch"] for row in events(out, "batch skipped")
    ] != list(job.batches):
        wrong.append(f"skipped: {[row['batch'] for row in events(out, 'batch skipped')]}")
    if case.kind == "flip" and [row["ranks"] for row in events(out, "replicas differ")] != [
        [job.rank]
    ]:
        wrong.append(
            f"replicas differ: {[row['message'] for row in events(out, 'replicas differ')]}"
        )
    slow = [(row["rank"], row["phase"]) for row in events(out, "slow rank")]
    if case.kind == "clean" and slow:
        wrong.append(f"slow: {slow}")
    if case.kind == "slow" and (job.rank, job.fault.removeprefix("slow_")) not in slow:
        wrong.append(f"slow: {slow}")
    return wrong


def run_cases(cases: Sequence[Case], recipe: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Run cases of one number of processes, in the same processes; yield an answer for each."""
    jobs = {job.name: job for case in cases for job in (case.job, case.twin) if job is not None}
    answers = run_jobs(list(jobs.values()), recipe, folder, cases[0].nproc)
    for case in cases:
        wrong = judge(case, answers, folder)
        yield {"name": case.job.name, "kind": case.kind, "nproc": case.nproc, "wrong": wrong}
    for name in jobs:
        shutil.rmtree(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, count in (("nans", 60), ("spikes", 30), ("flips", 100), ("slow", 20), ("clean", 10)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument(
        "--steps", type=int, default=100_000, help="clean ones, in which spikes are looked for"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="where answers are kept; default: a temporary folder"
    )
    options = parser.parse_args()
    counts = {"nan": options.nans, "spike": options.spikes, "flip": options.flips}
    counts |= {"slow": options.slow, "clean": options.clean}
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "answers.jsonl"
        answers = (
            [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
        )
        done = {answer["name"] for answer in answers}
        left = defaultdict(list)
        for case in list_cases(counts, options.seed):
            if case.job.name not in done:
                left[case.kind, case.nproc].append(case)
        recipe = write_recipe(folder)
        for cases in left.values():
            for first in range(0, len(cases), AT_ONCE):
                with tempfile.TemporaryDirectory() as runs, kept.open("a") as file:
                    for answer in run_cases(cases[first : first + AT_ONCE], recipe, Path(runs)):
                        answers.append(answer)
                        file.write(json.dumps(answer) + "\n")
    result = {}
    for kind in counts:
        own = [answer for answer in answers if answer["kind"] == kind]
        result[kind] = {"cases": len(own), "right": sum(not answer["wrong"] for answer in own)}
    result["clean_steps"] = {
        "steps": options.steps,
        "spikes": count_false_alarms(options.steps, options.seed),
    }
    wrong = [answer for answer in answers if answer["wrong"]]
    print(json.dumps({"soak": "guard", "seed": options.seed, **result, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
