"""Kill a sweep twice, and compare it with one that is not killed.

    python -m tests.soak.sweep_soak

Both search optim.lr from 1e-5 to 3e-2 by 8 runs of 100 steps of the quickstart. One gets SIGKILL,
the sweep and its run at once, in its second and in its fourth trial. Both must end with the same
trials: values, losses to the last bit, states, folders. Two minutes. Prints one JSON line.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.quickstart_race import prepare_corpus, run
from megatoken.system.atomic_write import read_object
from megatoken.system.process import at_parent_death
from tests.soak.options import parse_options, report
from tests.soak.tiny_job import kill_group, wait_for

KILLED_IN = (1, 3)  # trials, from 0
BAD_RATE = "1e-5"
# Fixed kernels: measured choices could differ between the two.
FIXED = (
    "budget.steps=100 evaluate.every=20steps save.every=20steps sample.every=0steps "
    "log.plots=false log.every=10steps machine.threads=1 machine.precision=fp32 "
    "machine.micro_batch=2 machine.attention=flash machine.gemm_backend=torch"
)


def search(out: str) -> list[str]:
    """Return the words of a sweep into `out`."""
    return [
        "sweep",
        "quickstart",
        "--out",
        out,
        "--trials",
        "8",
        "optim.lr=log:1e-5..3e-2",
        *FIXED.split(),
    ]


def kill_in(folder: Path, out: str, trial: int) -> None:
    """Start a sweep and kill it with its run when a trial has made 50 steps."""
    rows = folder / out / f"trial-{trial:03d}" / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "megatoken", *search(out)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=at_parent_death(signal.SIGKILL),
    )
    wait_for(lambda: rows.is_file() and b'"step": 50' in rows.read_bytes(), process, or_end=True)
    assert process.poll() is None, f"the sweep ended before trial {trial}: {process.returncode}"
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(read_object(rows.with_name("status.json"))["pid"], signal.SIGKILL)
    kill_group(process)
    print(f"killed in trial {trial}", flush=True)


def main() -> int:
    parse_options(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare_corpus(folder)
        untouched = run(folder, *search("untouched"))
        for trial in KILLED_IN:
            kill_in(folder, "killed", trial)
        killed = run(folder, *search("killed"))
        bad = run(
            folder, "train", "quickstart", "--out", "bad", f"optim.lr={BAD_RATE}", *FIXED.split()
        )
        logs = [(folder / f"killed/trial-{trial:03d}.log").read_text() for trial in KILLED_IN]
    is_same = untouched["trials"] == killed["trials"]
    resumed = sum("resum" in log for log in logs)
    is_good = is_same and resumed == len(KILLED_IN) and killed["best"]["loss"] < bad["val_loss"]
    return report("sweep", is_good, same_trials=is_same, resumed=resumed, trials=killed["trials"])


if __name__ == "__main__":
    sys.exit(main())
