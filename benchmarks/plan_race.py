"""Compare `megatoken plan --calibrate` with full runs on this machine.

    python -m benchmarks.plan_race --state runs/plan/state.json [--runs 3] [--turns N]

Each round takes about a minute for each of four models. It has a plan, which measures for 30 s; a
full run with its evaluations and saves; and a run in which the plan's own steps are timed once
after each second of training. `after`: planned time divided by that of the next run, at another
load. `beside`: the time that steps timed during a run predict, divided by the run's time without
these steps, at the same load. Memory is the peak that the kernel counts.

The models train on the quickstart's corpus. They are the quickstart's own; 4 layers of width 256; 8
of 384; and 6 of 512 with grouped queries and an untied output layer. One thread; a quarter of an
hour. --state keeps results, so that a stopped race continues. Prints one JSON line. Linux.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.quickstart_race import prepare_corpus, run
from megatoken.base.config.load import load_config
from megatoken.base.config.schema import Config
from megatoken.base.console import Console
from megatoken.base.system.atomic_write import read_object, replace_file
from megatoken.base.system.device import open_device
from megatoken.base.system.metrics_log import read_metrics
from megatoken.data.dataset import load_dataset
from megatoken.plan.calibrate import StepTimer
from megatoken.plan.estimate import budget_tokens
from megatoken.train.train import Trainer

MODELS = {
    "quickstart": ["budget.steps=125"],
    "4 layers of 256": [
        "model.d_model=256",
        "model.n_head=4",
        "budget.batch_tokens=2048",
        "budget.steps=40",
        "optim.lr=1e-3",
    ],
    "8 layers of 384": [
        *("model.n_layer=8", "model.d_model=384", "model.n_head=6"),
        *("budget.batch_tokens=4096", "budget.steps=6", "optim.lr=1e-3"),
    ],
    "6 layers of 512": [
        *(
            "model.n_layer=6",
            "model.d_model=512",
            "model.n_head=8",
            "model.n_kv_head=2",
            "model.tie_embeddings=false",
        ),
        *(
            "model.qk_norm=true",
            "model.seq_len=512",
            "budget.batch_tokens=8192",
            "budget.steps=4",
            "optim.lr=1e-3",
        ),
    ],
}
COMMON = ["evaluate.every=0.5dur", "save.every=0.5dur", "sample.every=0steps", "log.plots=false"]
COMMON += [
    "evaluate.tokens=8192",
    "machine.threads=1",
]  # two threads of a machine with other jobs wait for one another


def train(folder: Path, arguments: list[str]) -> tuple[float, int]:
    """Return the seconds and peak bytes of a full run of the command."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "megatoken",
        "train",
        "quickstart",
        "--out",
        "run",
        *arguments,
    ]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    peak = 0
    while process.poll() is None:  # wait4's ru_maxrss begins with the memory of this process
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = max(
            peak,
            *(
                int(line.split()[1]) << 10
                for line in status.splitlines()
                if line.startswith("VmHWM")
            ),
            0,
        )
        time.sleep(0.1)
    assert process.returncode == 0, process.returncode
    return max(row["elapsed_seconds"] for row in read_metrics(folder / "run")), peak


class TimedSteps:
    """A callback that times the plan's steps once after each second of training."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer, self.seconds, self.before = timer, 0.0, time.perf_counter()

    def __call__(self, row: dict[str, Any]) -> None:
        now = time.perf_counter()
        if row["kind"] == "train" and now - self.before > 1.0:
            self.timer.run_interleaved()
            self.before = time.perf_counter()
            self.seconds += self.before - now


def train_and_time(config: Config, out: Path) -> float:
    """Return planned over measured seconds of a run that also times the plan's steps."""
    model = config.model.resolve(load_dataset(config.data.path).vocab_size)
    config = replace(config, model=model)
    timer = StepTimer(config, open_device(config.machine))
    timed_steps = TimedSteps(timer)
    Trainer(config, out, callbacks=[timed_steps], console=Console(quiet=True)).fit()
    seconds = max(row["elapsed_seconds"] for row in read_metrics(out)) - timed_steps.seconds
    return timer.result().run_seconds(config, budget_tokens(config)) / seconds


def race(folder: Path, name: str) -> dict[str, Any]:
    """Run one plan of a model and two runs."""
    arguments = [*MODELS[name], *COMMON]
    for out in ("run", "beside"):
        shutil.rmtree(folder / out, ignore_errors=True)
    planned = run(folder, "plan", "quickstart", "--calibrate", *arguments)
    seconds, memory_bytes = train(folder, arguments)
    config = load_config("quickstart", f"data.path={folder / 'data/python'}", *arguments)
    return {
        "model": name,
        "planned_seconds": 3600 * planned["hours"],
        "seconds": seconds,
        "memory_bytes": memory_bytes,
        "after": 3600 * planned["hours"] / seconds,
        "beside": train_and_time(config, folder / "beside"),
        "memory": planned["memory_bytes"] / memory_bytes,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return planned over measured: median, lowest and highest, of all runs and by model."""
    found: dict[str, Any] = {}
    for name in ("all", *MODELS):
        for key in ("after", "beside", "memory"):
            values = [row[key] for row in rows if name in ("all", row["model"])]
            found.setdefault(name, {})[key] = [statistics.median(values), min(values), max(values)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3, help="of each model (default 3)")
    parser.add_argument(
        "--turns", type=int, default=1 << 30, help="to take before this process ends (default: all)"
    )
    options = parser.parse_args()
    folder = options.state.parent.resolve()
    prepare_corpus(folder)
    rows: list[dict[str, Any]] = read_object(options.state).get("rows", [])
    left = (list(MODELS) * options.runs)[len(rows) :]
    for name in left[: options.turns]:
        rows.append(race(folder, name))
        replace_file(options.state, json.dumps({"rows": rows}))
        print(rows[-1], flush=True)
    if len(left) > options.turns:
        return
    print(json.dumps({"soak": "plan", "ratios": summarize(rows), "rows": rows}), flush=True)


if __name__ == "__main__":
    main()
