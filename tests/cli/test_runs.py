"""`megatoken runs`: what it says of live, finished, dead and broken runs, and how runs are compared."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatoken.cli.main import main
from megatoken.config.load import render, resolve

GONE = 2**22 + 1  # above the largest pid of Linux


def write_run(folder: Path, *overrides: str, metrics: str = "", **status: Any) -> Path:
    folder.mkdir(parents=True)
    resolved = resolve("quickstart", ["budget.steps=100", *overrides])
    (folder / "config.yaml").write_text(render(resolved.config, resolved.origins))
    (folder / "provenance.json").write_text('{"megatoken": "0.1.0"}')
    facts = {
        "state": "done",
        "step": 100,
        "total_steps": 100,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    (folder / "status.json").write_text(json.dumps(facts | status))
    rows = [{"kind": "val", "step": 90, "tokens": 9, "loss": 3.25}] + [
        {
            **{
                "kind": "train",
                "step": step,
                "tokens": step,
                "loss": 400 / step,
                "tokens_per_second": 9.0,
            },
            "elapsed_seconds": step / 1234.5,
        }
        for step in (99, 100)
    ]
    (folder / "metrics.jsonl").write_text(
        metrics or "".join(json.dumps(row) + "\n" for row in rows)
    )
    return folder


def test_a_copy_of_save_mirror_has_a_state_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_run(tmp_path / "copy") / "status.json").unlink()
    (tmp_path / "copy" / "mirror.json").write_text('{"run": "1"}')
    rows, _ = list_runs(capsys, str(tmp_path))
    assert [rows["copy"][key] for key in ("state", "message", "step")] == ["copy", "", 100]


def list_runs(
    capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[dict[str, dict[str, Any]], str]:
    """The rows by name, and the table."""
    assert main(["runs", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    return {Path(row["run"]).name: row for row in json.loads(out)["runs"]}, err


def test_states_progress_and_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a" / "finished")
    write_run(tmp_path / "live", state="running", step=40, eta_seconds=61.0, phase="validate")
    write_run(tmp_path / "dead", state="running", step=40, pid=GONE)
    write_run(tmp_path / "elsewhere", state="running", step=40, pid=GONE, host="another")
    write_run(tmp_path / "failed", state="failed", message="loss is nan")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.yaml").write_text("of another program")
    rows, table = list_runs(capsys, str(tmp_path))
    assert {name: row["state"] for name, row in rows.items()} == {
        **{
            "finished": "done",
            "live": "running",
            "dead": "dead",
            "elsewhere": "running",
            "failed": "failed",
        }
    }
    finished = {
        key: rows["finished"][key]
        for key in ("step", "total_steps", "loss", "val_loss", "tokens_per_second")
    }
    assert finished == {
        "step": 100,
        "total_steps": 100,
        "loss": 4.0,
        "val_loss": 3.25,
        "tokens_per_second": 1234.5,
    }  # of the run
    assert (rows["live"]["eta_seconds"], rows["live"]["phase"]) == (61.0, "validate")
    assert rows["live"]["bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "live").iterdir()
    )
    lines = table.splitlines()
    assert lines[0].split() == [
        "run",
        "state",
        "step",
        "loss",
        "val",
        "loss",
        "tokens/s",
        "left",
        "size",
    ]
    assert next(line for line in lines if "/live " in line).split()[1:7] == [
        *("running", "40/100", "4.0000", "3.2500", "1,234", "1m01s")
    ]
    assert next(line for line in lines if "/failed " in line).endswith("  loss is nan")


def test_objectives_are_shown_where_one_is_not_pretraining(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "base")
    write_run(tmp_path / "tuned", "objective.name=sft")
    rows, table = list_runs(capsys, str(tmp_path))
    assert [rows[name]["objective"] for name in ("base", "tuned")] == ["pretrain", "sft"]
    lines = [line.split() for line in table.splitlines()]
    assert [line[2] for line in lines] == ["objective", "pretrain", "sft"]
    _, table = list_runs(capsys, str(tmp_path / "base"), str(tmp_path / "tuned"))
    assert ["objective", "pretrain", "sft"] in [line.split() for line in table.splitlines()]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("status.json", b"{", "status.json: not JSON"),
        ("status.json", b"[" * 100_000, "status.json: not JSON"),
        ("status.json", b"[1, 2]", "status.json: holds no state"),
        (
            "status.json",
            b'{"state": 3, "step": [], "eta_seconds": Infinity}',
            "status.json: holds no state",
        ),
        ("status.json", b'{"state": "done", "step": 1e400, "pid": "x", "total_steps": true}', ""),
        ("status.json", b'{"state": "stopped\\u001b[2J\\n", "eta_seconds": NaN}', ""),
        ("status.json", None, "status.json: No such file or directory"),
        ("config.yaml", b"\xff\x00", "config.yaml: cannot read recipe"),
        ("config.yaml", b"optim: {lr: fast}", "config.yaml: optim.lr: expected a number"),
        ("metrics.jsonl", b'{"kind": "train", "st\n{"kind": "val"}\n\x00\xff', ""),
        ("config.yaml", None, "config.yaml: no such file"),
        ("metrics.jsonl", b'{"kind": "train", "step": 1, "tokens": 1, "loss": "nan"}', ""),
        ("metrics.jsonl", None, ""),
    ],
)
def test_a_broken_folder_is_a_row(
    file: str,
    content: bytes | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "whole")
    run = write_run(tmp_path / "broken")
    (run / file).unlink()
    if content is not None:
        (run / file).write_bytes(content)
    rows, table = list_runs(capsys, str(tmp_path), "--sort", "loss")
    assert (
        list(rows) == ["whole", "broken"]
        if file == "metrics.jsonl"
        else set(rows) == {"whole", "broken"}
    )
    assert message in rows["broken"]["message"]
    assert bool(message) == bool(rows["broken"]["message"])
    assert "\x1b[2J" not in table
    assert len(table.splitlines()) == 3
    list_runs(capsys, str(tmp_path / "whole"), str(run))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "closed")
    run.chmod(0)
    rows, _ = list_runs(capsys, str(tmp_path))
    run.chmod(0o700)
    assert (rows["closed"]["state"], rows["closed"]["message"][:30]) == (
        "broken",
        "status.json: Permission denied",
    )


def test_a_comparison_shows_the_settings_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        str(write_run(tmp_path / name, *words))
        for name, words in (("a", ["optim.lr=1e-3"]), ("b", ["seed=7", "optim.lr=2e-3"]))
    ]
    assert main(["runs", *runs]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", *runs]
    assert ["val", "loss", "3.2500", "3.2500"] in lines
    assert lines[-2:] == [["seed", "1337", "7"], ["optim.lr", "0.001", "0.002"]]


def test_sorted_the_best_first_and_unknown_ones_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, step in (("a", 5), ("b", None), ("c", 7)):
        write_run(tmp_path / name, step=step)
    assert list(list_runs(capsys, str(tmp_path))[0]) == ["a", "b", "c"]
    assert list(list_runs(capsys, str(tmp_path), "--sort", "step")[0]) == ["c", "a", "b"]


def test_rows_are_found_at_the_end_of_a_long_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(kind: str, numbers: range) -> str:
        return "".join(
            json.dumps({"kind": kind, "step": n, "tokens": n, "loss": n}) + "\n" for n in numbers
        )

    write_run(
        tmp_path / "long",
        metrics=rows("val", range(1, 4)) + rows("train", range(4, 4000)) + '{"kind": "tr',
    )
    found, _ = list_runs(capsys, str(tmp_path))
    assert (found["long"]["loss"], found["long"]["val_loss"]) == (3999, 3)


def test_nothing_to_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, text = list_runs(capsys, str(tmp_path))
    assert (rows, text.startswith(f"no runs below {tmp_path}")) == ({}, True)
    assert main(["runs", str(tmp_path / "nope")]) == 3
    assert (
        capsys.readouterr().err
        == f"error: no such folder — {tmp_path}/nope — name a folder that holds runs\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "no runs below runs; next: megatoken train RECIPE" in capsys.readouterr().out


def test_torch_is_not_needed() -> None:
    code = "import sys; from megatoken.cli.main import main; main(['runs', 'tests']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
