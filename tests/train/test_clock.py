"""The date may jump during a run: no duration, no order and no number comes from it."""

import itertools
import time
from pathlib import Path

import pytest

from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.pretrain import Trainer
from megatoken.train.metrics_log import read_metrics
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
def test_a_jumping_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    write_data(tmp_path, 0)
    steady = train(tmp_path, "steady")
    real, jumps, zones = time.time, itertools.cycle((DAY, -DAY)), itertools.cycle(("Asia/Tokyo", "America/New_York"))

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
    numbers = [[(row["kind"], row["step"], row.get("loss")) for row in rows] for rows in (steady, jumped)]
    assert sorted(numbers[0], key=str) == sorted(numbers[1], key=str)  # a save is logged when it is committed
    assert all(0 <= float(str(row["seconds"])) < 60 for row in jumped if row["kind"] in ("train", "save"))
    steps = [sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("steady", "jumped")]
    assert steps[0] == steps[1] == ["step-00000003", "step-00000004"]
