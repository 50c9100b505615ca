"""A sweep tries what its ranges say, keeps the best recipe, and goes on after a stop."""

import json
import signal
import subprocess
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatoken.cli import sweep
from megatoken.cli.main import main
from megatoken.cli.sweep import SearchRange, parse_space
from megatoken.config.load import load_config
from megatoken.data.prepare import prepare
from megatoken.errors import ConfigError, ExitCode
from megatoken.launch.local import COMMAND

optuna = pytest.importorskip("optuna")
RECIPE = """version: 1
model: {{n_layer: 1, n_head: 1, d_model: 16, seq_len: 16}}
data: {{path: {data}}}
optim: {{schedule: constant}}
budget: {{steps: {steps}, batch_tokens: 256}}
evaluate: {{every: 5steps, tokens: 1024}}
machine: {{precision: fp32, threads: 1, micro_batch: 16, attention: explicit, adamw: foreach}}
log: {{plots: false}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 400)
    prepare(str(tmp_path / "text.txt"), tmp_path / "data", tokenizer="bytes", val_fraction=0.1, workers=1)
    return write_recipe(tmp_path, steps=20)


def write_recipe(folder: Path, steps: int) -> str:
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.format(data=folder / "data", steps=steps))
    return str(path)


def test_ranges_are_read_and_checked_as_values_of_the_recipe() -> None:
    words = ["optim.lr=log:1e-4..3e-3", "model.n_layer=2..4", "optim.schedule=wsd|cosine", "seed=3"]
    ranges, fixed = parse_space("quickstart", words)
    assert ranges == [
        SearchRange("optim.lr", (), 1e-4, 3e-3, True),
        SearchRange("model.n_layer", (), 2, 4),
        SearchRange("optim.schedule", ("wsd", "cosine")),
    ]
    assert fixed == ["seed=3"]


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("optim.lrr=log:1e-4..1e-3", "unknown key 'optim.lrr'"),
        ("optim.lr=log:1e-4..fast", "optim.lr: expected a number, got 'fast'"),
        ("optim.lr=1e-3..1e-4", "optim.lr: 1e-3 is not below 1e-4"),
        ("optim.lr=log:0..1e-3", "a logarithmic range begins above 0"),
        ("optim.beta1=0.9..1.5", "optim.beta1: must be at least 0 and at most 1, got 1.5"),
        ("optim.warmup=0.1dur..0.2dur", "optim.warmup has no range"),
        ("optim.schedule=wsd|cosin", "optim.schedule: expected one of cosine"),
        ("optim.lr=1e-3", "nothing to search"),
    ],
)
def test_a_wrong_range_is_one_line(word: str, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_space("quickstart", [word])
    assert error in str(raised.value)


def test_a_search_keeps_the_best_rate_and_goes_on_with_more_trials(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", recipe, "--out", str(tmp_path / "out"), "--json", "optim.lr=log:1e-5..1e-1"]
    assert main([*words, "--trials", "1"]) == ExitCode.DONE
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["trials"]) == 1
    assert main([*words, "--trials", "3"]) == ExitCode.DONE
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [trial["state"] for trial in answer["trials"]] == ["complete"] * 3
    losses = {float(trial["values"]["optim.lr"]): trial["loss"] for trial in answer["trials"]}
    assert len(losses) == 3
    best = min(losses, key=lambda rate: losses[rate])
    assert best > min(losses)  # in 20 steps the lowest rate learns least
    assert answer["best"]["loss"] == losses[best]
    assert load_config(answer["recipe"]).optim.lr == best
    assert main(["sweep", recipe, "--out", str(tmp_path / "out"), "optim.lr=1e-5|3e-3"]) == ExitCode.CONFIG
    assert "the sweep in this folder has another ranges" in capsys.readouterr().err


def test_a_search_that_goes_on_draws_other_values(recipe: str, tmp_path: Path) -> None:
    ranges, _ = parse_space(recipe, ["optim.lr=log:1e-4..1e-1"])
    drawn = []
    for _ in range(3):
        study = sweep._open_study(optuna, Namespace(seed=0, jobs=1, out=tmp_path, recipe=recipe), ranges, [])
        trial = study.ask()
        drawn.append(ranges[0].suggest(trial))
        study.tell(trial, 1.0)
    assert len({*drawn}) == 3


def test_a_sweep_that_is_ended_goes_on_where_it_was(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path, steps=400)
    out = tmp_path / "out"
    words = ["sweep", recipe, "--out", str(out), "--trials", "1", "optim.lr=log:1e-3..1e-2", "save.every=20steps"]
    saved = 0
    for number, code in ((signal.SIGTERM, ExitCode.STOPPED), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL)
        wait_for(lambda: newest_step(out) > saved or process.poll() is not None)  # noqa: B023 (used at once)
        process.send_signal(number)
        assert process.wait() == code
        wait_for(lambda: json.loads((out / "trial-000" / "status.json").read_text())["state"] == "stopped")
        saved = newest_step(out)
    assert main([*words, "--json"]) == ExitCode.DONE
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(trial["trial"], trial["state"]) for trial in answer["trials"]] == [("trial-000", "complete")]
    assert (out / "trial-000.log").read_text().count(f"step {saved}") > 0
    assert [path.name for path in out.glob("trial-*") if path.is_dir()] == ["trial-000"]


def newest_step(out: Path) -> int:
    return max((int(path.name[5:]) for path in out.glob("trial-000/checkpoints/step-*")), default=0)


def wait_for(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("waited 150 s")
