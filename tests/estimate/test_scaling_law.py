"""Laws are found again from losses that follow them; runs that fix no law are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatoken.checkpoint.manifest import CheckpointManifest, encode_manifest, encode_model_config
from megatoken.cli.main import main
from megatoken.errors import DataError, ExitCode
from megatoken.estimate.scaling_law import choose_terms, fit_law, interval, list_variables, resample
from megatoken.model.flops import count_matmul_parameters
from tests.tiny_model import TINY_GPT

# Hoffmann et al. 2022, equation 10.
E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28
PARAMETERS, TOKENS = (
    x.ravel() for x in np.meshgrid([70e6, 160e6, 410e6, 1e9], [1e9, 4e9, 16e9], indexing="ij")
)
LOSSES = E + A / PARAMETERS**ALPHA + B / TOKENS**BETA


def test_chinchillas_law_is_found_again():
    law = fit_law(choose_terms(PARAMETERS, TOKENS), PARAMETERS, TOKENS, LOSSES)
    assert law.terms == ("N", "D")
    assert law.floor == pytest.approx(E, abs=1e-3)
    assert law.exponents == pytest.approx((ALPHA, BETA), abs=1e-3)
    assert law.factors == pytest.approx((A, B), rel=0.01)
    assert float(law.loss(70e9, 1.4e12)) == pytest.approx(
        E + A / 70e9**ALPHA + B / 1.4e12**BETA, abs=1e-3
    )


def test_the_best_split_has_the_lowest_loss_of_its_flops():
    law = fit_law(choose_terms(PARAMETERS, TOKENS), PARAMETERS, TOKENS, LOSSES)
    n, d = law.best_split(1e21)
    assert 6 * n * d == pytest.approx(1e21)
    others = n * np.array([0.8, 0.95, 1.05, 1.25])
    assert (law.loss(others, 1e21 / 6 / others) > law.loss(n, d)).all()


def test_the_interval_of_noisy_losses_holds_the_truth():
    noisy = LOSSES * (1 + np.random.default_rng(1).normal(0, 0.003, len(LOSSES)))
    law = fit_law(choose_terms(PARAMETERS, TOKENS), PARAMETERS, TOKENS, noisy)
    laws = resample(law, PARAMETERS, TOKENS, noisy)
    truth = E + A / 7e9**ALPHA + B / 140e9**BETA
    low, high = interval([float(other.loss(7e9, 140e9)) for other in laws])
    assert low < truth < high
    assert 0.01 < high - low < 0.2


def test_runs_that_vary_one_thing_or_both_in_step_fix_a_law_of_that():
    n, d = np.full(6, 1e8), np.geomspace(1e8, 1e10, 6)
    for parameters, tokens, name in ((n, d, "D"), (d, n, "N"), (d, 20 * d, "C")):
        terms = choose_terms(parameters, tokens)
        assert terms == (name,)
        (x,) = list_variables(terms, parameters, tokens)
        law = fit_law(terms, parameters, tokens, 2.0 + 30 / x**0.2)
        assert (law.floor, *law.exponents) == pytest.approx((2.0, 0.2), abs=2e-3)


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [([1e6, 2e6, 1e6, 2e6], [1e6, 1e6, 2e6, 2e6]), ([1e6] * 3, [1e6, 2e6, 3e6])],
)
def test_too_few_runs_are_refused(parameters: list[float], tokens: list[float]):
    with pytest.raises(DataError):
        choose_terms(np.array(parameters), np.array(tokens))


def write_run(folder: Path, d_model: int, tokens: int, state: str = "done", **meta: str) -> Path:
    """A run folder as training leaves it, with a loss that follows Chinchilla's law."""
    model = replace(TINY_GPT, d_model=d_model, d_ff=4 * d_model)
    loss = 1.0 + 20 / count_matmul_parameters(model) ** ALPHA + 30 / tokens**BETA
    rows = [
        {"kind": "train", "step": 7, "tokens": tokens, "loss": 9.0},
        {"kind": "val", "step": 7, "tokens": tokens},
    ]
    checkpoint = folder / "checkpoints" / "step-00000007"
    checkpoint.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row | {"loss": loss}) + "\n" for row in rows)
    )
    (folder / "status.json").write_text(json.dumps({"state": state}))
    facts = {"shape": encode_model_config(model), "tokenizer": "t", "dataset": "d"} | meta
    (checkpoint / "manifest.json").write_bytes(encode_manifest(CheckpointManifest(7, facts, {})))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    sizes = [(d, tokens) for d in (32, 64, 128) for tokens in (100_000, 400_000, 1_600_000)]
    return [str(write_run(tmp_path / f"w{d}-{tokens}", d, tokens)) for d, tokens in sizes]


def read_answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_command_fits_holds_out_and_extrapolates(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "law.png"
    log = tmp_path / "w32-100000.log"  # of a sweep, matched by w32*
    log.touch()
    assert (
        main(
            [
                "scaling",
                *runs,
                str(log),
                "--flops",
                "1e13",
                "1e15",
                "--plot",
                str(picture),
                "--json",
            ]
        )
        == ExitCode.DONE
    )
    answer = read_answer(capsys)
    assert answer["fits"]["E"]["value"] == pytest.approx(1.0, abs=0.01)
    assert answer["fits"]["exponent of N"]["value"] == pytest.approx(ALPHA, abs=0.01)
    assert abs(answer["held_out"]["error_share"]) < 1e-3
    assert [budget["flops"] for budget in answer["budgets"]] == [1e13, 1e15]
    assert 6 * answer["budgets"][0]["N"] * answer["budgets"][0]["D"] == pytest.approx(1e13)
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl", "checkpoints"])
def test_runs_that_do_not_count_are_refused(
    runs: list[str], capsys: pytest.CaptureFixture[str], name: str
):
    path = Path(runs[3]) / name
    if name == "status.json":
        path.write_text('{"state": "stopped"}')
    elif name == "metrics.jsonl":
        path.write_text('{"kind": "train", "step": 7, "tokens": 1}\n')
    else:
        path.rename(path.with_name("gone"))
    assert main(["scaling", *runs]) == ExitCode.DATA
    assert "w64-100000" in capsys.readouterr().err


def test_a_check_that_is_far_off_is_a_warning(runs: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["scaling", *runs]) == ExitCode.DONE
    assert "warning" not in capsys.readouterr().out
    log = Path(runs[-1]) / "metrics.jsonl"  # of the largest
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(row | {"loss": row["loss"] * 1.05}) + "\n" for row in rows))
    assert main(["scaling", *runs]) == ExitCode.DONE
    assert "warning" in capsys.readouterr().out


def test_other_tokenizers_are_refused_and_other_data_warned_of(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = str(write_run(tmp_path / "other", 32, 800_000, tokenizer="u"))
    assert main(["scaling", *runs, other]) == ExitCode.DATA
    capsys.readouterr()
    other = str(write_run(tmp_path / "more", 32, 800_000, dataset="e"))
    assert main(["scaling", *runs, other]) == ExitCode.DONE
    assert "warning" in capsys.readouterr().out
