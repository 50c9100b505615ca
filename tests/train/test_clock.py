"""The date may jump during a run: no duration, no order and no number comes from it. The clock of a run goes on over
its starts."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatoken.checkpoint.manifest import read_manifest
from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.system import metrics_log
from megatoken.system.metrics_log import MetricsLogger, read_metrics
from megatoken.train.train import Trainer
from tests.train.test_changes import RECIPE, write_data

DAY = 86400.0


def train(folder: Path, name: str) -> list[dict[str, object]]:
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE.replace("DATA", str(folder / "*.npy")))
    overrides = ("save.every=1", "save.keep_last=2", "save.time_limit=1h")
    Trainer(resolve(str(recipe), overrides), folder / name, console=Console(to_stderr=True)).fit()
    return read_metrics(folder / name)


@pytest.mark.fault(52)
@pytest.mark.skipif(not hasattr(time, "tzset"), reason="Windows has no time zone of a process")
def test_a_jumping_clock_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    write_data(tmp_path, 0)
    steady = train(tmp_path, "steady")
    real, jumps, zones = (
        time.time,
        itertools.cycle((DAY, -DAY)),
        itertools.cycle(("Asia/Tokyo", "America/New_York")),
    )

    def jumping_time() -> float:
        return real() + next(jumps)

    def jumping_date(form: str, *_: object) -> str:
        monkeypatch.setenv("TZ", next(zones))
        time.tzset()
        return strftime(form, time.localtime(jumping_time()))

    strftime = time.strftime
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", jumping_time)
        patch.setattr(time, "strftime", jumping_date)
        jumped = train(tmp_path, "jumped")
    monkeypatch.undo()
    time.tzset()
    numbers = [
        [(row["kind"], row["step"], row.get("loss")) for row in rows] for rows in (steady, jumped)
    ]
    assert sorted(numbers[0], key=str) == sorted(
        numbers[1], key=str
    )  # a save is logged when it is committed
    assert all(
        0 <= float(str(row["seconds"])) < 60 for row in jumped if row["kind"] in ("train", "save")
    )
    steps = [
        sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())
        for name in ("steady", "jumped")
    ]
    assert steps[0] == steps[1] == ["step-00000003", "step-00000004"]


def test_the_time_of_a_run_leaves_out_pauses_and_lost_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_resume_goes_on_at_the_time_of_its_checkpoint(tmp_path: Path, one_thread: None) -> None:
    write_data(tmp_path, 0)
    recipe, out = tmp_path / "tiny.yaml", tmp_path / "run"
    recipe.write_text(
        RECIPE.replace("DATA", str(tmp_path / "*.npy")).replace("steps: 4", "steps: 12")
    )
    seen: list[dict[str, Any]] = []

    def train(*callbacks: Any) -> None:
        config = resolve(str(recipe), ("save.every=5", "log.every=3"))
        Trainer(
            config, out, callbacks=(seen.append, *callbacks), console=Console(to_stderr=True)
        ).fit()

    def fail(row: dict[str, Any]) -> None:
        assert (row["kind"], row["step"]) != ("train", 8)

    with pytest.raises(AssertionError):
        train(fail)
    before = read_metrics(out)
    saved = read_manifest(out / "checkpoints" / "step-00000005").meta["elapsed_seconds"]
    assert next(row["elapsed_seconds"] for row in before if row["kind"] == "save") == saved
    steps = {row["step"]: row["elapsed_seconds"] for row in before if row["kind"] == "train"}
    assert steps[3] < saved < steps[6]
    seen.clear()
    start = time.monotonic()
    train()
    wall_seconds = time.monotonic() - start
    rows = read_metrics(out)
    assert all("elapsed_seconds" in row for row in [*rows, *seen])
    times = [row["elapsed_seconds"] for row in seen if row["kind"] == "train"]
    assert times == sorted(times)
    assert saved < times[0] < times[-1] <= saved + wall_seconds
    assert times[-1] - saved >= sum(row["seconds"] for row in seen if row["kind"] == "train") - 1e-3
    kept = {row["step"]: row["elapsed_seconds"] for row in rows if row["kind"] == "train"}
    assert kept == {3: steps[3], 6: times[0], 9: times[3], 12: times[6]}
