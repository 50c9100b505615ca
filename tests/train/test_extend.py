"""Resuming a run by its folder, and beyond its end: budget, learning rate, the first checkpoint."""

import shutil
from pathlib import Path

import pytest

from megatoken.base.config.load import resolve_run
from megatoken.base.errors import ExitCode
from megatoken.cli.main import main
from megatoken.optim.lr_schedule import LRSchedule
from megatoken.store.commit import list_steps
from megatoken.store.run_state import read_config
from megatoken.train.train import Trainer
from tests import tiny_run
from tests.tiny_run import TINY, newest_step, read_column, read_events


@pytest.fixture(scope="module")
def settings(data: str) -> str:
    saving = "save.every=3 save.keep_last=1 save.keep_every=3 evaluate.every=0"
    return f"{data} optim.lr=1e-3 optim.warmup=2steps {saving}"


def train(line: object) -> int:
    return main(f"train {line}".split())


def test_a_run_resumes_by_its_folder_with_its_own_settings_and_their_origins(
    settings: str, tmp_path: Path
):
    out, new = tmp_path / "run", tmp_path / "new"
    tiny_run.train(out, settings, stop=2)
    config = (out / "config.yaml").read_text()
    assert any(line.split()[-1] == f"{TINY}:4" for line in config.splitlines())
    assert train(out) == 0
    assert newest_step(out) == 12
    assert (out / "config.yaml").read_text() == config
    assert train(out) == 0
    # A new run has nothing to extend.
    assert train(f"{TINY} --out {new} {settings} --extend 4steps") == ExitCode.CONFIG
    assert not new.exists()


@pytest.mark.long
def test_an_extended_cosine_rises_to_its_new_place(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"
    tiny_run.train(run, settings, "optim.schedule=cosine budget.steps=8")
    old = read_column(run, "lr")
    assert train(f"{run} --extend 0.5dur") == 0
    schedule = LRSchedule(
        decay="cosine", peak_lr=1e-3, min_lr_ratio=0.1, warmup=2, decay_length=None, total=12
    )
    new = {step: schedule.lr(step - 1) for step in range(9, 13)}
    assert read_column(run, "lr") == pytest.approx(old | new)
    (event,) = read_events(run, "schedule changed")
    numbers = ("step", "old_total_steps", "total_steps", "lr_before", "lr_after", "lr_end")
    assert [event[key] for key in numbers] == pytest.approx([8, 8, 12, old[8], new[9], new[12]])
    assert [(e["old"], e["new"]) for e in read_events(run, "setting changed")] == [("8", "12")]
    lines = (run / "config.yaml").read_text().splitlines()
    assert ["steps:", "12", "#", "--extend", "0.5dur"] in [line.split() for line in lines]
    assert train(run) == 0  # finished
    # The same extension given again continues: killed before its first save, and stopped after one.
    with monkeypatch.context() as patch:
        patch.setattr("megatoken.train.setup.tune", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(f"{run} --extend 8steps")
    assert (read_config(run).budget.steps, newest_step(run)) == (20, 12)
    extended = resolve_run(run, run / "config.yaml")
    stopped = Trainer(extended, run, callbacks=[tiny_run.stop_at(14)]).fit()
    assert (stopped.code, newest_step(run)) == (ExitCode.STOPPED, 14)
    assert train(f"{run} --extend 8steps") == 0
    assert newest_step(run) == 20


def test_an_extended_wsd_goes_on_from_before_its_decay(settings: str, tmp_path: Path):
    """Training continues as if always meant to be longer; the old end is moved aside."""
    run, other, long = (tmp_path / name for name in ("run", "other", "long"))
    wsd = f"{settings} optim.schedule=wsd optim.decay=4steps budget.steps=0"
    tiny_run.train(run, wsd, "budget.tokens=1536")
    tiny_run.train(long, wsd, "budget.tokens=2304")
    shutil.copytree(run, other)
    log = (run / "metrics.jsonl").read_bytes()
    assert train(f"{run} --extend 768tok") == 0
    for key in ("lr", "loss"):
        assert read_column(run, key) == read_column(long, key)
    aside = run / "finished-step-00000008"
    assert read_config(run).budget.tokens == 12 * 192
    assert list_steps(run / "checkpoints") == [3, 6, 9, 12]
    assert list_steps(aside / "checkpoints") == [6, 8]
    assert (aside / "metrics.jsonl").read_bytes() == log
    assert main(f"sample {aside} to --tokens 2".split()) == 0
    assert main(f"verify {run}".split()) == 0
    # Without a checkpoint before the decay the rate rises.
    shutil.rmtree(other / "checkpoints/step-00000003")
    assert train(f"{other} --extend 4steps") == 0
    (event,) = read_events(other, "schedule changed")
    expected = {"lr_before": 3.25e-4, "lr_after": 1e-3, "lr_end": 3.25e-4}
    assert {key: event[key] for key in expected} == pytest.approx(expected)
