"""`megatoken runs`: states and losses of runs, and how they are compared."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import yaml

from megatoken.base.errors import ExitCode
from tests.cli import test_report
from tests.cli.test_report import write_config
from tests.conftest import Ask, Call
from tests.tiny_run import write_jsonl

GONE = 2**22 + 1  # above the largest pid of Linux


def write_run(folder: Path, *settings: str, **status: Any) -> Path:
    """Write a run of 100 steps."""
    write_config(test_report.write_run(folder, steps=100), "budget.steps=100", *settings)
    status = {"pid": os.getpid(), "host": socket.gethostname(), "state": "done"} | status
    (folder / "status.json").write_text(json.dumps({"step": 100, "total_steps": 100} | status))
    return folder


def list_runs(ask: Ask, arguments: object) -> dict[str, dict[str, Any]]:
    """Return the rows by name."""
    return {Path(row["run"]).name: row for row in ask(f"runs {arguments}")["runs"]}


EXPECTED = yaml.safe_load("""
finished:
  {state: done, step: 100, total_steps: 100, loss: 4.01, val_loss: 4.125, objective: pretrain,
   tokens_per_second: 1024.0, message: "", eta_seconds: 0.0}
live: {state: running, step: 40, eta_seconds: 61.0, phase: validate}
dead: {state: dead}
elsewhere: {state: running, objective: sft}
failed: {state: failed, message: loss is nan}
copy: {state: copy, step: 100}
broken: {state: broken}
""")


def test_states_progress_and_losses(tmp_path: Path, ask: Ask):
    write_run(tmp_path / "a/finished")
    live = write_run(tmp_path / "live", **EXPECTED["live"])
    write_run(tmp_path / "dead", state="running", pid=GONE)
    write_run(tmp_path / "elsewhere", "objective.name=sft", state="running", pid=GONE, host="other")
    write_run(tmp_path / "failed", **EXPECTED["failed"])
    (write_run(tmp_path / "copy") / "status.json").unlink()
    (tmp_path / "copy/mirror.json").write_text('{"run": "1"}')
    (write_run(tmp_path / "broken") / "config.yaml").unlink()
    (tmp_path / "broken/status.json").write_text("{")
    (tmp_path / "config.yaml").write_text("of another program")
    rows = list_runs(ask, tmp_path)
    assert {name: row | EXPECTED[name] for name, row in rows.items()} == rows
    assert len(rows) == len(EXPECTED)
    assert rows["live"]["bytes"] == sum(path.stat().st_size for path in live.iterdir())
    assert rows["broken"]["message"]


def test_logs_may_be_missing_torn_or_long_and_runs_are_sorted(tmp_path: Path, ask: Ask):
    (write_run(tmp_path / "missing", step=5) / "metrics.jsonl").unlink()
    rows = [
        {"kind": "val" if n < 4 else "train", "step": n, "tokens": n, "loss": n}
        for n in range(1, 4000)
    ]
    log = write_jsonl(write_run(tmp_path / "long", step=None) / "metrics.jsonl", rows)
    with log.open("a") as file:
        file.write('{"kind": "tr')
    diverged = {"kind": "train", "step": 1, "tokens": 1, "loss": "nan"}
    write_jsonl(write_run(tmp_path / "diverged", step=7) / "metrics.jsonl", [diverged])
    runs = list_runs(ask, f"{tmp_path} --sort loss")
    losses = [(name, row["loss"], row["val_loss"]) for name, row in runs.items()]
    assert losses == [("long", 3999, 3), ("diverged", None, None), ("missing", None, None)]
    assert list(list_runs(ask, tmp_path)) == ["diverged", "long", "missing"]
    # The most steps first, and unknown ones last.
    assert list(list_runs(ask, f"{tmp_path} --sort step")) == ["diverged", "missing", "long"]


WHERE = """\
a b c: step=100
a: optim.lr=1e-3
b: optim.lr>0.001 seed=7
c: seed!=1337 val_loss<2
: state=running
: log.every<5
"""


def test_conditions_choose_runs(tmp_path: Path, ask: Ask, call: Call):
    write_run(tmp_path / "a", "optim.lr=1e-3", "log.tags=mine")
    write_run(tmp_path / "b", "optim.lr=2e-3", "seed=7", "log.tags=old, mine")
    run = write_run(tmp_path / "c", "seed=8")
    write_jsonl(run / "metrics.jsonl", [{"kind": "val", "step": 1, "tokens": 1, "loss": 1.5}])
    for line in WHERE.splitlines():
        names, _, conditions = line.partition(":")
        arguments = "".join(f" --where {condition}" for condition in conditions.split())
        assert list(list_runs(ask, f"{tmp_path}{arguments}")) == names.split(), line
    assert list(list_runs(ask, f"{tmp_path} --tag mine --sort val_loss")) == ["a", "b"]
    for wrong in ("seed", "sed=7", "seed=x"):
        assert call(f"runs {tmp_path} --where {wrong}")[0] == ExitCode.CONFIG


def test_a_comparison_shows_the_settings_that_differ(tmp_path: Path, call: Call):
    first = write_run(tmp_path / "a", "optim.lr=1e-3")
    second = write_run(tmp_path / "b", "seed=7", "optim.lr=2e-3")
    lines = [line.split() for line in call(f"runs {first} {second}")[1].splitlines()]
    assert lines[-2:] == [["seed", "1337", "7"], ["optim.lr", "0.001", "0.002"]]
