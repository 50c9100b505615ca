"""Going on with a run by its folder, and beyond its end: budget, learning rate, the checkpoint it starts from."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatoken.checkpoint.commit import list_steps
from megatoken.cli.main import main
from megatoken.cli.runs import read_config
from megatoken.config.batch_ramp import BatchRamp
from megatoken.config.fields import Duration
from megatoken.config.load import resolve
from megatoken.optim.lr_schedule import LRSchedule
from megatoken.system.metrics_log import read_metrics
from megatoken.train.train import Trainer

RECIPE = """\
model: {n_layer: 1, n_head: 2, d_model: 16, seq_len: 16}
data: {path: DATA, tokenizer: bytes}
optim: {lr: 1e-3, warmup: 2steps}
budget: {batch_tokens: 64}
machine: {device: cpu, precision: fp32, micro_batch: 4, threads: 1}
save: {every: 3steps, keep_last: 1, keep_every: 3steps}
evaluate: {every: 0}
log: {plots: false}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    text = b"to be or not to be, that is the question. " * 20
    np.save(folder / "train_0.npy", np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
    (folder / "tiny.yaml").write_text(RECIPE.replace("DATA", str(folder / "*.npy")))
    return folder / "tiny.yaml"


@pytest.fixture(scope="module")
def finished(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs of 8 steps by schedule; the rate of wsd falls in the last 4."""
    runs = {}
    for schedule, words in {
        "cosine": ["budget.steps=8"],
        "wsd": ["budget.tokens=512", "optim.decay=4steps"],
    }.items():
        runs[schedule] = tmp_path_factory.mktemp(schedule) / "run"
        assert train(recipe, "--out", runs[schedule], f"optim.schedule={schedule}", *words) == 0
    return runs


@pytest.fixture
def run(finished: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of a finished run that a test may change."""
    shutil.copytree(finished[getattr(request, "param", "cosine")], tmp_path / "run")
    return tmp_path / "run"


def train(*words: object) -> int:
    return main(["train", *map(str, words)])


def stop_after(
    step: int, recipe: Path, out: Path, *overrides: str, extend: Duration | None = None
) -> int:
    resolved = resolve(str(recipe), overrides)
    return (
        Trainer(resolved, out, extend=extend, callbacks=[lambda row: row["step"] == step])
        .fit()
        .code
    )


def rates(run: Path) -> dict[int, float]:
    return {row["step"]: row["lr"] for row in read_metrics(run) if row["kind"] == "train"}


def events(run: Path, what: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["kind"] == "event" and row["what"] == what]


pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_goes_on_by_its_folder_with_its_own_settings_and_their_origins(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert stop_after(2, recipe, out, "budget.steps=8") == 75
    capsys.readouterr()
    config = (out / "config.yaml").read_text()
    assert f"lr: 0.001                                   # {recipe}:3\n" in config
    assert train(out) == 0
    assert list_steps(out / "checkpoints")[-1] == 8
    assert (out / "config.yaml").read_text() == config
    assert train(out) == 0
    text = capsys.readouterr().out
    assert f"run      run in {out}\n" in text


@pytest.mark.parametrize("length", ["4steps", "256tok", "0.5dur"])
def test_an_extended_cosine_rises_to_its_new_place(
    run: Path, length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = rates(run)
    assert train(run, "--extend", length) == 0
    schedule = LRSchedule(
        decay="cosine", peak_lr=1e-3, min_lr_ratio=0.1, warmup=2, decay_length=None, total=12
    )
    assert rates(run) == pytest.approx(old | {step: schedule.lr(step - 1) for step in range(9, 13)})
    (event,) = events(run, "schedule changed")
    numbers = ("step", "old_total_steps", "total_steps", "lr_before", "lr_after", "lr_end")
    expected = [8, 8, 12, old[8], schedule.lr(8), schedule.lr(11)]
    assert [event[key] for key in numbers] == pytest.approx(expected)
    assert event["message"] in capsys.readouterr().out
    assert [(e["old"], e["new"]) for e in events(run, "setting changed")] == [("8", "12")]
    lines = (run / "config.yaml").read_text().splitlines()
    assert [line.split() for line in lines if "--extend" in line] == [
        ["steps:", "12", "#", "--extend", length]
    ]
    assert json.loads((run / "status.json").read_text())["total_steps"] == 12
    assert train(run) == 0  # finished
    assert train(run, "--extend", "1steps") == 0
    assert list_steps(run / "checkpoints")[-1] == 13


@pytest.mark.parametrize("run", ["wsd"], indirect=True)
def test_an_extended_wsd_goes_on_from_before_its_decay(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {
        path: path.read_bytes()
        for path in (run / "metrics.jsonl", *run.glob("checkpoints/step-0000000[68]/*.st*"))
    }
    old = rates(run)
    assert [old[4], old[5]] == [1e-3, 1e-3]
    assert old[8] == pytest.approx(1e-3 * (0.1 + 0.9 / 4))
    assert train(run, "--extend", "4steps") == 0
    aside = run / "finished-step-00000008"
    assert str(aside) in capsys.readouterr().out
    new = rates(run)
    assert [new[step] for step in range(4, 10)] == [1e-3] * 6
    assert [new[step] for step in (10, 11, 12)] == pytest.approx([old[step] for step in (6, 7, 8)])
    assert read_config(run).budget.tokens == 12 * 64
    assert list_steps(run / "checkpoints") == [3, 6, 9, 12]
    assert list_steps(aside / "checkpoints") == [6, 8]
    assert (aside / "metrics.jsonl").read_bytes() == before[run / "metrics.jsonl"]
    assert main(["sample", str(aside), "to be", "--tokens", "2"]) == 0
    assert main(["verify", str(run)]) == 0


@pytest.mark.parametrize("run", ["wsd"], indirect=True)
def test_an_extended_wsd_equals_one_that_was_longer_from_the_start(
    run: Path, recipe: Path, tmp_path: Path
) -> None:
    words = ["optim.schedule=wsd", "optim.decay=4steps", "budget.tokens=768"]
    assert train(recipe, "--out", tmp_path / "long", *words) == 0
    assert train(run, "--extend", "256tok") == 0
    losses = [
        {r["step"]: r["loss"] for r in read_metrics(out) if r["kind"] == "train"}
        for out in (run, tmp_path / "long")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("run", ["wsd"], indirect=True)
def test_without_a_checkpoint_before_the_decay_the_rate_rises(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    assert train(run, "--extend", "4steps") == 0
    assert "no checkpoint from before the decay of wsd" in capsys.readouterr().out
    (event,) = events(run, "schedule changed")
    expected = {"lr_before": 3.25e-4, "lr_after": 1e-3, "lr_end": 3.25e-4}
    assert {key: event[key] for key in expected} == pytest.approx(expected)


def test_the_same_extension_given_again_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before its first save, and stopped after one."""
    with monkeypatch.context() as patch:
        patch.setattr("megatoken.train.train.tune", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(run, "--extend", "8steps")
    assert (read_config(run).budget.steps, list_steps(run / "checkpoints")[-1]) == (16, 8)
    assert stop_after(10, run, run, extend=Duration(8)) == 75
    assert "not extended: step 8" in capsys.readouterr().out
    assert train(run, "--extend", "8steps") == 0
    assert "not extended: step 10" in capsys.readouterr().out
    assert list_steps(run / "checkpoints")[-1] == 16


def test_a_new_run_is_not_extended(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    assert train(recipe, "--out", out, "budget.steps=8", "--extend", "4steps") == 2
    assert "no run to extend" in capsys.readouterr().err
    assert not out.exists()


def test_what_comes_before_a_decay() -> None:
    wsd = LRSchedule(
        decay="wsd", peak_lr=1.0, min_lr_ratio=0.1, warmup=10, decay_length=20, total=110
    )
    assert [wsd.is_before_decay(step) for step in (0, 90, 91, 110)] == [True, True, False, False]
    assert wsd.lr(90) == 1.0 > wsd.lr(91)
    ramp = replace(wsd, ramp=BatchRamp(1, 2, 20), decay_length=40, total=200)
    first = next(step for step in range(200) if not ramp.is_before_decay(step))
    assert ramp.lr(first - 1) == 1.0 > ramp.lr(first)
