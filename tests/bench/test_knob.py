"""bench knob: every value is a contender of its own, tells the same loss, and what cannot run says why."""

import json
from pathlib import Path

import pytest

from megatoken.bench.knob import choose_values, set_knob
from megatoken.bench.spec import OURS, Spec
from megatoken.cli import main
from megatoken.errors import Exit, Fault
from tests.bench.test_peers import SIZES
from tests.tiny import SHAPE

SPEC = Spec(name=OURS, shape=SHAPE, batch_seqs=4, device="cpu", micro_batch=4)


def test_values_are_measured_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "knob", "recompute", *SIZES, "--device", "cpu", "--repeats", "2", "--out", str(tmp_path)]
    assert main([*words, "--name", "again", "--json"]) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert [row["value"] for row in answer["rows"]] == ["none", "gelu", "block"]
    losses = [row["loss"] for row in answer["rows"]]
    assert losses == [losses[0]] * 3
    for row in answer["rows"]:
        assert row["skipped"] is None
        assert row["tokens_per_second"]["repeats"] == 2
        assert row["gain"] == pytest.approx(answer["rows"][0]["seconds"] / row["seconds"])
        assert row["first_step_seconds"] > 0
    assert json.loads((tmp_path / "again.json").read_text())["answer"]["knob"] == "recompute"
    assert "| block " in printed.err


def test_a_value_that_cannot_run_does_not_end_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "knob", "attention", *SIZES, "--device", "cpu", "--repeats", "1", "--out", str(tmp_path)]
    assert main([*words, "--values", "flash,cudnn", "--json"]) == 0
    flash, cudnn = json.loads(capsys.readouterr().out)["rows"]
    assert flash["gain"] == 1.0
    assert cudnn["skipped"].startswith("Fault: no cudnn attention for heads of 16 in fp32 on")
    assert cudnn["tokens_per_second"] is None


def test_values_are_those_of_the_recipe() -> None:
    assert choose_values("compile", "") == [(v, v) for v in ("auto", "off", "on", "blocks", "graphs")]
    assert choose_values("loss_chunk", "0,512,512") == [("0", 0), ("512", 512)]
    assert choose_values("tf32", "on,off") == [("on", True), ("off", False)]
    assert set_knob(SPEC, "fused", "off").machine == {"fused": "off"}
    assert set_knob(SPEC, "micro_batch", 2).micro_batch == 2
    assert set_knob(SPEC, "micro_batch", "auto").micro_batch == 0


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("speed", "", "no machine setting 'speed' to time — bench knob — give one of precision, tf32"),
        ("device", "", "no machine setting 'device'"),
        ("loss_chunk", "", "machine.loss_chunk has no list of values — --values"),
        ("compile", "fast", "got 'fast' — --values"),
    ],
)
def test_wrong_words_are_named(name: str, values: str, said: str) -> None:
    with pytest.raises(Fault) as fault:
        choose_values(name, values)
    assert said in str(fault.value)
    assert fault.value.code == Exit.CONFIG
