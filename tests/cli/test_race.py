"""A race: the same data for all, tokens and time to a loss, p-values, and continuing."""

import json
import math
import shlex
import signal
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatoken.base.errors import ExitCode
from megatoken.distributed.local_launch import COMMAND
from megatoken.store.run_state import read_config
from megatoken.study import race_report
from megatoken.study.commands import race
from megatoken.study.commands.race import CALIBRATION_STEPS
from megatoken.study.paired_test import compute_p_value, two_sided
from megatoken.study.race_report import Curve, compare, describe, read_curve
from tests.cli.conftest import TEXT, prepare_text
from tests.conftest import Ask, Call
from tests.processes import wait_until
from tests.tiny_model import TINY_GPT
from tests.tiny_run import read_losses, read_rows, write_jsonl


def test_p_values():
    """Critical values of Student's distribution, and t = 2 / (1 / sqrt 3) of three pairs."""
    table = {(12.7062, 1): 0.05, (9.92484, 2): 0.01, (-3.18245, 3): 0.05, (2.22814, 10): 0.05}
    assert [two_sided(*key) for key in table] == pytest.approx([*table.values()], rel=1e-4)
    assert compute_p_value([1.0, 2.0, 3.0]) == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-12)
    pairs = ([0.5, 0.5], [0.0, 0.0], [1.0])
    assert [compute_p_value(differences) for differences in pairs] == [0.0, 1.0, None]


def make_curve(losses: list[float], seconds: float = 1.0) -> Curve:
    """Return a curve with a validation every 100 tokens, which take `seconds`."""
    steps = np.arange(len(losses), dtype=float)
    return Curve(100 * steps, seconds * steps, np.array(losses))


def test_the_crossing_lies_on_the_line_between_two_validations():
    curve = make_curve([5.0, 4.0, 3.0, 3.5, 2.0])  # crosses 3.25 twice
    crossings = {3.25: pytest.approx(175.0), 4.0: 100.0, 2.0: 400.0, 1.9: None}
    assert {target: curve.find_crossing(target) for target in crossings} == crossings
    assert make_curve([5.0, math.inf, 3.0]).find_crossing(4.0) == 200.0


def spread(median: float, low: float, high: float) -> dict[str, float]:
    return {"median": median, "low": low, "high": high, "repeats": 3}


def test_ratios_and_p_values_pair_the_seeds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(race_report, "read_model", lambda folder: (TINY_GPT, {}))

    def make_row(seconds, *losses):
        curves = [make_curve(values, seconds) for values in losses]
        return describe("", curves, [3.0] * 3, [Path()])

    first = make_row(1.0, [5.0, 4.0, 3.0], [5.0, 4.0, 3.5, 3.0], [5.0, 4.0, 3.0])
    row = make_row(3.0, [5.0, 3.0, 2.0], [5.0, 3.0, 2.1], [5.0, 1.0, 1.5])
    late = make_row(3.0, [5.0, 3.0, 2.0], [5.0, 3.0, 2.1], [5.0, 4.0, 3.9])
    compare(row, first)
    compare(late, first)
    assert first["tokens"] == spread(200.0, low=200.0, high=300.0)
    assert row["tokens"] == spread(100.0, low=50.0, high=100.0)
    assert row["flops"]["median"] == 100.0 * row["flops_per_token"]
    assert row["tokens_ratio"] == spread(3.0, low=2.0, high=4.0)
    assert row["seconds_ratio"] == pytest.approx(spread(1.0, low=2 / 3, high=4 / 3))
    assert row["tokens_p"] == compute_p_value([math.log(2), math.log(3), math.log(4)])
    assert row["loss_p"] == pytest.approx(compute_p_value([1.0, 0.9, 1.5]))
    assert (late["reached"], late["tokens_p"], late["tokens_ratio"]["repeats"]) == (2, None, 2)


def test_time_is_that_of_steps_and_a_slow_first_step_counts_as_the_median(tmp_path: Path):
    steps = [
        {"kind": "train", "step": step, "tokens": 10 * step, "seconds": seconds}
        for step, seconds in enumerate((60.0, 2.0, 2.0, 2.0), start=1)
    ]
    start, middle = (
        {"kind": "val", "step": step, "tokens": 10 * step, "loss": loss}
        for step, loss in ((0, 5.0), (2, 4.0))
    )
    write_jsonl(tmp_path / "metrics.jsonl", [start, *steps[:2], middle, *steps[2:]])
    for status, seconds, losses in (
        ('{"state": "done"}', [0.0, 4.0], [5.0, 4.0]),
        ('{"state": "failed", "exit_code": 6}', [0.0, 4.0, 8.0], [5.0, 4.0, math.inf]),  # at step 4
    ):
        (tmp_path / "status.json").write_text(status)
        curve = read_curve(tmp_path, "loss", pytest.fail)
        assert (curve.seconds.tolist(), curve.losses.tolist()) == (seconds, losses)
        assert curve.find_crossing(4.5) == 10.0


@pytest.mark.long
@pytest.mark.usefixtures("forked_runs")
def test_all_train_from_the_same_data_and_a_later_race_trains_what_is_missing(
    recipe: str, tmp_path: Path, ask: Ask, call: Call
):
    out = tmp_path / "out"
    line = f"race {recipe} '{recipe} optim.lr=3e-2' --out {out} --tokens"
    alone = ask(f"{line} 5120 --seeds 1")["contenders"]
    assert [row["reached"] for row in alone] == [1, 1]
    assert alone[1]["tokens_p"] is None
    runs = sorted(out.glob("*/seed-1337"))
    first, second = map(read_losses, runs)
    assert first[0] == second[0]  # the same weights and batch
    assert first[-1] != second[-1]
    assert len(first) == 20
    (n_val,) = {row["target_tokens"] for run in runs for row in read_rows(run, "val")}
    assert n_val > 0.05 * len(TEXT)  # a tenth of the documents, in full windows
    times = [(run / "metrics.jsonl").stat().st_mtime_ns for run in runs]

    both = ask(f"{line} 5120 --seeds 2")
    assert times == [(run / "metrics.jsonl").stat().st_mtime_ns for run in runs]
    assert both["seeds"] == [1337, 1338]
    slow, fast = both["contenders"]
    assert slow["tokens"]["high"] == 5120.0  # its own last loss
    assert slow["runs"][0] == alone[0]["runs"][0]
    assert fast["tokens_ratio"]["low"] > 1  # in 20 steps the higher rate learns more
    assert 0 <= fast["tokens_p"] <= 1
    assert fast["final_loss"]["high"] < slow["final_loss"]["low"]
    assert json.loads((out / "race.json").read_text())["answer"] == both
    assert (out / "race.png").stat().st_size > 10_000

    ask(f"{line} 5120 --seeds 2 --jobs 2 --out {out}-2")  # side by side
    for log in (log.relative_to(out) for log in out.glob("*/*/metrics.jsonl")):
        losses = [read_losses((folder / log).parent) for folder in (out, tmp_path / "out-2")]
        assert losses[0] == losses[1]

    low = ask(f"{line} 5120 --seeds 2 --target-loss 0.01")
    assert [row["reached"] for row in low["contenders"]] == [0, 0]
    assert call(f"{line} 10240")[0] == ExitCode.CONFIG  # the runs have 5,120


@pytest.mark.long
@pytest.mark.usefixtures("forked_runs")
def test_a_time_budget_becomes_tokens_that_a_second_start_keeps(
    recipe: str, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(race, "CALIBRATIONS", 2)
    line = f"race {recipe} '{recipe} optim.lr=3e-2' --minutes 0.005 --seeds 1 --out {tmp_path}/out"
    result = ask(line)
    runs = sorted(tmp_path.glob("out/*/seed-1337"))
    budgets = [read_config(run).budget.tokens for run in runs]
    for run, tokens in zip(runs, budgets, strict=True):
        trials = [read_rows(run.with_name(f"calibration-{n}"), "train") for n in range(2)]
        assert [len(steps) for steps in trials] == [CALIBRATION_STEPS] * 2
        pace = min(statistics.median(row["seconds"] for row in steps) for steps in trials)
        assert tokens == round(0.3 / (pace / trials[0][0]["tokens"]))
    trained = sorted(row["runs"][0]["trained_tokens"] for row in result["contenders"])
    assert trained == sorted(max(1, round(tokens / 256)) * 256 for tokens in budgets)
    assert ask(line) == result


@pytest.mark.slow
def test_turns_and_a_stop_change_no_loss(recipe: str, tmp_path: Path, ask: Ask):
    line = f"race {recipe} '{recipe} optim.lr=3e-3' --tokens 24576 --seeds 1 evaluate.every=8192tok"
    turns = f"{line} --turn 1s --out {tmp_path}/turns"
    process = subprocess.Popen([*COMMAND, *shlex.split(turns)], stdout=subprocess.DEVNULL)
    wait_until(lambda: [*tmp_path.glob("turns/*/*/metrics.jsonl")], process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == ExitCode.STOPPED
    losses = [
        [row["runs"][0]["final_loss"] for row in ask(arguments)["contenders"]]
        for arguments in (turns, f"{line} --turn 0 --out {tmp_path}/full")
    ]
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


@pytest.mark.usefixtures("forked_runs")
def test_contenders_of_different_tokenizers_race_in_bits_per_byte(
    recipe: str, tmp_path: Path, ask: Ask
):
    prepare_text(tmp_path / "data", TEXT, tokenizer="bpe:300")
    other = f"'{recipe} data.path={tmp_path}/data'"
    result = ask(f"race {recipe} {other} --tokens 1024 --seeds 1 --out {tmp_path}/out")
    assert result["metric"] == "bits_per_byte"
    bits = [row["runs"][0]["final_loss"] for row in result["contenders"]]
    assert bits[0] == pytest.approx(math.log2(257), rel=0.05)
    assert bits[1] < bits[0]  # an id of many bytes


REFUSED = """\
2 RECIPE 'RECIPE optim.lr=1'
2 RECIPE RECIPE --tokens 1024
2 RECIPE 'RECIPE optim.lrr=1' --tokens 1024
3 RECIPE 'RECIPE data.path=nowhere' --tokens 1024
3 RECIPE 'RECIPE data.path=OTHER' --tokens 1024
3 'RECIPE data.path=OTHER' RECIPE --tokens 1024
"""


def test_what_cannot_race_is_refused_before_training(recipe: str, tmp_path: Path, call: Call):
    prepare_text(tmp_path / "data", TEXT.upper(), val_fraction=0.0)
    for row in REFUSED.splitlines():
        row = row.replace("RECIPE", recipe).replace("OTHER", f"{tmp_path}/data")
        code, arguments = row.split(maxsplit=1)
        assert call(f"race {arguments} --out {tmp_path}/out")[0] == int(code)
        assert not (tmp_path / "out").exists()
