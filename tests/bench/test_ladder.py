"""bench ladder: switches add up, a slower one is left out, the loss stays, and what is missing says why."""

import argparse
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatoken.bench import ladder
from megatoken.bench.contender import OURS, Spec
from megatoken.bench.ladder import (
    PLAIN,
    Result,
    choose_rungs,
    climb,
    fill,
    list_rungs,
    publish,
    render,
    summarize,
)
from megatoken.bench.peers import Contender
from megatoken.bench.peers import Result as Found
from megatoken.console import Console
from megatoken.errors import Exit, Fault
from tests.tiny import CPU, SHAPE

FIRST = Spec(
    name=OURS,
    shape=replace(SHAPE, vocab_multiple=1),
    batch_seqs=2,
    device="cpu",
    machine=PLAIN | {"threads": 1},  # beside other tests
    micro_batch=1,
    prepared=False,
)


class Stand:
    """The part of a contender that `fill` reads."""

    def __init__(self, laps: list[float]) -> None:
        self.result = Found(name=OURS, configuration="default", laps=laps, peak_memory_bytes=5, loss=1.5)


def test_a_climb_adds_switches_and_keeps_the_loss() -> None:
    rungs = choose_rungs(list_rungs(CPU, SHAPE, 2), "2,4,7,11")
    results = list(climb(FIRST, rungs, 2, Console(to_stderr=True)))
    assert [result.name for result in results] == [rung.name for rung in rungs]
    measured = [result for result in results if not result.skipped]
    assert measured[0].name.startswith("plain")
    assert [r.name for r in measured[1:]] == ["flash attention", "padded vocabulary", "largest micro-batch"]
    for result in measured:
        assert result.loss == pytest.approx(measured[0].loss, rel=1e-4)
        assert len(result.laps) == 2
        assert result.first_step_seconds is not None
    assert measured[0].speedup == 1.0
    speedup = 1.0
    for result in measured[1:]:
        assert result.gain is not None
        assert result.speedup == pytest.approx(speedup * result.gain.median)
        speedup = result.speedup if result.kept and result.speedup else speedup


def test_switches_turn_what_they_say() -> None:
    spec = FIRST
    for rung in list_rungs(CPU, SHAPE, 2)[:11]:
        spec = rung.apply(spec)
    assert spec.shape == SHAPE
    assert spec.machine["attention"] == spec.machine["linear"] == "auto"
    assert spec.machine["adamw"] == "fused"
    assert spec.machine["loss_chunk"] == "auto"
    assert (spec.micro_batch, spec.prepared) == (0, True)


@pytest.mark.parametrize(("ratios", "kept", "note"), [([1.2, 1.1, 1.3], True, ""), ([0.99], True, "no gain"),
                                                     ([0.5, 0.9, 0.7], False, "slower")])  # fmt: skip
def test_a_slower_rung_is_left_out(ratios: list[float], kept: bool, note: str) -> None:
    result = Result(name="x", tokens=100)
    fill(result, Stand([2.0, 4.0, 3.0]), ratios, 2.0)  # type: ignore[arg-type]
    assert result.kept is kept
    assert note in result.note
    assert result.speedup == pytest.approx(2.0 * sorted(ratios)[len(ratios) // 2])
    row = summarize(result)
    assert row["tokens_per_second"] == pytest.approx(100 / 3.0)
    assert (row["peak_memory_bytes"], row["loss"], row["skipped"]) == (5, 1.5, None)


def test_what_is_missing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {rung.name: rung.missing for rung in list_rungs(CPU, SHAPE, 1) if rung.missing}
    assert missing["bf16 products"] == "cpu is fastest in fp32"
    assert "Ampere" in missing["TF32 products"]
    assert "micro-batch" in missing["largest micro-batch"]
    monkeypatch.setattr(ladder, "cpu_count", lambda: 1)
    assert list_rungs(CPU, SHAPE, 1)[-1].missing == "there is one core"
    text = render([Result(name="data parallel", tokens=1, skipped="alone")])
    assert "| data parallel |" in text
    assert "skipped: alone" in text


def test_processes_double_up_to_the_cores_and_each_has_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "cpu_count", lambda: 5)
    rungs = list_rungs(CPU, SHAPE, 2)[11:]
    assert [(rung.fields["nproc"], rung.fields["batch_seqs"]) for rung in rungs] == [(2, 4), (4, 8)]
    assert "another loss" in rungs[0].note


def test_two_processes_learn_what_one_does_of_the_same_batch() -> None:
    losses = []
    for nproc in (1, 2):
        with Contender(replace(FIRST, batch_seqs=4, nproc=nproc)) as contender:
            contender.warm_up()
            contender.run_lap(3)
            losses.append(contender.result.loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_rungs_are_chosen_by_number() -> None:
    rungs = list_rungs(CPU, SHAPE, 1)
    assert [r.name for r in choose_rungs(rungs, "4, 6")] == [rungs[0].name, rungs[3].name, rungs[5].name]
    with pytest.raises(Fault, match="no such rungs: 99") as fault:
        choose_rungs(rungs, "99")
    assert fault.value.code == Exit.CONFIG


def test_a_rung_that_cannot_run_is_skipped_with_its_reason() -> None:
    broken = replace(list_rungs(CPU, SHAPE, 2)[3], machine={"attention": "nothing"})
    results = list(climb(FIRST, [list_rungs(CPU, SHAPE, 2)[0], broken], 1, Console(to_stderr=True)))
    assert "nothing" in results[1].skipped
    assert results[0].kept


def test_table_picture_and_answer(tmp_path: Path) -> None:
    results = [Result(name=name, tokens=100) for name in ("plain", "faster", "slower")]
    fill(results[0], Stand([2.0, 2.0]), [], 1.0)  # type: ignore[arg-type]
    fill(results[1], Stand([1.0, 1.0]), [2.0, 2.0], 1.0)  # type: ignore[arg-type]
    fill(results[2], Stand([4.0, 4.0]), [0.25], 2.0)  # type: ignore[arg-type]
    for result in results:
        result.first_step_seconds = 1.0
    options = argparse.Namespace(out=tmp_path, preset="gpt2-124m")
    answer: dict[str, Any] = publish(results, options, CPU, Console(to_stderr=True))
    assert answer["speedup"] == 2.0
    assert [rung["kept"] for rung in answer["rungs"]] == [True, True, False]
    assert (tmp_path / "ladder.md").read_text().count("\n") == 7
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert io.StringIO(render(results)).readline().startswith("| rung |")
