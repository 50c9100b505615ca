"""A race: the same data for all, tokens and time to a loss, p-values, and what is trained when it is started again."""

import json
import math
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatoken.cli.main import main
from megatoken.cli.race_report import Curve, compare, describe, read_curve
from megatoken.data.prepare import prepare
from megatoken.errors import ExitCode
from megatoken.estimate.paired_test import compute_p_value, two_sided
from megatoken.launch.local import COMMAND
from tests.cli.test_sweep import RECIPE, wait_for

TEXT = "To be, or not to be, that is the question. " * 400


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """20 steps of 256 bytes; validated every 1,024 tokens on all of the held-out tenth."""
    (tmp_path / "text.txt").write_text(TEXT)
    prepare(
        str(tmp_path / "text.txt"),
        tmp_path / "data",
        tokenizer="bytes",
        val_fraction=0.1,
        workers=1,
    )
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(data=tmp_path / "data", steps=20))
    return str(tmp_path / "tiny.yaml")


def race(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The answer, and what is printed."""
    assert main(["race", *words, "--json"]) == ExitCode.DONE
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


def read_rows(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        row
        for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if row["kind"] == kind
    ]


# Critical values of Student's distribution, as printed in any table.
@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [
        *(
            (12.7062, 1, 0.05),
            (4.30265, 2, 0.05),
            (9.92484, 2, 0.01),
            (3.18245, 3, 0.05),
            (2.77645, 4, 0.05),
        ),
        *(
            (2.57058, 5, 0.05),
            (2.22814, 10, 0.05),
            (2.20099, 11, 0.05),
            (0.0, 4, 1.0),
            (-4.30265, 2, 0.05),
        ),
    ],
)
def test_p_values_are_those_of_tables(t: float, freedom: int, p: float) -> None:
    assert two_sided(t, freedom) == pytest.approx(p, rel=1e-4)


def test_p_value_of_pairs() -> None:
    """Differences 1, 2, 3: t = 2 / (1 / sqrt 3), and for two degrees of freedom p = 1 - t / sqrt(t^2 + 2)."""
    assert compute_p_value([1.0, 2.0, 3.0]) == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-12)
    assert compute_p_value([0.5, 0.5, 0.5]) == 0.0
    assert compute_p_value([0.0, 0.0]) == 1.0
    assert compute_p_value([1.0]) is None


def make_curve(losses: list[float], seconds: float = 1.0) -> Curve:
    """A validation every 100 tokens, which take `seconds`."""
    steps = np.arange(len(losses), dtype=float)
    return Curve(100 * steps, seconds * steps, np.array(losses))


def test_the_crossing_lies_on_the_line_between_two_validations() -> None:
    curve = make_curve([5.0, 4.0, 3.0, 3.5, 2.0])
    assert curve.find_crossing(3.25) == pytest.approx(
        175.0
    )  # the first time, though the loss rises again
    assert curve.find_crossing(4.0) == 100.0
    assert curve.find_crossing(2.0) == 400.0
    assert curve.find_crossing(1.9) is None
    assert make_curve([5.0, math.inf, 3.0]).find_crossing(4.0) == 200.0


def test_ratios_and_p_values_pair_the_seeds(
    tmp_path: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--out", str(tmp_path / "run"), "budget.steps=1"]) == 0
    targets = [3.0, 3.0, 3.0]
    slow = [
        make_curve([5.0, 4.0, 3.0]),
        make_curve([5.0, 4.0, 3.5, 3.0]),
        make_curve([5.0, 4.0, 3.0]),
    ]
    fast = [
        make_curve([5.0, 3.0, 2.0], 3.0),
        make_curve([5.0, 3.0, 2.1], 3.0),
        make_curve([5.0, 1.0, 1.5], 3.0),
    ]
    first = describe("slow", slow, targets, [tmp_path / "run"])
    row = describe("fast", fast, targets, [tmp_path / "run"])
    compare(row, first)
    assert first["tokens"] == {"median": 200.0, "low": 200.0, "high": 300.0, "repeats": 3}
    assert row["tokens"] == {"median": 100.0, "low": 50.0, "high": 100.0, "repeats": 3}
    assert row["flops"]["median"] == 100.0 * row["flops_per_token"]
    assert row["tokens_ratio"] == {"median": 3.0, "low": 2.0, "high": 4.0, "repeats": 3}
    assert row["seconds_ratio"] == pytest.approx(
        {"median": 1.0, "low": 2 / 3, "high": 4 / 3, "repeats": 3}
    )
    assert row["tokens_p"] == compute_p_value([math.log(2), math.log(3), math.log(4)])
    assert row["loss_p"] == pytest.approx(compute_p_value([1.0, 0.9, 1.5]))
    missing = describe(
        "late", [*fast[:2], make_curve([5.0, 4.0, 3.9])], targets, [tmp_path / "run"]
    )
    compare(missing, first)
    assert (missing["reached"], missing["tokens_p"]) == (2, None)
    assert missing["tokens_ratio"]["repeats"] == 2
    capsys.readouterr()


def test_time_is_that_of_steps_and_a_first_step_counts_as_any(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "val", "step": 0, "tokens": 0, "loss": 5.0, "elapsed_seconds": 0.0}
    ]
    for step in range(1, 5):
        rows.append(
            {
                "kind": "train",
                "step": step,
                "tokens": 10 * step,
                "seconds": 60.0 if step == 1 else 2.0,
            }
        )
    rows.insert(3, {"kind": "val", "step": 2, "tokens": 20, "loss": 4.0, "elapsed_seconds": 99.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "status.json").write_text('{"state": "done"}')
    curve = read_curve(tmp_path, "loss", pytest.fail)
    assert (curve.seconds.tolist(), curve.losses.tolist()) == ([0.0, 4.0], [5.0, 4.0])
    (tmp_path / "status.json").write_text('{"state": "failed", "exit_code": 6}')  # at step 4
    curve = read_curve(tmp_path, "loss", pytest.fail)
    assert (curve.seconds.tolist(), curve.losses.tolist()) == (
        [0.0, 4.0, 8.0],
        [5.0, 4.0, math.inf],
    )
    assert curve.find_crossing(4.5) == 10.0


def test_a_race_trains_all_from_the_same_data_and_later_only_what_is_missing(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, faster = tmp_path / "out", f"{recipe} optim.lr=3e-2"
    words = [recipe, faster, "--out", str(out), "--tokens", "5120"]
    alone, printed = race(capsys, *words, "--seeds", "1")
    assert [row["reached"] for row in alone["contenders"]] == [1, 1]
    assert alone["contenders"][1]["tokens_p"] is None
    assert "no p-value: it takes two seeds or more" in printed
    folders = sorted(path for path in out.iterdir() if path.is_dir())
    assert len(folders) == 2
    first, second = (read_rows(folder / "seed-1337", "train") for folder in folders)
    assert first[0]["loss"] == second[0]["loss"]  # the same weights and batch
    assert first[-1]["loss"] != second[-1]["loss"]
    held_out = {
        row["target_tokens"] for folder in folders for row in read_rows(folder / "seed-1337", "val")
    }
    assert len(held_out) == 1
    assert held_out.pop() > 0.05 * len(TEXT)  # a tenth of the documents, in whole windows
    assert len(first) == 20
    before = [(folder / "seed-1337" / "metrics.jsonl").stat().st_mtime_ns for folder in folders]

    both, printed = race(capsys, *words, "--seeds", "2")
    assert before == [
        (folder / "seed-1337" / "metrics.jsonl").stat().st_mtime_ns for folder in folders
    ]
    assert both["seeds"] == [1337, 1338]
    slow, fast = both["contenders"]
    assert slow["tokens"]["high"] == 5120.0  # its own last loss
    assert slow["runs"][0] == {**alone["contenders"][0]["runs"][0]}
    assert fast["tokens_ratio"]["low"] > 1  # in 20 steps the higher rate learns more
    assert 0 <= fast["tokens_p"] <= 1
    assert fast["final_loss"]["high"] < slow["final_loss"]["low"]
    record = json.loads((out / "race.json").read_text())
    assert record["answer"] == both
    assert record["command"].startswith("megatoken race")
    assert (out / "race.png").stat().st_size > 10_000

    low, printed = race(capsys, *words, "--seeds", "2", "--target-loss", "0.01")
    assert [row["reached"] for row in low["contenders"]] == [0, 0]
    lowest = slow["runs"][0]["lowest_loss"]
    assert f"{recipe}, seed 1337: 0.0100 not reached, lowest {lowest:.4f}" in printed
    assert main(["race", *words, "--target-loss", "9"]) == ExitCode.CONFIG
    assert "a run begins with 5." in capsys.readouterr().err
    assert main(["race", recipe, faster, "--out", str(out), "--tokens", "10240"]) == ExitCode.CONFIG
    assert (
        "has changed since it was trained here: budget.tokens: 5120 -> 10240"
        in capsys.readouterr().err
    )


def test_turns_and_a_stop_change_no_loss(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = f"{recipe} optim.lr=3e-3"
    words = ["race", recipe, other, "--tokens", "24576", "--seeds", "1", "evaluate.every=8192tok"]
    out = tmp_path / "turns"
    process = subprocess.Popen(
        [*COMMAND, *words, "--turn", "1s", "--out", str(out)], stdout=subprocess.DEVNULL
    )
    wait_for(lambda: list(out.glob("*/seed-1337/metrics.jsonl")) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == ExitCode.STOPPED
    answers = []
    for name, turn in (("turns", "1s"), ("whole", "0")):
        assert (
            main([*words, "--turn", turn, "--out", str(tmp_path / name), "--json"]) == ExitCode.DONE
        )
        answers.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    losses = [[row["runs"][0]["final_loss"] for row in answer["contenders"]] for answer in answers]
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


def test_contenders_of_different_tokenizers_race_in_bits_per_byte(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(
        str(tmp_path / "text.txt"),
        tmp_path / "bpe",
        tokenizer="bpe:300",
        val_fraction=0.1,
        workers=1,
    )
    words = [recipe, f"{recipe} data.path={tmp_path / 'bpe'}", "--tokens", "1024", "--seeds", "1"]
    answer, printed = race(capsys, *words, "--out", str(tmp_path / "out"))
    assert answer["metric"] == "bits_per_byte"
    assert "tokenizers differ: losses are in bits per byte" in printed
    bits = [row["runs"][0]["final_loss"] for row in answer["contenders"]]
    assert bits[0] == pytest.approx(math.log2(257), rel=0.05)
    assert bits[1] < bits[0]  # an id of many bytes


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["RECIPE", "RECIPE seed=3", "--tokens", "1024"], 2, "seed is the same for all contenders"),
        (["RECIPE", "RECIPE optim.lr=1"], 2, "no target"),
        (["RECIPE", "--tokens", "1024"], 2, "a race of one"),
        (["RECIPE", "RECIPE", "--tokens", "1024"], 2, "two contenders would share the folder"),
        (["RECIPE", "RECIPE optim.lrr=1", "--tokens", "1024"], 2, "did you mean 'optim.lr'?"),
        (
            ["RECIPE data.path=nowhere", "quikstart", "--tokens", "1024"],
            2,
            "did you mean 'quickstart'?",
        ),
        (["RECIPE", "RECIPE 'optim.lr=1", "--tokens", "1024"], 2, "No closing quotation"),
        (
            ["RECIPE", "RECIPE optim.lr=1", "--tokens", "many"],
            2,
            "budget.tokens: expected a whole number",
        ),
        (["RECIPE", "RECIPE optim.lr=1", "--target-loss", "-1"], 2, "a loss of -1"),
        (
            ["RECIPE", "RECIPE optim.lr=1", "--tokens", "0"],
            2,
            "no tokens to train on — --tokens — give a number such",
        ),
        (["RECIPE", "RECIPE optim.lr=1", "--tokens", "1024", "--seeds", "0"], 2, "--seeds is 0"),
        (
            ["RECIPE", "RECIPE optim.lr=1", "--tokens", "1024", "--turn", "soon"],
            2,
            "write it as 45s, 5m or 1h",
        ),
        (["RECIPE", "RECIPE data.path=nowhere", "--tokens", "1024"], 3, "nowhere"),
        (["RECIPE", "RECIPE data.path=", "--tokens", "1024"], 2, "no dataset given"),
        (["RECIPE", "RECIPE data.path=OTHER", "--tokens", "1024"], 3, "give all the same text"),
        (
            ["RECIPE", "RECIPE data.path=TRAIN", "--tokens", "1024"],
            3,
            "no held-out text to compare",
        ),
    ],
)
def test_what_cannot_race_is_one_line(
    recipe: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    error: str,
) -> None:
    (tmp_path / "other.txt").write_text(TEXT.upper())
    for name, fraction in (("OTHER", 0.1), ("TRAIN", 0.0)):
        if any(name in word for word in words):
            text = str(tmp_path / "other.txt")
            prepare(text, tmp_path / name, tokenizer="bytes", val_fraction=fraction, workers=1)
    given = [
        word.replace("RECIPE", recipe).replace("path=OTHER", f"path={tmp_path / 'OTHER'}")
        for word in words
    ]
    given = [word.replace("path=TRAIN", f"path={tmp_path / 'TRAIN'}") for word in given]
    assert main(["race", *given, "--out", str(tmp_path / "out")]) == code
    printed = capsys.readouterr().err.strip()
    assert error in printed
    assert len(printed.splitlines()) == 1
    assert not (tmp_path / "out").exists()
