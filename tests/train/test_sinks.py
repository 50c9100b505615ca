"""A sink gets each row of metrics.jsonl once; a sink that fails stops no run and loses no row."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatoken.base.config.load import load_config
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, ExitCode
from megatoken.cli.main import main
from megatoken.study.commands import sync
from megatoken.study.observers import SinkProcesses, check_sinks
from tests.processes import wait_until

Rows = list[tuple[int, dict[str, float]]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Return the rows that a sink "trackio" gets; its disk is full after a row of step 13."""
    rows: Rows = []

    def open_sink(run: Path, state: dict[str, Any]) -> sync.Sink:
        state.setdefault("id", "a")

        def flush() -> None:
            if rows and rows[-1][0] == 13:
                raise OSError(28, "No space left\non device")

        return sync.Sink(lambda values, row: rows.append((row["step"], values)), flush, list)

    monkeypatch.setitem(sync.OPENERS, "trackio", open_sink)
    return rows


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "status.json").write_text('{"state": "done"}')
    return write_rows(tmp_path, 1, 4)


def write_rows(run: Path, first: int, last: int) -> Path:
    """Append train rows of steps first to last, then an eval and a sample row."""
    values: dict[str, Any] = {"loss": 2.5, "mfu": None, "grad_norm": "nan"}
    rows = [{"kind": "train", "step": step, **values} for step in range(first, last + 1)]
    rows.append({"kind": "eval", "step": last, "task": "piqa", "acc": 0.5, "stderr": {"acc": 0.1}})
    rows.append({"kind": "sample", "step": last, "text": ["x"]})
    with (run / "metrics.jsonl").open("a") as file:
        for row in rows:
            position = {"tokens": 8 * row["step"], "elapsed_seconds": 1.0}
            file.write(json.dumps(row | position) + "\n")
    return run


def list_rows(first: int, last: int) -> Rows:
    """Return what a sink gets of `write_rows`."""
    rows = [(step, {"train/loss": 2.5}) for step in range(first, last + 1)]
    return [*rows, (last, {"eval/piqa/acc": 0.5})]


def test_every_row_is_sent_once_also_after_a_resume(run: Path, sent: Rows):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 5, "tok')  # a row that is being written
    assert sync_trackio(run) == ExitCode.DONE
    assert sent == list_rows(1, 4)
    (run / "metrics.jsonl").unlink()
    write_rows(run, 1, 6)  # a resume has dropped rows and written them again
    assert sync_trackio(run) == ExitCode.DONE
    assert sent == [*list_rows(1, 4), *list_rows(5, 6)]
    state = {"id": "a", "sent": {"train": 6, "eval/piqa": 6}}
    assert json.loads((run / "sync" / "trackio.json").read_text()) == state


def sync_trackio(run: Path, *options: str) -> int:
    return main(["sync", str(run), "--to", "trackio", *options])


def test_following_sends_rows_as_they_come_until_the_run_ends(
    run: Path, sent: Rows, monkeypatch: pytest.MonkeyPatch
):
    (run / "status.json").write_text('{"state": "running"}')
    starts = iter([5, 7])

    def wait(seconds: float) -> None:
        start = next(starts)
        write_rows(run, start, start + 1)
        if start == 7:
            (run / "status.json").write_text('{"state": "stopped"}')

    monkeypatch.setattr("time.sleep", wait)
    assert sync_trackio(run, "--follow") == ExitCode.DONE
    assert sent == [*list_rows(1, 4), *list_rows(5, 6), *list_rows(7, 8)]


def test_rows_of_a_sink_that_fails_are_sent_again(
    run: Path, sent: Rows, capsys: pytest.CaptureFixture[str]
):
    write_rows(run, 5, 13)
    assert sync_trackio(run) == ExitCode.STORAGE
    assert capsys.readouterr().err.count("\n") == 1
    assert not (run / "sync" / "trackio.json").exists()
    sent.clear()
    write_rows(run, 14, 14)
    assert sync_trackio(run) == ExitCode.DONE
    assert sent == [*list_rows(1, 4), *list_rows(5, 13), *list_rows(14, 14)]


def test_sinks_and_their_room_are_checked_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sync.check_free_space(tmp_path / "new")  # by writing
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        sync.check_free_space(Path("/dev/full"))
    with pytest.raises(ConfigError):
        load_config("quickstart", "log.sinks=tensorbord")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError):
        check_sinks("wandb")


def test_a_sink_process_that_fails_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sinks = SinkProcesses("nonsense", tmp_path, Console())
    sinks.start()
    sinks.finish()
    assert "nonsense failed" in capsys.readouterr().out
    assert (tmp_path / "sync-nonsense.log").read_text().startswith("error: ")


def test_tensorboard_files_hold_the_numbers(run: Path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["sync", str(run), "--to", "tensorboard"]) == ExitCode.DONE
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    losses = events.Scalars("train/loss")
    assert [(event.step, event.value) for event in losses] == [(n, 2.5) for n in (1, 2, 3, 4)]
    assert [event.value for event in events.Scalars("eval/piqa/acc")] == [0.5]
    assert abs(losses[-1].wall_time - time.time()) < 3600
    assert "settings" in events.Tags()["tensors"]


def test_wandb_takes_the_project_of_its_environment(run: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name, value in (("MODE", "offline"), ("PROJECT", "other-project"), ("TAGS", "tiny-tag")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert main(["sync", str(run), "--to", "wandb"]) == ExitCode.DONE
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    for text in (b"other-project", b"tiny-tag"):  # written by another process
        wait_until(lambda text=text: text in file.read_bytes())
