"""A search of 8 short runs that is killed, beside one that is not: `python -m tests.soak.sweep_soak [--work FOLDER]`.

Both search optim.lr from 1e-5 to 3e-2 by runs of 100 steps of the quickstart, stopped early where their losses are
worse than the median. One gets SIGKILL, the sweep and its run at once, while its second run is training and again in
its fourth, and is started again each time. It must end with the same trials: values, losses to the last bit, which were
stopped early, folders. The best is compared with a run at 1e-5, a bad start. One thread; two minutes. Ends in one JSON
line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.quickstart_race import prepare_corpus, run
from megatoken.system.atomic_write import read_object
from megatoken.system.metrics_log import read_metrics
from megatoken.system.process import at_parent_death
from tests.soak.tiny_job import kill_group, wait_for

TRIALS, KILLED_IN = 8, (1, 3)  # counted from 0
BAD_RATE = "1e-5"
FIXED = [
    "budget.steps=100",
    "evaluate.every=20steps",
    "save.every=20steps",
    "sample.every=0steps",
    "log.plots=false",
]
FIXED += [
    "log.every=10steps",
    "machine.threads=1",
    "machine.precision=fp32",
    "machine.micro_batch=2",
]
# Nothing is chosen by measurement: another choice has other bits.
FIXED += ["machine.attention=flash", "machine.gemm_backend=torch"]


def search(out: str) -> list[str]:
    """The words of a sweep into `out`."""
    return [
        "sweep",
        "quickstart",
        "--out",
        out,
        "--trials",
        str(TRIALS),
        f"optim.lr=log:{BAD_RATE}..3e-2",
        *FIXED,
    ]


def kill_in(folder: Path, out: str, trial: int) -> None:
    """Start a sweep and kill it with its run when a trial has made 50 steps."""
    rows = folder / out / f"trial-{trial:03d}" / "metrics.jsonl"

    def is_there() -> bool:
        return rows.is_file() and b'"step": 50' in rows.read_bytes()

    command = [sys.executable, "-P", "-m", "megatoken", *search(out)]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=at_parent_death(signal.SIGKILL),
    )
    wait_for(is_there, process, or_end=True)
    assert process.poll() is None, f"the sweep ended before trial {trial}: {process.returncode}"
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(read_object(rows.with_name("status.json"))["pid"], signal.SIGKILL)
    kill_group(process)
    print(f"killed in trial {trial} after {len(read_metrics(rows.parent))} rows", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="folder to keep (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.work or Path(temporary)).resolve()
        prepare_corpus(folder)
        ends: dict[str, Any] = {}
        for name, kills in (("untouched", ()), ("killed", KILLED_IN)):
            for trial in kills:
                kill_in(folder, name, trial)
            ends[name] = run(folder, *search(name))
            print(f"{name}: {ends[name]['best']}", flush=True)
        bad = run(folder, "train", "quickstart", "--out", "bad", f"optim.lr={BAD_RATE}", *FIXED)
        resumed = [
            (folder / "killed" / f"trial-{trial:03d}.log").read_text().count("resum")
            for trial in KILLED_IN
        ]
    same = ends["untouched"]["trials"] == ends["killed"]["trials"]
    answer = {
        "soak": "sweep",
        "kills": len(KILLED_IN),
        "resumed_runs": sum(map(bool, resumed)),
        "same_trials": same,
    }
    answer |= {
        "bad_loss": bad["val_loss"],
        "best": ends["killed"]["best"],
        "trials": ends["killed"]["trials"],
    }
    answer["stopped_early"] = sum(trial["state"] == "pruned" for trial in answer["trials"])
    print(json.dumps(answer), flush=True)
    return int(not (same and all(resumed) and answer["best"]["loss"] < answer["bad_loss"]))


if __name__ == "__main__":
    sys.exit(main())
