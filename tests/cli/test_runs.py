"""`megatoken runs`: states and losses of runs, and how they are compared."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from megatoken.cli.main import main
from megatoken.config.load import render, resolve
from megatoken.errors import ExitCode
from tests.conftest import Ask

GONE = 2**22 + 1  # above the largest pid of Linux


def write_run(folder: Path, *overrides: str, **status: Any) -> Path:
    folder.mkdir(parents=True)
    resolved = resolve("quickstart", ["budget.steps=100", *overrides])
    (folder / "config.yaml").write_text(render(resolved.config, resolved.origins))
    facts = {"state": "done", "step": 100, "total_steps": 100, "pid": os.getpid()}
    facts["host"] = socket.gethostname()
    (folder / "status.json").write_text(json.dumps(facts | status))
    rows: list[dict[str, Any]] = [{"kind": "val", "step": 90, "tokens": 9, "loss": 3.25}]
    for step in (99, 100):
        place = {"step": step, "tokens": step, "elapsed_seconds": step / 1234.5}
        rows.append({"kind": "train", **place, "loss": 400 / step, "tokens_per_second": 9.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def list_runs(ask: Ask, words: object) -> dict[str, dict[str, Any]]:
    """Return the rows by name."""
    return {Path(row["run"]).name: row for row in ask(f"runs {words}")["runs"]}


def test_states_progress_and_losses(tmp_path: Path, ask: Ask, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "a" / "finished")
    write_run(tmp_path / "live", state="running", step=40, eta_seconds=61.0, phase="validate")
    write_run(tmp_path / "dead", state="running", pid=GONE)
    write_run(tmp_path / "elsewhere", "objective.name=sft", state="running", pid=GONE, host="other")
    write_run(tmp_path / "failed", state="failed", message="loss is nan")
    (write_run(tmp_path / "copy") / "status.json").unlink()
    (tmp_path / "copy" / "mirror.json").write_text('{"run": "1"}')
    (write_run(tmp_path / "broken") / "config.yaml").unlink()
    (tmp_path / "broken" / "status.json").write_text("{")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.yaml").write_text("of another program")
    rows = list_runs(ask, tmp_path)
    states = "finished=done live=running dead=dead elsewhere=running failed=failed copy=copy broken=broken"
    expected = dict(pair.split("=") for pair in states.split(" "))
    assert {name: row["state"] for name, row in rows.items()} == expected
    finished = {"step": 100, "total_steps": 100, "loss": 4.0, "val_loss": 3.25, "eta_seconds": 0.0}
    finished |= {"objective": "pretrain", "tokens_per_second": 1234.5, "message": ""}
    assert finished.items() <= rows["finished"].items()
    live = {"eta_seconds": 61.0, "phase": "validate", "step": 40}
    live["bytes"] = sum(path.stat().st_size for path in (tmp_path / "live").iterdir())
    assert live.items() <= rows["live"].items()
    assert rows["elsewhere"]["objective"] == "sft"
    assert rows["failed"]["message"] == "loss is nan"
    assert rows["copy"]["step"] == 100
    assert rows["broken"]["message"]
    assert main(["runs", str(tmp_path)]) == 0
    lines = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    row = ["running", "pretrain", "40/100", "4.0000", "3.2500", "1,234", "1m01s"]
    assert row in [line[:7] for line in lines]


def test_logs_may_be_missing_torn_or_long(tmp_path: Path, ask: Ask):
    (write_run(tmp_path / "missing") / "metrics.jsonl").unlink()
    rows = [
        {"kind": "val" if n < 4 else "train", "step": n, "tokens": n, "loss": n}
        for n in range(1, 4000)
    ]
    log = write_run(tmp_path / "long") / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tr')
    log = write_run(tmp_path / "diverged") / "metrics.jsonl"
    log.write_text('{"kind": "train", "step": 1, "tokens": 1, "loss": "nan"}\n')
    runs = list_runs(ask, f"{tmp_path} --sort loss")
    losses = [(name, row["loss"], row["val_loss"]) for name, row in runs.items()]
    assert losses == [("long", 3999, 3), ("diverged", None, None), ("missing", None, None)]


def test_a_comparison_shows_the_settings_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = [
        str(write_run(tmp_path / "a", "optim.lr=1e-3")),
        str(write_run(tmp_path / "b", "seed=7", "optim.lr=2e-3")),
    ]
    assert main(["runs", *runs]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", *runs]
    assert ["val", "loss", "3.2500", "3.2500"] in lines
    assert lines[-2:] == [["seed", "1337", "7"], ["optim.lr", "0.001", "0.002"]]


def test_sorted_the_best_first_and_unknown_ones_last(tmp_path: Path, ask: Ask):
    for name, step in (("a", 5), ("b", None), ("c", 7)):
        write_run(tmp_path / name, step=step)
    assert list(list_runs(ask, tmp_path)) == ["a", "b", "c"]
    assert list(list_runs(ask, f"{tmp_path} --sort step")) == ["c", "a", "b"]


def test_nothing_to_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert main(["runs", f"{tmp_path}/missing"]) == ExitCode.DATA
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
