"""The best checkpoint is linked, runs stop early, and samples at the start."""

from pathlib import Path

import pytest

from megatoken.base.console import Console
from megatoken.base.errors import ExitCode
from megatoken.store.commit import list_steps
from megatoken.text.load_pretrained import load_pretrained
from megatoken.train.objective import TextBatches
from tests.tiny_run import fingerprint, read_events, train

# The run ends at 28, three validations after the best one at 16.
LOSSES = {0: 5.5, 4: 4.0, 8: 3.0, 12: 3.1, 16: 2.9, 20: 2.95, 24: 2.9, 28: 3.4, 32: 3.5}
END = 28


@pytest.fixture(scope="module")
def settings(data: str) -> str:
    best = "save.keep_best=true save.keep_last=1 save.every=6steps evaluate.every=4steps"
    return f"{data} model.n_layer=1 budget.steps=40 {best} evaluate.patience=3"


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The validation losses that a run finds, by step; each can be changed."""
    found = dict(LOSSES)
    validate = TextBatches.validate

    def measured(batches, *arguments):
        row, text = validate(batches, *arguments)
        return row | {"loss": found.get(batches.run.state.step, 9.0)}, text

    monkeypatch.setattr(TextBatches, "validate", measured)
    return found


def test_the_run_ends_when_the_loss_has_not_fallen_and_the_best_is_kept(
    settings: str, tmp_path: Path, losses: dict[int, float], capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    summary = train(out, settings, console=Console())
    assert "best, step 16, validation loss 2.9000" in capsys.readouterr().out
    assert (summary.code, summary.steps) == (ExitCode.DONE, END)
    assert list_steps(out / "checkpoints") == [16, END]
    assert (out / "best").readlink() == Path("checkpoints/step-00000016")
    assert load_pretrained(f"{out}/best").source == f"{out}/best"
    assert [event["step"] for event in read_events(out, "early stop")] == [END]
    assert train(out, settings).steps == END  # finished
    assert train(tmp_path / "target", settings, "evaluate.target_loss=3").steps == 8
    # A free setting: the run continues, and ends again.
    assert train(out, settings, "evaluate.patience=4").steps == 32
    losses[36] = 2.0
    assert train(out, settings, "evaluate.patience=0").steps == 40
    assert (out / "best").readlink() == Path("checkpoints/step-00000036")
    assert list_steps(out / "checkpoints") == [36, 40]


@pytest.mark.long
@pytest.mark.usefixtures("losses")
def test_a_run_that_is_stopped_repeatedly_ends_at_the_same_step(settings: str, tmp_path: Path):
    once, often = tmp_path / "once", tmp_path / "often"
    train(once, settings)
    for stop in (3, 9, 17, 27):
        assert train(often, settings, stop=stop).steps == stop
    assert train(often, settings).steps == END
    assert fingerprint(often) == fingerprint(once)
    assert (often / "best").readlink() == (once / "best").readlink()


def test_losses_that_are_not_finite_are_never_best(
    settings: str, tmp_path: Path, losses: dict[int, float]
):
    losses |= {0: float("nan"), 4: float("inf"), 8: float("nan")}
    assert train(tmp_path, settings).steps == 8
    assert not (tmp_path / "best").exists()
