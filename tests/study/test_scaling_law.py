"""Laws are recovered from losses that follow them; runs that determine no law are refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatoken.base.errors import ExitCode
from megatoken.base.system.metrics_log import read_metrics
from megatoken.model.flops import count_matmul_parameters
from megatoken.plan.loss_law import list_variables
from megatoken.store.manifest import CheckpointManifest, encode_manifest, encode_model_config
from megatoken.study.scaling_law import choose_terms, fit_law, interval, resample
from tests.conftest import Ask, Call
from tests.tiny_model import TINY_GPT
from tests.tiny_run import write_jsonl

# Hoffmann et al. 2022, equation 10.
E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28
PARAMETERS, TOKENS = (
    x.ravel() for x in np.meshgrid([70e6, 160e6, 410e6, 1e9], [1e9, 4e9, 16e9], indexing="ij")
)
LOSSES = E + A / PARAMETERS**ALPHA + B / TOKENS**BETA

TERMS = choose_terms(PARAMETERS, TOKENS)


def test_chinchillas_law_is_found_again():
    law = fit_law(TERMS, PARAMETERS, TOKENS, LOSSES)
    assert law.terms == ("N", "D")
    assert (law.floor, *law.exponents) == pytest.approx((E, ALPHA, BETA), abs=1e-3)
    assert law.factors == pytest.approx((A, B), rel=0.01)
    expected = E + A / 70e9**ALPHA + B / 1.4e12**BETA
    assert float(law.loss(70e9, 1.4e12)) == pytest.approx(expected, abs=1e-3)
    n, d = law.best_split(1e21)
    assert 6 * n * d == pytest.approx(1e21)
    others = n * np.array([0.8, 0.95, 1.05, 1.25])
    assert (law.loss(others, 1e21 / 6 / others) > law.loss(n, d)).all()


def test_the_interval_of_noisy_losses_holds_the_truth():
    noisy = LOSSES * (1 + np.random.default_rng(1).normal(0, 0.003, len(LOSSES)))
    law = fit_law(TERMS, PARAMETERS, TOKENS, noisy)
    laws = resample(law, PARAMETERS, TOKENS, noisy)
    low, high = interval([float(other.loss(7e9, 140e9)) for other in laws])
    assert low < E + A / 7e9**ALPHA + B / 140e9**BETA < high
    assert 0.01 < high - low < 0.2


def test_runs_that_vary_one_thing_or_both_in_step_fix_a_law_of_that():
    n, d = np.full(6, 1e8), np.geomspace(1e8, 1e10, 6)
    for parameters, tokens, name in ((n, d, "D"), (d, n, "N"), (d, 20 * d, "C")):
        terms = choose_terms(parameters, tokens)
        assert terms == (name,)
        (x,) = list_variables(terms, parameters, tokens)
        law = fit_law(terms, parameters, tokens, 2.0 + 30 / x**0.2)
        assert (law.floor, *law.exponents) == pytest.approx((2.0, 0.2), abs=2e-3)


def write_run(folder: Path, d_model: int, tokens: int, **meta: str) -> Path:
    """Write a run folder as training leaves it, with a loss that follows Chinchilla's law."""
    model = replace(TINY_GPT, d_model=d_model, d_ff=4 * d_model)
    loss = 1.0 + 20 / count_matmul_parameters(model) ** ALPHA + 30 / tokens**BETA
    checkpoint = folder / "checkpoints/step-00000007"
    checkpoint.mkdir(parents=True)
    row = {"kind": "train", "step": 7, "tokens": tokens, "loss": 9.0}
    write_jsonl(folder / "metrics.jsonl", [row, row | {"kind": "val", "loss": loss}])
    (folder / "status.json").write_text('{"state": "done"}')
    facts = {"shape": encode_model_config(model), "tokenizer": "t", "dataset": "d"} | meta
    (checkpoint / "manifest.json").write_bytes(encode_manifest(CheckpointManifest(7, facts, {})))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> str:
    """Write runs of three widths and lengths; return them as arguments of a command."""
    sizes = [(d, tokens) for d in (32, 64, 128) for tokens in (100_000, 400_000, 1_600_000)]
    return " ".join(str(write_run(tmp_path / f"w{d}-{tokens}", d, tokens)) for d, tokens in sizes)


def test_command_fits_holds_out_and_extrapolates(runs: str, tmp_path: Path, ask: Ask):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "law.png"
    log = tmp_path / "w32-100000.log"  # of a sweep, matched by w32*
    log.touch()
    result = ask(f"scaling {runs} {log} --flops 1e13 1e15 --plot {picture}")
    fits, (first, second) = result["fits"], result["budgets"]
    found = (fits["E"]["value"], fits["exponent of N"]["value"])
    assert found == pytest.approx((1.0, ALPHA), abs=0.01)
    assert abs(result["held_out"]["error_share"]) < 1e-3
    assert (first["flops"], second["flops"]) == (1e13, 1e15)
    assert 6 * first["N"] * first["D"] == pytest.approx(1e13)
    assert picture.stat().st_size > 10_000


INCOMPLETE = """\
status.json {"state": "stopped"}
metrics.jsonl {"kind": "train", "step": 7, "tokens": 1}
metrics.jsonl {}
checkpoints -
"""


@pytest.mark.parametrize("line", INCOMPLETE.splitlines())
def test_runs_that_do_not_count_are_refused(runs: str, call: Call, line: str):
    name, content = line.split(maxsplit=1)
    path = Path(runs.split()[3]) / name
    if path.is_dir():
        path.rename(path.with_name("gone"))
    else:
        path.write_text(f"{content}\n")
    code, _, printed = call(f"scaling {runs}")
    assert (code, "w64-100000" in printed) == (ExitCode.DATA, True)


def test_too_few_runs_are_refused(runs: str, call: Call):
    folders = runs.split()
    for few in (folders[:3], folders[:2] + folders[3:5]):  # of three lengths, of two of both
        assert call(f"scaling {' '.join(few)}")[0] == ExitCode.DATA


def test_a_check_that_is_far_off_is_a_warning(runs: str, call: Call):
    for is_far_off in (False, True):
        code, printed, _ = call(f"scaling {runs}")
        assert (code, "warning" in printed) == (ExitCode.DONE, is_far_off)
        log = Path(runs.split()[-1]) / "metrics.jsonl"  # of the largest
        write_jsonl(log, [row | {"loss": row["loss"] * 1.05} for row in read_metrics(log.parent)])


def test_other_tokenizers_are_refused_and_other_data_warned_of(
    runs: str, tmp_path: Path, call: Call
):
    other = write_run(tmp_path / "other", 32, 800_000, tokenizer="u")
    assert call(f"scaling {runs} {other}")[0] == ExitCode.DATA
    other = write_run(tmp_path / "more", 32, 800_000, dataset="e")
    code, printed, _ = call(f"scaling {runs} {other}")
    assert (code, "warning" in printed) == (ExitCode.DONE, True)
