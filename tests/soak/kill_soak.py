"""Random SIGKILLs of all ranks, or of one, and each finished run compared with an undisturbed one. Linux.

    python -m tests.soak.kill_soak --kills 300 --state kills.json

After a kill of all, launcher included, the same command is started again; after a kill of one rank the launcher starts
all again. Half of the kills wait for a draft of a checkpoint, the others for a random moment between two checkpoints or
within the first seconds of a start; those that left a draft behind, or hit while one existed, count as inside a save.
A run takes about a dozen kills. At its end weights, moments, losses, validation losses, token counts and samples must
equal those of an undisturbed run of the same layout, bit for bit. In 'mixed' every start has another number of
processes and the end equals that of one process, bit for bit; in 'mixed, sharded' also another layout and micro-batch,
and the losses are equal to 1e-6.

With --state the counts are kept in a file after every run, and the same command goes on until all are done. Exits 1
when a run differs, hangs or ends with another code than 0 and 7; its folder and output are kept.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatoken.errors import ExitCode
from megatoken.system.atomic_write import replace_file
from tests.processes import children
from tests.soak.tiny_job import (
    Layout,
    Process,
    drafts,
    kill_group,
    newest_step,
    start,
    wait_for,
    write_recipe,
)
from tests.train.test_pretrain import fingerprint

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


@dataclass
class Soak:
    """Undisturbed runs by layout, made when they are needed first, and the counts by case."""

    folder: Path
    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    runs: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    _clean: dict[Layout, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recipe = write_recipe(self.folder / "data")

    def clean(self, layout: Layout) -> dict[str, Any]:
        if layout not in self._clean:
            out = self.folder / f"clean {layout}"
            code = start(self.recipe, out, layout, self.folder / "clean.log").wait()
            assert code == 0, (self.folder / "clean.log").read_text()
            self._clean[layout] = fingerprint(out)
        return self._clean[layout]

    def total(self, what: str) -> int:
        return sum(counts[what] for counts in self.counts.values())

    def run(self, case: Case) -> None:
        """One run, killed until it is finished or has had its share of kills."""
        clean, began = self.clean(case.layouts[0]), time.monotonic()
        counts = self.counts.setdefault(case.name, Counter())
        rng, out = random.Random(f"{self.seed} {self.runs}"), self.folder / f"run-{self.runs}"
        log = self.folder / f"run-{self.runs}.log"
        kills, what = Counter[str](), ""
        try:
            code, starts = -1, 0
            while code != ExitCode.DONE:
                starts += 1
                process = start(self.recipe, out, rng.choice(case.layouts), log)
                code = disturb(process, out, rng, kills)
                if (
                    code not in (ExitCode.DONE, ExitCode.PEER, -signal.SIGKILL)
                    or starts > MAX_STARTS
                ):
                    what = f"exit code {code} of start {starts}"
                    break
            what = what or compare(fingerprint(out), clean, case.is_exact)
        except TimeoutError as error:
            what = str(error)
        if b"Traceback" in log.read_bytes():
            what = what or "a traceback"
        counts.update(kills)
        counts["runs"] += 1
        counts["equal"] += not what
        self.runs += 1
        self.seconds += time.monotonic() - began
        print(
            f"{case.name}: {kills['kills']} kills, {what or 'equal'}", file=sys.stderr, flush=True
        )
        if what:
            self.failures.append(f"{case.name}: {what}: see {log}")
        else:
            shutil.rmtree(out)
            log.unlink()


def disturb(process: Process, out: Path, rng: random.Random, kills: Counter[str]) -> int:
    """Kill a rank, or all, again and again; the exit code of the process once it has ended."""
    while kills["kills"] < KILLS_PER_RUN:
        leftovers = drafts(out)
        if not wait_for_moment(process, out, rng):
            break
        ranks = children(process.pid)
        if one := bool(ranks) and rng.random() < 0.4:
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
    """Wait for the moment of the next kill; False when the process has ended before."""
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
    order = [[(row["kind"], row["step"], row["tokens"]) for row in rows] for rows in both]
    if order[0] != order[1]:
        return "other rows"
    worst = max(abs(row["loss"] / other["loss"] - 1) for row, other in zip(*both, strict=True))
    return f"losses differ by {worst:.1e}" if worst > RELATIVE else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument(
        "--state", type=Path, help="file with the counts so far; continued if it exists"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="CASE",
        help=f"one of: {'; '.join(case.name for case in CASES)}",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cases = [case for case in CASES if case.name == options.only or not options.only]
    soak = Soak(Path(tempfile.mkdtemp(prefix="megatoken-kills-")), options.seed)
    if options.state and options.state.exists():
        kept = json.loads(options.state.read_text())
        soak.counts = {name: Counter(counts) for name, counts in kept.pop("counts").items()}
        soak.runs, soak.seconds, soak.failures = kept["runs"], kept["seconds"], kept["failures"]
    while soak.total("kills") < options.kills and not soak.failures:
        soak.run(cases[soak.runs % len(cases)])
        if options.state:
            options.state.parent.mkdir(parents=True, exist_ok=True)
            kept = {
                "runs": soak.runs,
                "seconds": soak.seconds,
                "failures": soak.failures,
                "counts": soak.counts,
            }
            replace_file(options.state, json.dumps(kept, indent=1) + "\n")
    if not soak.failures:
        shutil.rmtree(soak.folder)
    if options.state:
        options.state.unlink(missing_ok=True)  # the next start begins anew
    names = ("kills", "inside_saves", "all_ranks", "one_rank", "runs", "equal")
    answer = {"soak": "kills", **{name: soak.total(name) for name in names}}
    answer |= {
        "seconds_per_kill": soak.seconds / max(1, soak.total("kills")),
        "layouts": soak.counts,
    }
    print(json.dumps(answer | {"failures": soak.failures}), flush=True)
    return bool(soak.failures)


if __name__ == "__main__":
    sys.exit(main())
