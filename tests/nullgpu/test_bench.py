"""`make bench-gpu` at tiny sizes, killed at arbitrary points and started again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes import family

ROOT = Path(__file__).parents[2]
NAMES = ("gpu-parts-124m", "gpu-124m", "gpu-journey", "gpu-products-124m", "gpu-generate")
KILL_SECONDS = (5, 20, 30)  # during a set-up, a measurement, a later benchmark


def test_killed_benchmarks_continue_and_leave_complete_records(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", tmp_path]
    command += ["--only", ",".join(NAMES)]
    finished = set()
    for seconds in KILL_SECONDS:
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid in list(family(process.pid)):
                os.kill(pid, signal.SIGKILL)
            process.wait()
        records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        done = {name for name, record in records.items() if "unfinished" not in record["answer"]}
        assert finished <= done
        finished = done
    dates = {name: (tmp_path / f"{name}.json").stat().st_mtime_ns for name in finished}
    run = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    outcomes = json.loads(run.stdout.splitlines()[-1])["benches"]
    assert {name for name, outcome in outcomes.items() if outcome == "has a record"} == finished
    for name in NAMES:
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record["hardware"]["device"] == "NVIDIA H100 80GB HBM3"
        assert record["answer"]
    for name, date in dates.items():
        assert (tmp_path / f"{name}.json").stat().st_mtime_ns == date
