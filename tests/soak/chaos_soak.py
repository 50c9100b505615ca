"""Faults at random for an hour; the same command is started again after each. Linux.

    python -m tests.soak.chaos_soak --minutes 60
    python -m tests.soak.chaos_soak --layouts "1 none;2 none;4 none" --faults 300 --only "SIGKILL to all"

A job trains until the time is over, then it is stopped by SIGTERM. Each start draws its processes
and their sharding from --layouts; sharded ones must be the same. Between faults it has to commit a
checkpoint. Every kind of fault comes before one comes again. At the end weights, moments and logged
rows must equal those of an undisturbed run (of one process, if nothing is sharded) that stops at
the same step, bit for bit; only rows of the moments when the disk was full may be missing. Every exit code
must be one that the fault may cause, every failure one line that names what, where and the fix;
nothing may print a traceback, and no process may be left.

The run folder is on a small file system in memory where this user may mount one; otherwise the
faults of full and read-only disks are left out. Prints one JSON line; exits 1 and keeps the folder
when something is wrong.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatoken.base.errors import ExitCode
from megatoken.base.system.metrics_log import read_metrics
from megatoken.store.commit import list_steps, step_folder
from tests.flip import flip_bit
from tests.processes import children, group_members, wait_until
from tests.ranks import train_on_ranks
from tests.soak.options import parse_options, report
from tests.soak.tiny_job import (
    Layout,
    command,
    drafts,
    kill_group,
    list_files,
    run_quietly,
    start_session,
    wait_for,
    write_recipe,
)
from tests.tiny_run import fingerprint, newest_step

WORDS = "budget.steps=1000000 save.every=20 log.every=5 evaluate.every=100 sample.every=200"
DISK_BYTES, LEFT_BYTES = 32 << 20, 64 << 10
ERROR = re.compile(r"^(\[rank \d+\] )?error: .+ — .+", re.MULTILINE)
FORBIDDEN = ("Traceback", "Exception ignored", "terminate called", "Fatal Python error", "leaked")
FILES = ("config.yaml", "machine.json", "provenance.json", "status.json", ".owner.json")
MAX_STARTS = 20  # without a checkpoint


class Problem(Exception):
    """Something that must not happen; the soak ends."""


class Chaos:
    """The job, what was done to it, and how its starts ended."""

    def __init__(
        self,
        work: Path,
        layouts: Sequence[Layout],
        seed: int,
        words: str = WORDS,
        disk: bool = True,
    ) -> None:
        """layouts: each start draws one. words: settings. disk: mount one for the run folder."""
        self.work, self.layouts, self.words = work, layouts, words.split()
        self.disk = work / "disk"
        self.out = self.disk / "run"
        self.faults = Counter()
        self.exits = Counter()
        self.seconds = 0.0
        self.full = []  # steps between which the disk was full
        self.damaged = []  # checkpoints
        self.recipe = write_recipe(work / "data")
        self.rng = random.Random(seed)
        self.expected = set()  # exit codes that the last fault may cause
        self.disk.mkdir()
        mount = f"mount -t tmpfs -o size={DISK_BYTES} none {self.disk}".split()
        self.has_disk = disk and not run_quietly(mount)
        self.log = None

    def start(self) -> None:
        """Start the command with one of the layouts."""
        self.check_end()
        self.layout = self.rng.choice(self.layouts)
        self.log = self.work / f"start-{self.exits.total():04d}.log"
        words = command(self.recipe, self.out, self.layout, self.words)
        with self.log.open("ab") as log:
            self.process = start_session(words, stdout=log, stderr=log)

    def ranks(self) -> list[int]:
        return children(self.process.pid) if self.layout.nproc > 1 else [self.process.pid]

    def kill(self) -> None:
        """SIGKILL launcher and ranks."""
        self.expected.add(-signal.SIGKILL)
        kill_group(self.process)

    def end(self, *codes: int) -> None:
        """Wait until the process has ended, which the fault makes it do with one of these codes."""
        self.expected.update(codes)
        wait_for(lambda: self.process.poll() is not None, self.process)

    def wait_for(self, condition: Callable[[], object]) -> bool:
        """Wait until a condition holds or the process has ended; return whether it holds."""
        return wait_for(condition, self.process, or_end=True)

    def printed(self) -> str:
        """What the last start has printed so far."""
        return self.log.read_text(errors="replace") if self.log else ""

    def check_end(self) -> None:
        """Check exit code and output of the last start, which has ended."""
        if self.log is None:
            return
        code, text = self.process.returncode, self.printed()
        self.exits[code] += 1
        if code not in self.expected:
            raise Problem(f"exit code {code}, expected {sorted(self.expected)}: {self.log}")
        for word in FORBIDDEN:
            if word in text:
                raise Problem(f"{word!r} in {self.log}")
        if 0 < code < ExitCode.STOPPED and not ERROR.search(text):
            raise Problem(f"exit code {code} without an error line: {self.log}")
        if code != -signal.SIGKILL:  # the launcher is not there to wait for its ranks
            wait_for(lambda: not group_members(self.process.pid), self.process)

    def train_on(self) -> None:
        """Until the next checkpoint is committed, start the command again whenever it has ended."""
        newest = newest_step(self.out)
        starts = 0
        while not self.wait_for(lambda: newest_step(self.out) > newest):
            if (starts := starts + 1) > MAX_STARTS:
                raise Problem(f"{MAX_STARTS} starts brought no checkpoint: {self.log}")
            self.start()
        self.expected.clear()

    def disturb(self, seconds: float, number: int, pause: float, names: list[str]) -> None:
        """Cause faults, one after another, for some time and up to a number."""
        began, bag = time.monotonic(), []
        self.start()
        while True:
            self.train_on()
            self.seconds = time.monotonic() - began
            if self.seconds > seconds or self.faults.total() >= number:
                break
            time.sleep(self.rng.uniform(0, 2 * pause))
            bag = bag or self.rng.sample(names, len(names))
            name = bag.pop()
            print(f"{self.seconds:.0f} s, step {newest_step(self.out)}: {name}", file=sys.stderr)
            FAULTS[name](self)
            self.faults[name] += 1
        self.process.terminate()
        self.end(ExitCode.STOPPED)
        self.check_end()

    def compare(self) -> dict[str, Any]:
        """Train undisturbed to the same step; return what differs."""
        last, clean, layout = newest_step(self.out), self.work / "clean", self.layouts[0]
        nproc = 1 if layout.sharding == "none" else layout.nproc
        settings = (*self.words, *layout.words)
        train_on_ranks(nproc, clean, *settings, recipe=self.recipe, stop=last)
        results = [fingerprint(out) for out in (self.out, clean)]
        # A stop leaves out evaluations and samples of its step.
        found, expected = (
            {
                (row["kind"], row["step"]): row
                for row in result["rows"]
                if row["kind"] == "train" or row["step"] < last
            }
            for result in results
        )
        missing = [step for _, step in expected.keys() - found.keys()]
        full = {step for first, end in self.full for step in range(first, end + 1)}
        return {
            "steps": last,
            "rows": len(found),
            "same_weights_and_moments": results[0]["tensors"] == results[1]["tensors"],
            "same_rows": all(row == expected.get(key) for key, row in found.items()),
            "rows_lost_on_a_full_disk": len(missing),
            "rows_lost_otherwise": sorted({*missing} - full),
        }


def wait_for_save(chaos: Chaos) -> None:
    """A save has begun; on a busy machine it may be over by the time this is seen."""
    before, newest = drafts(chaos.out), newest_step(chaos.out)
    chaos.wait_for(lambda: drafts(chaos.out) - before or newest_step(chaos.out) > newest)


def kill_in_save(chaos: Chaos) -> None:
    wait_for_save(chaos)
    chaos.kill()


def start_anew(chaos: Chaos) -> None:
    """Start again, for at most 5 seconds."""
    chaos.kill()
    chaos.start()
    time.sleep(chaos.rng.uniform(0, 5))


def kill_at_start(chaos: Chaos) -> None:
    start_anew(chaos)
    chaos.kill()


def lose_rank(chaos: Chaos, number: int) -> None:
    """Send a signal to a rank; the launcher starts all again."""
    chaos.expected.add(ExitCode.PEER)
    os.kill(chaos.rng.choice(chaos.ranks()), number)


def kill_launcher(chaos: Chaos, *, and_rank: bool = False) -> None:
    """The ranks save and end; the next start may come while they do."""
    old, ranks = chaos.process, chaos.ranks()
    old.kill()
    if and_rank:
        os.kill(ranks[0], signal.SIGKILL)  # which holds the lock
    chaos.end(-signal.SIGKILL)
    if chaos.rng.random() < 0.5:
        chaos.start()
        chaos.expected.add(ExitCode.STORAGE)  # another run is using this folder
    wait_for(lambda: not group_members(old.pid), old)


def stop(chaos: Chaos, name: str) -> None:
    chaos.process.send_signal(getattr(signal, name))
    chaos.end(ExitCode.STOPPED)


def stop_twice(chaos: Chaos) -> None:
    chaos.process.send_signal(signal.SIGTERM)
    time.sleep(chaos.rng.uniform(0, 1))
    stop(chaos, "SIGTERM")


def stop_group(chaos: Chaos) -> None:
    os.killpg(chaos.process.pid, signal.SIGTERM)
    chaos.end(ExitCode.STOPPED)


def stop_rank(chaos: Chaos) -> None:
    os.kill(chaos.rng.choice(chaos.ranks()), signal.SIGTERM)
    chaos.end(ExitCode.STOPPED)


def stop_at_start(chaos: Chaos) -> None:
    start_anew(chaos)
    chaos.process.send_signal(signal.SIGTERM)
    chaos.end(ExitCode.STOPPED, -signal.SIGTERM)


def pause_all(chaos: Chaos) -> None:
    os.killpg(chaos.process.pid, signal.SIGSTOP)
    time.sleep(chaos.rng.uniform(0, 5))
    os.killpg(chaos.process.pid, signal.SIGCONT)


def fill_disk(chaos: Chaos) -> Path:
    filler = chaos.disk / "filler"
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while (free := shutil.disk_usage(chaos.disk).free) > LEFT_BYTES:
            file.write(bytes(free - LEFT_BYTES))
    return filler


def last_logged(chaos: Chaos) -> int:
    return max((row["step"] for row in read_metrics(chaos.out)), default=0)


def full_disk(chaos: Chaos) -> None:
    """Full from a save on, until a save has failed."""
    wait_for_save(chaos)
    first, filler = last_logged(chaos), fill_disk(chaos)
    failed = chaos.printed().count("not saved")

    def has_failed():
        fill_disk(chaos)  # again: a save that was under way has removed an older checkpoint since
        return chaos.printed().count("not saved") > failed

    chaos.wait_for(has_failed)
    filler.unlink()
    lost = last_logged(chaos)  # or a row later, which could not be written
    chaos.wait_for(lambda: last_logged(chaos) > lost)
    chaos.full.append((first, last_logged(chaos)))


def full_disk_at_start(chaos: Chaos) -> None:
    chaos.kill()
    for draft in (chaos.out / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(draft)  # the start would remove it, which makes room
    filler = fill_disk(chaos)
    chaos.start()
    chaos.end(ExitCode.STORAGE)
    filler.unlink()


def read_only_disk(chaos: Chaos) -> None:
    chaos.kill()
    # A thread of a killed process may still have a file open.
    wait_until(lambda: not run_quietly(["mount", "-o", "remount,ro", str(chaos.disk)]))
    chaos.start()
    chaos.end(ExitCode.STORAGE)
    subprocess.run(["mount", "-o", "remount,rw", str(chaos.disk)], check=True)


def missing_data(chaos: Chaos) -> None:
    chaos.kill()
    shard = chaos.recipe.with_name("train_0.npy")
    hidden = shard.rename(shard.with_name("hidden.npy"))
    chaos.start()
    chaos.end(ExitCode.DATA)
    hidden.rename(shard)


def two_checkpoints(chaos: Chaos) -> Path:
    """Train until there are two that nobody has damaged; return the newest."""
    root = chaos.out / "checkpoints"
    while len([s for s in list_steps(root) if step_folder(root, s) not in chaos.damaged]) < 2:
        chaos.train_on()
    return step_folder(root, newest_step(chaos.out))


def flip_newest(chaos: Chaos) -> None:
    newest = two_checkpoints(chaos)
    chaos.kill()
    path = chaos.rng.choice([path for path in list_files(newest) if path.stat().st_size])
    flip_bit(path, chaos.rng.randrange(path.stat().st_size * 8))
    chaos.damaged.append(newest)


def half_line(chaos: Chaos) -> None:
    chaos.kill()
    with (chaos.out / "metrics.jsonl").open("ab") as file:
        file.write(chaos.rng.choice([b'{"kind": "train", "st', b"\0" * 100, b"\xff junk\n"]))


def damage_file(chaos: Chaos) -> None:
    chaos.kill()
    path = chaos.out / chaos.rng.choice(FILES)
    content = path.read_bytes()
    path.write_bytes(chaos.rng.choice([b"", content[: len(content) // 2], b"\0" * len(content)]))
    if chaos.rng.random() < 0.3:
        path.unlink()


SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
STOPS = {name: partial(stop, name=name) for name in SIGNALS}
FAULTS = {
    "SIGKILL to all": Chaos.kill,
    "SIGKILL to all at a save": kill_in_save,
    "SIGKILL to all during a start": kill_at_start,
    **STOPS,
    "SIGTERM twice": stop_twice,
    "SIGTERM to the process group": stop_group,
    "SIGTERM during a start": stop_at_start,
    "processes suspended, then continued": pause_all,
    "bit flipped in the newest checkpoint": flip_newest,
    "newest checkpoint deleted": lambda chaos: shutil.rmtree(two_checkpoints(chaos)),
    "log ends in half a line or junk": half_line,
    "config.yaml or another file damaged or removed": damage_file,
    "data missing at a start": missing_data,
}
OF_RANKS = {
    "SIGKILL to a rank": partial(lose_rank, number=signal.SIGKILL),
    "SIGKILL to the launcher": kill_launcher,
    "SIGKILL to launcher and lock owner": partial(kill_launcher, and_rank=True),
    "SIGTERM to a rank": stop_rank,
    "a rank hangs": partial(lose_rank, number=signal.SIGSTOP),
}
OF_DISKS = {
    "disk full in a save": full_disk,
    "disk full at a start": full_disk_at_start,
    "disk read-only at a start": read_only_disk,
}
FAULTS |= OF_RANKS | OF_DISKS


def main() -> int:
    options = parse_options(
        __doc__, minutes=60.0, faults=10_000, pause=15.0, layouts="2 none", only="", seed=0
    )
    work = Path(tempfile.mkdtemp(prefix="megatoken-chaos-"))
    words = [layout.split() for layout in options.layouts.split(";")]
    layouts = [Layout(int(nproc), sharding) for nproc, sharding in words]
    chaos = Chaos(work, layouts, options.seed)
    is_alone = any(layout.nproc == 1 for layout in layouts)
    left_out = {*(OF_RANKS if is_alone else ()), *(() if chaos.has_disk else OF_DISKS)}
    names = options.only.split(";") if options.only else [*(FAULTS.keys() - left_out)]
    problem, answer = "", {}
    try:
        chaos.disturb(60 * options.minutes, options.faults, options.pause, sorted(names))
        answer = chaos.compare()
    except (Problem, TimeoutError) as error:
        problem = str(error)
    finally:
        kill_group(chaos.process)
    is_good = not problem and answer["same_weights_and_moments"] and answer["same_rows"]
    is_good = is_good and not answer["rows_lost_otherwise"]
    if is_good:
        run_quietly(["umount", chaos.disk])
        shutil.rmtree(work)
    elif not problem:
        problem = f"see {work}"
    answer |= {"faults": chaos.faults, "exit_codes": chaos.exits, "seconds": chaos.seconds}
    return report("chaos", is_good, layouts=options.layouts, problem=problem, **answer)


if __name__ == "__main__":
    sys.exit(main())
