"""A sweep tries what its ranges say, keeps the best recipe, and goes on after a stop."""

import json
import re
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
from megatoken.console import Console
from megatoken.data.prepare import prepare
from megatoken.errors import ConfigError, ExitCode
from megatoken.launch.local import COMMAND
from megatoken.plots import load_pyplot

optuna = pytest.importorskip("optuna")
RECIPE = """version: 2
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
    prepare(
        str(tmp_path / "text.txt"),
        tmp_path / "data",
        tokenizer="bytes",
        val_fraction=0.1,
        workers=1,
    )
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
        ("optim.lr=1e-4...1e-2", "optim.lr: expected a number, got '1e-4.'"),  # not to .1e-2
        ("optim.lr=lg:1e-4..1e-2", "optim.lr: expected a number, got 'lg:1e-4'"),
        ("optim.lr=log:0..1e-3", "a logarithmic range begins above 0"),
        ("optim.beta1=0.9..1.5", "optim.beta1: must be at least 0 and at most 1, got 1.5"),
        ("optim.warmup=0.1dur..0.2dur", "optim.warmup has no range"),
        ("optim.schedule=wsd|cosin", "optim.schedule: expected one of cosine"),
        ("optim.lr=1e-3", "nothing to search"),
        ("optim.lr=1e-4..1e-3 optim.lr=1e-3", "optim.lr is given twice"),
    ],
)
def test_a_wrong_range_is_one_line(word: str, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_space("quickstart", word.split())
    assert error in str(raised.value)


def test_a_search_keeps_the_best_rate_and_goes_on_with_more_trials(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = f"save.mirror={tmp_path}/copies"  # is of one run, so of none of these
    words = [
        "sweep",
        recipe,
        "--out",
        str(tmp_path / "out"),
        "--json",
        "optim.lr=log:1e-5..1e-1",
        mirror,
    ]
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
    assert not (tmp_path / "copies").exists()
    assert (
        main(["sweep", recipe, "--out", str(tmp_path / "out"), "optim.lr=1e-5|3e-3", mirror])
        == ExitCode.CONFIG
    )
    assert "the sweep in this folder has another recipe" in capsys.readouterr().err


def test_a_damaged_search_is_one_line(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal.log").write_bytes(b'\0\0\0\n{"op_code": 0}\n')
    assert main(["sweep", recipe, "--out", str(tmp_path), "optim.lr=1e-3..2e-3"]) == ExitCode.DATA
    (line,) = capsys.readouterr().err.splitlines()
    assert "journal.log" in line
    assert "delete it, or name another --out" in line


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["optim.lr=1e-3|2e-3", "data.path={0}/missing"], "{0}/missing"),
        (["data.path={0}/data|{0}/missing"], "{0}/missing"),
        (
            ["optim.lr=1e-3|2e-3", "data.path={0}/whole"],
            "no validation split, by whose loss a sweep compares — {0}/wh",
        ),
        (
            ["optim.lr=1e-3|2e-3", "evaluate.tokens=0"],
            "a sweep compares validation losses — evaluate.tokens=0 — give",
        ),
    ],
)
def test_data_are_opened_before_the_first_trial(
    words: list[str], error: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(
        str(tmp_path / "text.txt"),
        tmp_path / "whole",
        tokenizer="bytes",
        val_fraction=0.0,
        workers=1,
    )
    words = [word.format(tmp_path) for word in words]
    assert main(["sweep", recipe, *words, "--out", str(tmp_path / "sweep")]) in (
        ExitCode.DATA,
        ExitCode.CONFIG,
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert error.format(tmp_path) in line
    assert not (tmp_path / "sweep").exists()


def test_what_every_trial_failed_of_is_told(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "sweep",
        recipe,
        "model.vocab_size=10",
        "optim.lr=1e-3|2e-3|3e-3|4e-3",
        "--trials",
        "4",
        "--jobs",
        "3",
    ]
    assert main([*words, "--out", str(tmp_path / "sweep")]) == ExitCode.DATA
    assert (
        "the first 3 trials failed: model.vocab_size 10 is smaller than" in capsys.readouterr().err
    )
    assert main([*words, "seed=2", "--out", str(tmp_path / "sweep")]) == ExitCode.CONFIG
    assert "other fixed settings" in capsys.readouterr().err


def test_lists_of_values_are_tried_each_once(recipe: str, tmp_path: Path) -> None:
    words = ["optim.lr=1e-3|2e-3|4e-3", "model.n_head=1|2"]
    ranges, _ = parse_space(recipe, words)

    def draw(out: str, trials: int, starts: int) -> list[tuple[str, str]]:
        (tmp_path / out).mkdir()
        options = Namespace(
            seed=0, jobs=1, out=tmp_path / out, recipe=recipe, trials=trials, console=Console()
        )
        drawn = []
        for _ in range(starts):
            study = sweep._open_study(optuna, options, ranges, [])  # one that was killed goes on
            while trial := (search := sweep.Sweep(options, study, ranges, []))._ask():
                drawn.append(tuple(search._suggest(trial)))
                if starts > 1 and len(drawn) in (2, 5):
                    break
                study.tell(trial, float(len(drawn)))
        return [(rate.partition("=")[2], heads.partition("=")[2]) for rate, heads in drawn]

    every = [(rate, heads) for rate in ("1e-3", "2e-3", "4e-3") for heads in "12"]
    assert draw("once", 6, 1) == every
    assert draw("more", 20, 1) == every
    assert draw("killed", 6, 3) == [*every[:2], every[1], *every[2:4], every[3], *every[4:]]
    assert len(draw("fewer", 5, 1)) == 5  # drawn at random


def test_a_search_draws_the_same_values_however_often_it_is_begun_again(
    recipe: str, tmp_path: Path
) -> None:
    ranges, _ = parse_space(recipe, ["optim.lr=log:1e-4..1e-1"])

    def draw(out: Path, *, at_once: bool) -> list[tuple[str, str]]:
        out.mkdir()
        options = Namespace(seed=0, jobs=1, out=out, recipe=recipe, trials=4, console=Console())
        drawn, study = [], None
        for index in range(4):
            if not (at_once and study):
                study = sweep._open_study(optuna, options, ranges, [])
            search = sweep.Sweep(options, study, ranges, [])
            trial = search._ask()
            value = ranges[0].suggest(trial)
            if not at_once and index == 2:  # killed in it, and in the asking for the next
                study.ask()
                study = sweep._open_study(optuna, options, ranges, [])
                trial = sweep.Sweep(options, study, ranges, [])._ask()
                assert ranges[0].suggest(trial) == value
            study.tell(trial, float(value))
            drawn.append((trial.user_attrs["folder"], value))
        return drawn

    drawn = draw(tmp_path / "at-once", at_once=True)
    assert [folder for folder, _ in drawn] == ["trial-000", "trial-001", "trial-002", "trial-003"]
    assert len({value for _, value in drawn}) == 4
    assert draw(tmp_path / "again", at_once=False) == drawn


def test_losses_after_the_one_that_ends_a_trial_do_not_count(tmp_path: Path) -> None:
    """So that a search does not depend on when a trial is looked at: all losses are there at the first look."""
    losses = {
        1: [3.0, 2.0, 1.0],
        2: [3.5, 1.5, 0.5],
        3: [2.0, 1.5, 1.25],
    }  # the last is the last step's
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    done = []
    for number, values in losses.items():
        folder = tmp_path / str(number)
        folder.mkdir()
        rows = [
            {"kind": "val", "step": step, "tokens": step, "loss": loss}
            for step, loss in enumerate(values, 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "status.json").write_text('{"total_steps": 3}')
        trial = study.ask()
        reported: list[float] = []
        done.append((reported, sweep.report_losses(trial, folder, reported)))
        study.tell(trial, reported[-1])
    assert done == [([3.0, 2.0, 1.0], False), ([3.5], True), ([2.0, 1.5, 1.25], False)]


def test_a_sweep_that_is_ended_goes_on_where_it_was(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path, steps=400)
    out = tmp_path / "out"
    words = [
        "sweep",
        recipe,
        "--out",
        str(out),
        "--trials",
        "1",
        "optim.lr=log:1e-3..1e-2",
        "save.every=20steps",
    ]
    saved = 0
    for number, code in ((signal.SIGTERM, ExitCode.STOPPED), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL)
        wait_for(lambda: newest_step(out) > saved or process.poll() is not None)  # noqa: B023 (used at once)
        process.send_signal(number)
        assert process.wait() == code
        wait_for(
            lambda: (
                json.loads((out / "trial-000" / "status.json").read_text())["state"] == "stopped"
            )
        )
        saved = newest_step(out)
    assert main([*words, "--json"]) == ExitCode.DONE
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(trial["trial"], trial["state"]) for trial in answer["trials"]] == [
        ("trial-000", "complete")
    ]
    assert (out / "trial-000.log").read_text().count(f"step {saved}") > 0
    assert [path.name for path in out.glob("trial-*") if path.is_dir()] == ["trial-000"]


def newest_step(out: Path) -> int:
    return max((int(path.name[5:]) for path in out.glob("trial-000/checkpoints/step-*")), default=0)


def test_choices_have_places_in_their_order(tmp_path: Path) -> None:
    best, other = (
        {"state": "complete", "values": {"optim.lr": rate}, "loss": 3.0}
        for rate in ("1e-3", "1e-2")
    )
    path = sweep.draw_sweep(
        load_pyplot(),
        tmp_path / "sweep.svg",
        [best, other],
        [SearchRange("optim.lr", ("1e-2", "1e-3"))],
    )
    texts = re.findall("<!-- (.*?) -->", path.read_text())
    assert texts[:2] == ["1e-2", "1e-3"]


def wait_for(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("waited 150 s")
