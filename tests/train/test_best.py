"""The best checkpoint is kept under a name, a run ends when its validation loss stops falling, samples at the start."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatoken.checkpoint.commit import list_steps
from megatoken.config.load import resolve
from megatoken.console import Console
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.errors import ExitCode
from megatoken.system.metrics_log import read_metrics
from megatoken.train import actions
from megatoken.train.run import Run
from megatoken.train.train import Summary, Trainer

RECIPE = """\
model: {n_layer: 1, n_head: 2, d_model: 16, seq_len: 16}
data: {path: DATA, tokenizer: bytes}
optim: {lr: 1e-2}
budget: {steps: 40, batch_tokens: 64}
machine: {device: cpu, precision: fp32, micro_batch: 4, threads: 1, attention: flash}
save: {keep_best: true, keep_last: 1, every: 6steps}
evaluate: {every: 4steps, tokens: 256, patience: 3}
log: {plots: false}
"""
LOSSES = {
    0: 5.5,
    4: 4.0,
    8: 3.0,
    12: 3.1,
    16: 2.9,
    20: 2.95,
    24: 2.9,
    28: 3.4,
    32: 3.5,
}  # the end, after 16: 28
END = 28


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    text = b"to be or not to be, that is the question. " * 100
    for split in ("train", "val"):
        np.save(folder / f"{split}_0.npy", np.frombuffer(text, np.uint8).astype(np.uint16))
    (folder / "tiny.yaml").write_text(RECIPE.replace("DATA", str(folder / "*.npy")))
    return folder / "tiny.yaml"


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The validation losses that a run finds, by step; each can be changed."""
    found = dict(LOSSES)
    measure = actions._measure_loss

    def measured(run: Run, *arguments: Any) -> dict[str, Any]:
        return measure(run, *arguments) | {"loss": found.get(run.state.step, 9.0)}

    monkeypatch.setattr(actions, "_measure_loss", measured)
    return found


def train(recipe: Path, out: Path, *words: str, stop: int = 0) -> Summary:
    stops = [lambda row: row["kind"] == "train" and row["step"] == stop]
    return Trainer(
        resolve(str(recipe), words), out, callbacks=stops, console=Console(quiet=True)
    ).fit()


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_run_ends_when_the_loss_has_not_fallen_and_the_best_is_kept(
    recipe: Path, tmp_path: Path, losses: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a run"
    summary = Trainer(resolve(str(recipe)), out).fit()
    *_, best, done = capsys.readouterr().out.splitlines()
    assert best == f"best: {out}/best, step 16, validation loss 2.9000"
    assert done == f"done: {out}; next: megatoken sample '{out}' \"your prompt\""
    assert (summary.code, summary.steps) == (ExitCode.DONE, END)
    assert list_steps(out / "checkpoints") == [16, END]
    assert (out / "best").readlink() == Path("checkpoints/step-00000016")
    assert load_pretrained(str(out / "best")).source == str(out / "best")
    (event,) = [row for row in read_metrics(out) if row["kind"] == "event"]
    assert (event["what"], event["step"]) == ("early stop", END)
    assert (
        event["message"]
        == "the validation loss has not improved on 2.9000 at step 16 for 3 validations"
    )
    assert json.loads((out / "status.json").read_text())["state"] == "done"
    assert train(recipe, out).steps == END  # finished
    assert (
        train(recipe, out, "evaluate.patience=4").steps == 32
    )  # a free setting: it goes on, and ends again
    losses[36] = 2.0
    assert train(recipe, out, "evaluate.patience=0").steps == 40
    assert (out / "best").readlink() == Path("checkpoints/step-00000036")
    assert list_steps(out / "checkpoints") == [36, 40]


@pytest.mark.usefixtures("losses")
def test_a_run_that_is_stopped_again_and_again_ends_at_the_same_step(
    recipe: Path, tmp_path: Path
) -> None:
    train(recipe, tmp_path / "whole")
    stops = (3, 5, 9, 17, 19, 27)
    for stop in stops:
        assert train(recipe, tmp_path / "cut", stop=stop).steps == stop
    assert train(recipe, tmp_path / "cut").steps == END
    for step in (16, END):
        name = f"checkpoints/step-{step:08d}"
        assert weights(tmp_path / "cut" / name) == weights(tmp_path / "whole" / name)
    assert (tmp_path / "cut" / "best").readlink() == (tmp_path / "whole" / "best").readlink()
    assert all(first < second for first, second in pairwise(stops))


def test_losses_that_are_not_finite_are_never_best(
    recipe: Path, tmp_path: Path, losses: dict[int, float]
) -> None:
    losses.update({0: float("nan"), 4: float("inf"), 8: float("nan")})
    assert train(recipe, tmp_path / "run").steps == 8
    assert not (tmp_path / "run" / "best").exists()


def test_a_sample_before_the_first_step(recipe: Path, tmp_path: Path) -> None:
    words = [
        "sample.every=2",
        "sample.tokens=4",
        "evaluate.every=0",
        "evaluate.patience=0",
        "budget.steps=3",
    ]
    for start in (True, False):
        out = tmp_path / str(start)
        train(recipe, out, *words, f"sample.at_start={start}")
        steps = [row["step"] for row in read_metrics(out) if row["kind"] == "sample"]
        assert steps == ([0, 2, 3] if start else [2, 3])
    assert (tmp_path / "True" / "samples" / "step-00000000.txt").stat().st_size > 1
