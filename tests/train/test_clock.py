"""The clock of a run leaves out pauses and lost steps, and continues at a resume."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatoken.checkpoint.manifest import read_manifest
from megatoken.system import metrics_log
from megatoken.system.metrics_log import MetricsLogger, read_metrics
from tests.tiny_run import read_column, train


def test_the_time_of_a_run_leaves_out_pauses_and_lost_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 1000.0
    monkeypatch.setattr(
        metrics_log, "time", SimpleNamespace(monotonic=lambda: now, strftime=time.strftime)
    )

    def write(log: MetricsLogger, kind: str, step: int) -> None:
        log.write(kind, step, step * 10, elapsed_seconds=log.elapsed_seconds)

    with MetricsLogger.open(tmp_path) as log:
        now += 7  # what comes before the first step
        assert log.elapsed_seconds == 0
        log.start_clock()
        for step in (1, 2, 3):
            now += 2
            write(log, "train", step)
        write(log, "event", 3)
    for kept, expected in ((5.0, 5.0), (0.0, 4.0), (3.0, 4.0)):
        now += 100  # a pause
        with MetricsLogger.open(tmp_path) as log:
            log.rewind(2, kept)  # from a checkpoint of step 2
            now += 7
            assert log.elapsed_seconds == expected
            log.start_clock()
            now += 1
            write(log, "train", 3)
            log.rewind(2, kept)  # while it trains
            assert log.elapsed_seconds == expected
            now += 1
            write(log, "train", 3)
        rows = [
            (row["kind"], row["step"], row["elapsed_seconds"]) for row in read_metrics(tmp_path)
        ]
        assert rows == [
            ("train", 1, 2.0),
            ("train", 2, 4.0),
            ("event", 3, 6.0),
            ("train", 3, expected + 1),
        ]


def test_a_resume_continues_at_the_time_of_its_checkpoint(data: str, tmp_path: Path):
    out, seen = tmp_path / "run", list[dict[str, Any]]()
    settings = f"{data} save.every=5 log.every=3 evaluate.every=0"

    def fail(row: dict[str, Any]) -> None:
        assert (row["kind"], row["step"]) != ("train", 8)

    with pytest.raises(AssertionError):
        train(out, settings, callbacks=[fail])
    saved = read_manifest(out / "checkpoints" / "step-00000005").meta["elapsed_seconds"]
    assert read_column(out, "elapsed_seconds", "save") == {5: saved}
    before = read_column(out, "elapsed_seconds")
    assert before[3] < saved < before[6]
    start = time.monotonic()
    train(out, settings, callbacks=[seen.append])
    wall_seconds = time.monotonic() - start
    assert all("elapsed_seconds" in row for row in [*read_metrics(out), *seen])
    rows = [row for row in seen if row["kind"] == "train"]
    times = [saved, *(row["elapsed_seconds"] for row in rows), saved + wall_seconds]
    assert times == sorted(times)
    assert times[-2] - saved >= sum(row["seconds"] for row in rows) - 1e-3
    logged = {3: before[3], 6: times[1], 9: times[4], 12: times[7]}
    assert read_column(out, "elapsed_seconds") == logged
