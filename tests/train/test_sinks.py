"""What a sink gets is what metrics.jsonl holds, each row once; a sink that fails stops no run and loses no row."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatoken.cli import sync
from megatoken.cli.main import main
from megatoken.config.load import load_config
from megatoken.console import Console
from megatoken.errors import ConfigError, ExitCode
from megatoken.system.metrics_log import read_metrics
from megatoken.train.sinks import SinkProcesses, check_sinks


class Collected:
    """A sink in a list."""

    rows: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012 (of all instances, on purpose)
    disk_is_full = False

    def __init__(self, run: Path, state: dict[str, Any]) -> None:
        state.setdefault("id", "a")

    def log(self, values: dict[str, float], row: dict[str, Any]) -> None:
        if values.get("train/loss") == 13.0:
            raise RuntimeError("no more room\nat all")
        self.rows.append((row["step"], values))

    def flush(self) -> None:
        if self.disk_is_full:
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        """Nothing is left."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sync.CLASSES, "trackio", Collected)
    monkeypatch.setattr(Collected, "rows", [])
    write_rows(tmp_path, 1, 4)
    (tmp_path / "status.json").write_text('{"state": "done"}')
    return tmp_path


def write_rows(run: Path, first: int, last: int, loss: float = 2.5, mode: str = "a") -> None:
    with (run / "metrics.jsonl").open(mode) as file:
        for step in range(first, last + 1):
            place = {"step": step, "tokens": 8 * step, "elapsed_seconds": 1.0}
            file.write(
                json.dumps(
                    {"kind": "train", **place, "loss": loss, "mfu": None, "grad_norm": "nan"}
                )
                + "\n"
            )
        file.write(
            json.dumps(
                {"kind": "eval", **place, "task": "piqa", "acc": 0.5, "stderr": {"acc": 0.1}}
            )
            + "\n"
        )
        file.write(json.dumps({"kind": "sample", **place, "text": ["x"]}) + "\n")


def test_every_row_is_sent_once_also_after_a_resume(run: Path) -> None:
    assert main(["sync", str(run), "--to", "trackio"]) == ExitCode.DONE
    expected = [(step, {"train/loss": 2.5}) for step in (1, 2, 3, 4)] + [
        (4, {"eval/piqa/acc": 0.5})
    ]
    assert Collected.rows == expected
    write_rows(run, 1, 6, mode="w")  # a resume has dropped rows and written them again
    assert main(["sync", str(run), "--to", "trackio"]) == ExitCode.DONE
    assert Collected.rows[5:] == [
        (5, {"train/loss": 2.5}),
        (6, {"train/loss": 2.5}),
        (6, {"eval/piqa/acc": 0.5}),
    ]
    assert json.loads((run / "sync" / "trackio.json").read_text()) == {
        "id": "a",
        "sent": {"train": 6, "eval/piqa": 6},
    }


def test_a_half_written_row_waits_for_its_end(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 5, "tok')
    rows = [row for row in sync.read_rows(run, follow=False) if row]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]


def test_a_sink_that_fails_is_one_line_and_keeps_what_was_sent(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sync", str(run), "--to", "trackio"]) == ExitCode.DONE
    write_rows(run, 5, 5, loss=13.0)
    capsys.readouterr()
    assert main(["sync", str(run), "--to", "trackio"]) == ExitCode.STORAGE
    error = capsys.readouterr().err
    assert "trackio failed: RuntimeError: no more room at all" in error
    assert error.count("\n") == 1
    assert len(read_metrics(run)) == 9


def test_rows_that_a_full_disk_swallowed_are_sent_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Collected, "disk_is_full", True)
    assert main(["sync", str(run), "--to", "trackio"]) == ExitCode.STORAGE
    assert "trackio failed: OSError: [Errno 28] No space left on device" in capsys.readouterr().err
    assert not (run / "sync" / "trackio.json").exists()
    monkeypatch.setattr(Collected, "disk_is_full", False)
    monkeypatch.setattr(Collected, "rows", [])
    assert main(["sync", str(run), "--to", "trackio"]) == ExitCode.DONE
    assert [step for step, _ in Collected.rows] == [1, 2, 3, 4, 4]


def test_room_is_proven_by_writing(tmp_path: Path) -> None:
    sync.check_room(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        sync.check_room(Path("/dev/full"))


@pytest.mark.parametrize("key", ["", "0" * 40])
def test_whether_wandb_has_a_key_is_asked_of_every_version(key: str) -> None:
    def login(*, prompt: bool, verify: bool) -> bool:
        assert (prompt, verify) == (False, False)
        return bool(key)

    def ask(*, verify: bool) -> bool:
        pytest.fail("asks at the terminal")

    assert sync.is_logged_in(SimpleNamespace(login=login)) is bool(key)
    older = SimpleNamespace(login=ask, api=SimpleNamespace(api_key=key or None))
    assert sync.is_logged_in(older) is bool(key)


def test_sinks_are_checked_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown sink 'tensorbord' .* choose from tensorboard, wandb, trackio"
    ):
        load_config("quickstart", "log.sinks=tensorbord")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed — pip install wandb"):
        check_sinks("wandb")


def test_a_sink_process_that_cannot_work_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = SinkProcesses("nonsense", tmp_path, Console())
    sinks.finish()
    said = capsys.readouterr().out
    assert "nonsense failed, see sync-nonsense.log; the run has lost nothing" in said
    assert "unknown sink 'nonsense'" in (tmp_path / "sync-nonsense.log").read_text()


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_rows(tmp_path, 1, 4)
    (tmp_path / "status.json").write_text('{"state": "done"}')
    assert main(["sync", str(tmp_path), "--to", "tensorboard"]) == ExitCode.DONE
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (s, 2.5) for s in (1, 2, 3, 4)
    ]
    assert [event.value for event in events.Scalars("eval/piqa/acc")] == [0.5]
