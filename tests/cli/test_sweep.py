"""A sweep tries the values in its ranges, keeps the best recipe, and continues after a stop."""

import os
import signal
from pathlib import Path

import pytest

from megatoken.base.config.load import load_config
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, ExitCode
from megatoken.cli.arguments import parse
from megatoken.study import experiment
from megatoken.study.commands.sweep import Sweep, format_values, parse_space, report
from tests.cli.conftest import TEXT, ForkedChild, prepare_text, run_command, run_forked
from tests.conftest import Ask, Call
from tests.processes import wait_until
from tests.ranks import start_process
from tests.tiny_run import newest_step, write_jsonl

optuna = pytest.importorskip("optuna")


def test_ranges_are_distributions_of_settings():
    assignments = [
        "optim.lr=log:1e-4..3e-3",
        "model.n_layer=2..4",
        "optim.schedule=wsd|cosine",
        "seed=3",
    ]
    space, fixed = parse_space("quickstart", assignments)
    assert space == {
        "optim.lr": optuna.distributions.FloatDistribution(1e-4, 3e-3, log=True),
        "model.n_layer": optuna.distributions.IntDistribution(2, 4),
        "optim.schedule": optuna.distributions.CategoricalDistribution(["wsd", "cosine"]),
    }
    assert fixed == ["seed=3"]


WRONG = """optim.lrr=log:1e-4..1e-3 optim.lr=1e-4..fast optim.lr=1e-3..1e-4 optim.lr=log:0..1e-3
    optim.beta1=0.9..1.5 optim.warmup=0.1dur..0.2dur optim.schedule=wsd|cosin optim.lr=1e-3"""


@pytest.mark.parametrize("assignment", WRONG.split())
def test_wrong_ranges_are_refused(assignment: str):
    with pytest.raises(ConfigError):
        parse_space("quickstart", [assignment])


@pytest.mark.long
@pytest.mark.usefixtures("forked_runs")
def test_a_search_keeps_the_best_rate_and_continues_with_more_trials(
    recipe: str, tmp_path: Path, ask: Ask, call: Call
):
    # The mirror is not used: it has room for one run.
    line = f"sweep {recipe} --out {tmp_path}/out save.mirror={tmp_path}/copies"
    for trials in (1, 3):
        result = ask(f"{line} optim.lr=log:1e-5..1e-1 --trials {trials}")
        assert [trial["state"] for trial in result["trials"]] == ["complete"] * trials
    losses = {trial["loss"]: float(trial["values"]["optim.lr"]) for trial in result["trials"]}
    best = losses[min(losses)]
    assert best > min(losses.values())  # in 20 steps the lowest rate learns least
    assert result["best"] == result["trials"][0]
    assert result["best"]["loss"] == min(losses)
    assert load_config(result["recipe"]).optim.lr == best
    assert not (tmp_path / "copies").exists()
    assert (tmp_path / "out/sweep.png").stat().st_size > 10_000
    assert call(f"{line} optim.lr=1e-5|3e-3")[0] == ExitCode.CONFIG  # another search


@pytest.mark.parametrize("name", ["missing", "train"])
def test_data_are_opened_before_the_first_trial(name: str, recipe: str, tmp_path: Path, call: Call):
    prepare_text(tmp_path / "train", TEXT, val_fraction=0.0)
    paths = f"data.path={Path(recipe).with_name('data')}|{tmp_path}/{name}"
    line = f"sweep {recipe} optim.lr=1e-3|2e-3 {paths} --out {tmp_path}/out"
    assert call(line)[0] == ExitCode.DATA
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("forked_runs")
def test_a_search_whose_trials_all_fail_is_an_error(recipe: str, tmp_path: Path, call: Call):
    arguments = "model.vocab_size=10 optim.lr=1e-3|2e-3 --jobs 2"
    assert call(f"sweep {recipe} {arguments} --out {tmp_path}/out")[0] == ExitCode.DATA


CHOICES = ["optim.lr=4e-3|1e-3|2e-3"]


def open_sweep(arguments: list[str], out: Path, trials: int) -> Sweep:
    out.mkdir(exist_ok=True)
    options = parse(["sweep", "quickstart", *arguments, f"--trials={trials}", f"--out={out}"])
    return Sweep(options, *parse_space("quickstart", arguments), [], Console())


def draw_trials(
    arguments: list[str], out: Path, trials: int, kill_in: tuple[int, ...] = ()
) -> list[tuple[str, ...]]:
    """Return the values of a search's trials.

    kill_in: trials in which it is killed and restarted.
    """
    search = open_sweep(arguments, out, trials)
    values = []
    while run := search.ask():
        if run.trial.number in kill_in:
            del run  # and its lock
            search = open_sweep(arguments, out, trials)
            run = search.ask()
        trial = run.trial
        assert trial.number == len(values)
        values.append(tuple(format_values(trial.params).values()))
        search.study.tell(trial, float(len(values)))
    return values


def test_combinations_of_choices_are_tried_once(tmp_path: Path):
    arguments = [*CHOICES, "model.n_head=1|2"]
    combinations = [(rate, heads) for rate in ("4e-3", "1e-3", "2e-3") for heads in "12"]
    assert draw_trials(arguments, tmp_path / "once", 6) == combinations
    assert draw_trials(arguments, tmp_path / "more", 20) == combinations
    assert draw_trials(arguments, tmp_path / "killed", 6, (1, 3)) == combinations
    first = draw_trials(arguments, tmp_path / "fewer", 5)  # drawn at random
    rest = draw_trials(arguments, tmp_path / "again", 6)
    assert len(first) == 5
    assert {*first, *rest} == {*combinations}


def test_a_loss_of_zero_is_the_best(tmp_path: Path):
    search = open_sweep(CHOICES, tmp_path, 3)
    for loss in (0.7, 0.0, None):
        state = optuna.trial.TrialState.PRUNED if loss is None else None
        run = search.ask()
        search.study.tell(run.trial, loss, state)
    assert [row["loss"] for row in report(search)["trials"]] == [0.0, 0.7, None]


def test_a_restarted_search_draws_the_same_values(tmp_path: Path):
    arguments = ["optim.lr=log:1e-4..1e-1", "optim.beta1=0.8..0.9"]
    values = draw_trials(arguments, tmp_path / "once", 5)
    assert len(set(values)) == 5
    assert draw_trials(arguments, tmp_path / "killed", 5, (0, 2, 3)) == values


def test_losses_after_the_one_that_ends_a_trial_do_not_count(tmp_path: Path):
    """A search does not depend on when logs are read: at the first read, all losses are there."""
    search = open_sweep(["optim.lr=1e-3..2e-3"], tmp_path, 3)
    search.study.pruner = optuna.pruners.MedianPruner(n_startup_trials=1)
    for logged, counted in (
        ([3.0, 2.0, 1.0], [3.0, 2.0, 1.0]),
        ([3.5, 1.5, 0.5], [3.5]),
        ([2.0, 1.5, 1.25], [2.0, 1.5, 1.25]),
    ):
        rows = [
            {"kind": "val", "step": step, "tokens": step, "loss": loss}
            for step, loss in enumerate(logged, 1)
        ]
        run = search.ask()
        write_jsonl(run.folder / "metrics.jsonl", rows)
        (run.folder / "status.json").write_text('{"total_steps": 3}')
        assert run.is_hopeless() == (counted != logged)
        assert run.losses == counted
        search.study.tell(run.trial, counted[-1])


@pytest.mark.long
def test_workers_share_a_sweep_and_take_up_killed_trials(
    recipe: str, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
):
    trial = tmp_path / "out/trial-000"
    line = f"sweep {recipe} optim.lr=1e-3|3e-3 budget.steps=300 save.every=20steps --out "
    arguments = f"{line}{tmp_path}/out".split()
    step = 0
    for number, work, code in (
        (signal.SIGTERM, run_forked, ExitCode.STOPPED),
        (signal.SIGKILL, run_command, -signal.SIGKILL),  # the trial dies with its parent
    ):
        process = start_process(work, arguments, tmp_path / "log")
        wait_until(lambda: newest_step(trial) > step or not process.is_alive())  # noqa: B023 (used at once)
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == code
        step = newest_step(trial)
    workers = [start_process(run_forked, arguments, tmp_path / "log") for _ in range(2)]
    for process in workers:
        process.join()
        assert process.exitcode == ExitCode.DONE
    monkeypatch.setattr(experiment, "Child", ForkedChild)
    shared, serial = (ask(f"{line}{tmp_path}/{name}") for name in ("out", "serial"))
    assert {row["trial"]: len(row.pop("workers")) for row in shared["trials"]} == {
        "trial-000": 3,
        "trial-001": 1,
    }
    assert [row.pop("workers") for row in serial["trials"]]
    assert shared["trials"] == serial["trials"]
    assert trial.with_name("trial-000.log").read_text().count("resuming from step-") == 2
    assert (tmp_path / "log").read_text().count("the same command resumes") == 1
