"""Kill all ranks or one at random, and compare each finished run with an undisturbed one. Linux.

    python -m tests.soak.kill_soak --kills 300

After a kill of all, launcher included, the same command is started again; after a kill of one rank
the launcher starts all again. Half of the kills wait for a draft of a checkpoint, the others for a
random moment between two checkpoints or within the first seconds of a start; those that left a
draft behind, or hit while one existed, count as inside a save. A run takes about a dozen kills. At
its end weights, moments and logged numbers must equal those of an undisturbed run of the same
layout, bit for bit. In 'mixed' every start has another number of processes and the end equals that
of one process, bit for bit; in 'mixed, sharded' also another layout and micro-batch, and the losses
are equal to 1e-6.

Exits 1 when a run differs, hangs or ends with another code than 0 and 7; its folder is kept.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatoken.errors import ExitCode
from tests.processes import children
from tests.soak.options import parse_options, report
from tests.soak.tiny_job import Layout, Process, drafts, kill_group, start, wait_for, write_recipe
from tests.tiny_run import fingerprint, newest_step

KILLS_PER_RUN = 12
MAX_STARTS = 3 * KILLS_PER_RUN
START_SECONDS = 5.0
STEP_SECONDS = 0.3  # about the time between two checkpoints
RELATIVE = 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    """Layouts from which each start takes one; the undisturbed run has the first."""

    name: str
    layouts: tuple[Layout, ...]
    is_exact: bool = True


SAME = [
    *(Layout(nproc, "none") for nproc in (1, 2, 3, 4)),
    *(Layout(nproc, "zero3") for nproc in (2, 3, 4)),
    *(Layout(nproc, "zero1") for nproc in (2, 4)),
]
SPLIT = tuple(
    Layout(nproc, sharding, size)
    for nproc, sharding, size in ((2, "zero3", 1), (3, "zero1", 2), (4, "zero3", 3))
)
CASES = [
    *(Case(str(layout), (layout,)) for layout in SAME),
    Case("mixed", tuple(Layout(nproc, "none") for nproc in (1, 2, 4))),
    Case("mixed, sharded", (Layout(1, "none"), Layout(3, "none", 4), *SPLIT), is_exact=False),
]


@cache
def run_clean(recipe: Path, layout: Layout) -> dict[str, Any]:
    """Return the result of an undisturbed run."""
    out = recipe.with_name(f"clean {layout}")
    assert start(recipe, out, layout, out.with_suffix(".log")).wait() == 0
    return fingerprint(out)


def run_case(case: Case, recipe: Path, out: Path, rng: random.Random) -> tuple[Counter[str], str]:
    """Kill a run until it is finished or has had its share of kills; return what went wrong."""
    kills, log = Counter[str](), out.with_suffix(".log")
    code, starts = -1, 0
    try:
        while code != ExitCode.DONE:
            starts += 1
            process = start(recipe, out, rng.choice(case.layouts), log)
            code = disturb(process, out, rng, kills)
            if code not in (ExitCode.DONE, ExitCode.PEER, -signal.SIGKILL) or starts > MAX_STARTS:
                return kills, f"exit code {code} of start {starts}"
    except TimeoutError as error:
        return kills, str(error)
    if b"Traceback" in log.read_bytes():
        return kills, "a traceback"
    return kills, compare(fingerprint(out), run_clean(recipe, case.layouts[0]), case.is_exact)


def disturb(process: Process, out: Path, rng: random.Random, kills: Counter[str]) -> int:
    """Kill a rank, or all, repeatedly; return the exit code of the process once it has ended."""
    while kills["kills"] < KILLS_PER_RUN:
        leftovers = drafts(out)
        if not wait_for_moment(process, out, rng):
            break
        ranks = children(process.pid)
        one = bool(ranks) and rng.random() < 0.4
        if one:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(ranks), signal.SIGKILL)
        else:
            kill_group(process)
            if process.returncode != -signal.SIGKILL:
                break  # it had just ended
        kills["inside_saves"] += bool(drafts(out) - leftovers)
        kills["kills"] += 1
        kills["one_rank" if one else "all_ranks"] += 1
        if not one:
            break
    wait_for(lambda: process.poll() is not None, process)
    return int(process.returncode)


def wait_for_moment(process: Process, out: Path, rng: random.Random) -> bool:
    """Wait for the moment of the next kill; return False if the process has ended."""
    kind, seconds = rng.choices(["save", "step", "start"], [10, 7, 3])[0], rng.random()
    before, newest = drafts(out), newest_step(out) + 4 * rng.randrange(2)
    if kind == "start":
        time.sleep(seconds * START_SECONDS)
    elif kind == "step":
        wait_for(lambda: newest_step(out) > newest, process, or_end=True)
        time.sleep(seconds * STEP_SECONDS)
    else:
        wait_for(
            lambda: newest_step(out) >= newest and bool(drafts(out) - before), process, or_end=True
        )
        time.sleep(seconds * 0.005)
    return process.poll() is None


def compare(found: dict[str, Any], clean: dict[str, Any], is_exact: bool) -> str:
    """What differs from the undisturbed run; "" if nothing does."""
    if is_exact:
        return " and ".join(f"other {name}" for name in clean if found[name] != clean[name])
    both = [
        [row for row in run["rows"] if row["kind"] in ("train", "val")] for run in (found, clean)
    ]
    keys = [[(row["kind"], row["step"], row["tokens"]) for row in rows] for rows in both]
    if keys[0] != keys[1]:
        return "other rows"
    worst = max(abs(row["loss"] / other["loss"] - 1) for row, other in zip(*both, strict=True))
    return f"losses differ by {worst:.1e}" if worst > RELATIVE else ""


def main() -> int:
    options = parse_options(__doc__, kills=300, only="", seed=0)
    cases = [case for case in CASES if case.name == options.only or not options.only]
    folder = Path(tempfile.mkdtemp(prefix="megatoken-kills-"))
    recipe = write_recipe(folder / "data")
    layouts: dict[str, Counter[str]] = {}
    total, failure = Counter[str](), ""
    while total["kills"] < options.kills and not failure:
        case, out = cases[total["runs"] % len(cases)], folder / f"run-{total['runs']}"
        kills, failure = run_case(case, recipe, out, random.Random(f"{options.seed} {out.name}"))
        kills.update(runs=1, equal=not failure)
        layouts.setdefault(case.name, Counter()).update(kills)
        total.update(kills)
        print(f"{case.name}: {kills}, {failure or 'equal'}", file=sys.stderr, flush=True)
        if not failure:
            shutil.rmtree(out)
    if not failure:
        shutil.rmtree(folder)
    answer = {**total, "layouts": layouts, "failure": failure and f"{failure}: see {folder}"}
    return report("kills", not failure, **answer)


if __name__ == "__main__":
    sys.exit(main())
