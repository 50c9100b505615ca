"""The clock of a run leaves out pauses and lost steps, and continues at a resume."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatoken.base.system import metrics_log
from megatoken.base.system.metrics_log import MetricsLogger, read_metrics
from megatoken.store.manifest import read_manifest
from tests.tiny_run import read_column, train


def test_the_time_of_a_run_leaves_out_pauses_and_lost_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, strftime=time.strftime)
    monkeypatch.setattr(metrics_log, "time", clock)

    def wait_and_write(log, seconds, step, kind="train"):
        nonlocal now
        now += seconds
        log.write(kind, step, step * 10, elapsed_seconds=log.elapsed_seconds)

    with MetricsLogger.open(tmp_path) as log:
        now += 7  # what comes before the first step
        assert log.elapsed_seconds == 0
        log.start_clock()
        for step in (1, 2, 3):
            wait_and_write(log, 2, step)
        wait_and_write(log, 0, 3, "event")
    for kept, expected in ((5.0, 5.0), (0.0, 4.0), (3.0, 4.0)):
        now += 100  # a pause
        with MetricsLogger.open(tmp_path) as log:
            log.rewind(2, kept)  # from a checkpoint of step 2
            now += 7
            assert log.elapsed_seconds == expected
            log.start_clock()
            wait_and_write(log, 1, 3)
            log.rewind(2, kept)  # while it trains
            assert log.elapsed_seconds == expected
            wait_and_write(log, 1, 3)
        rows = read_metrics(tmp_path)
        assert [row["elapsed_seconds"] for row in rows] == [2.0, 4.0, 6.0, expected + 1]
        assert [row["step"] for row in rows] == [1, 2, 3, 3]


def test_a_resume_continues_at_the_time_of_its_checkpoint(data: str, tmp_path: Path):
    settings = f"{data} save.every=5 evaluate.every=0"

    def fail(row):
        assert (row["kind"], row["step"]) != ("train", 8)

    with pytest.raises(AssertionError):
        train(tmp_path, settings, callbacks=[fail])
    saved = read_manifest(tmp_path / "checkpoints/step-00000005").meta["elapsed_seconds"]
    before = read_column(tmp_path, "elapsed_seconds")
    start = time.monotonic()
    train(tmp_path, settings)
    times = read_column(tmp_path, "elapsed_seconds")
    assert [*times.values()] == sorted(times.values())
    assert times[5] == before[5] < saved < times[6]
    assert times[12] < saved + time.monotonic() - start
    assert all("elapsed_seconds" in row for row in read_metrics(tmp_path))
