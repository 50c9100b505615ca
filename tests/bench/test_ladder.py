"""bench ladder: switches add up, a slower one is left out, the loss stays, and what is missing has a reason."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.bench import ladder
from megatoken.bench.ladder import (
    PLAIN,
    Rung,
    choose_rungs,
    describe_rung,
    draw,
    list_rungs,
    measure_rungs,
)
from megatoken.bench.report import format_cell
from megatoken.bench.runner import Worker
from megatoken.bench.scoreboard import list_speeds
from megatoken.bench.spec import OURS, WorkerSpec
from megatoken.cli.main import main
from megatoken.cli.report_page import tabulate_ladder
from megatoken.config.presets import PRESETS
from megatoken.console import Console
from megatoken.errors import ExitCode, MegatokenError
from megatoken.plots import load_pyplot
from tests.tiny_model import CPU, TINY_GPT

QUIET = Console(quiet=True)
FIRST = WorkerSpec(
    name=OURS,
    model_config=replace(TINY_GPT, vocab_multiple=1),
    batch_seqs=2,
    device="cpu",
    machine=PLAIN | {"threads": 1},  # beside other tests
    micro_batch=1,
    prepared=False,
)


def test_rungs_add_switches_and_keep_the_loss() -> None:
    rungs = choose_rungs(list_rungs(CPU, TINY_GPT, 2), "2,4,7,12")
    rows = list(measure_rungs(FIRST, rungs, CPU, 2, QUIET))
    assert [row["name"] for row in rows] == [rung.name for rung in rungs]
    measured = [row for row in rows if not row["skipped"]]
    assert measured[0]["name"].startswith("plain")
    assert [row["name"] for row in measured[1:]] == [
        "flash attention",
        "padded vocabulary",
        "largest micro-batch",
    ]
    for row in measured:
        assert row["loss"] == pytest.approx(measured[0]["loss"], rel=1e-4)
        assert row["rate"]["repeats"] == 2
        assert row["tokens_per_second"] == row["rate"]["median"]
        assert row["first_step_seconds"] is not None
    assert measured[0]["speedup"] == 1.0
    for row in measured[1:]:
        assert row["speedup"] == row["tokens_per_second"] / measured[0]["tokens_per_second"]


def test_switches_change_what_they_are_named_after() -> None:
    spec = FIRST
    for rung in list_rungs(CPU, TINY_GPT, 2)[:12]:
        spec = rung.apply(spec)
    assert spec.model_config == TINY_GPT
    assert (
        spec.machine["attention"]
        == spec.machine["gemm_backend"]
        == spec.machine["master_weights"]
        == "auto"
    )
    assert spec.machine["adamw"] == spec.machine["fused"] == "auto"
    assert spec.machine["loss_chunk"] == "auto"
    assert (spec.micro_batch, spec.prepared) == (0, True)


def make_worker(seconds: list[float]) -> Worker:
    spec = replace(FIRST, batch_seqs=100)  # of 16 tokens
    return Worker(spec=spec, seconds=seconds, peak_memory_bytes=5, loss=1.5, first_step_seconds=1.0)


@pytest.mark.parametrize(("ratios", "kept", "note"), [([1.2, 1.1, 1.3], True, ""), ([0.99], True, "no gain"),
                                                     ([0.5, 0.9, 0.7], False, "slower")])  # fmt: skip
def test_a_slower_rung_is_left_out(ratios: list[float], kept: bool, note: str) -> None:
    row = describe_rung(Rung(name="x"), make_worker([2.0, 4.0, 3.0]), ratios, 200.0, CPU)
    assert row["kept"] is kept
    assert note in row["note"]
    assert row["speedup"] == pytest.approx(8 / 3)
    assert row["tokens_per_second"] == pytest.approx(1600 / 3.0)
    assert (row["peak_memory_bytes"], row["loss"], row["skipped"], row["mfu"]) == (
        5,
        1.5,
        None,
        None,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_missing_has_a_reason(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rungs = list_rungs(replace(CPU, precision=precision), TINY_GPT, 1)
    missing = {rung.name: rung.missing for rung in rungs if rung.missing}
    assert missing.get("bf16 products") == (
        "cpu is fastest in fp32" if precision == "fp32" else None
    )
    assert "Ampere" in missing["TF32 products"]
    assert "micro-batch" in missing["largest micro-batch"]
    monkeypatch.setattr(ladder, "cpu_count", lambda: 1)
    assert list_rungs(CPU, TINY_GPT, 1)[-1].name == "largest micro-batch"
    row = describe_rung(
        Rung(name="data parallel"), Worker(spec=FIRST, skipped="alone"), [], 2.0, CPU
    )
    assert (row["speedup"], row["kept"], row["tokens_per_second"]) == (None, False, None)
    assert row["skipped"] == "alone"


def test_processes_double_up_to_the_cores_and_each_has_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ladder, "cpu_count", lambda: 5)
    rungs = list_rungs(CPU, TINY_GPT, 2)[12:]
    assert [(rung.fields["nproc"], rung.fields["batch_seqs"]) for rung in rungs] == [(2, 4), (4, 8)]
    assert "another loss" in rungs[0].note


def test_two_processes_learn_what_one_does_of_the_same_batch() -> None:
    losses = []
    for nproc in (1, 2):
        worker = Worker(spec=replace(FIRST, batch_seqs=4, nproc=nproc))
        assert worker.warm_up(), worker.skipped
        worker.run_round(3)
        losses.append(worker.loss)
        worker.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_rungs_are_chosen_by_number() -> None:
    rungs = list_rungs(CPU, TINY_GPT, 1)
    assert [r.name for r in choose_rungs(rungs, "4, 6")] == [
        rungs[0].name,
        rungs[3].name,
        rungs[5].name,
    ]
    with pytest.raises(MegatokenError, match="no such rungs: 99") as caught:
        choose_rungs(rungs, "99")
    assert caught.value.code == ExitCode.CONFIG


def test_a_rung_that_cannot_run_is_skipped_with_its_reason() -> None:
    first, broken = (
        list_rungs(CPU, TINY_GPT, 2)[0],
        Rung(name="broken", machine={"attention": "nothing"}),
    )
    rows = list(measure_rungs(FIRST, [first, broken, first], CPU, 1, QUIET))
    assert "nothing" in rows[1]["skipped"]
    assert [row["kept"] for row in rows][:2] == [True, False]
    assert rows[2]["gain"]["repeats"] == 1, "the next one is measured against the first"
    with pytest.raises(
        MegatokenError, match=r"that others are measured against is lost: .*nothing"
    ) as caught:
        list(measure_rungs(broken.apply(FIRST), [first], CPU, 1, QUIET))
    assert caught.value.code == ExitCode.PEER


def test_a_picture_of_kept_and_left_out_rungs(tmp_path: Path) -> None:
    seconds = {"plain": 2.0, "faster": 1.0, "slower": 4.0}
    rows = [
        describe_rung(Rung(name=name), make_worker([s, s]), [2.0 / s], 800.0, CPU)
        for name, s in seconds.items()
    ]
    assert (
        draw(rows, "tiny", load_pyplot(), tmp_path / "ladder.png")
        .read_bytes()
        .startswith(b"\x89PNG")
    )


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", TINY_GPT)
    monkeypatch.setattr("megatoken.bench.runner.MOST_STEPS", 2)
    words = [
        "bench",
        "ladder",
        "--preset",
        "tiny",
        "--batch-tokens",
        "32",
        "--rungs",
        "4",
        "--repeats",
        "1",
    ]
    assert (
        main([*words, "--device", "cpu", "--out", str(tmp_path), "--name", "again", "--json"]) == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert [rung["name"] for rung in answer["rungs"]] == [PLAIN_NAME, "flash attention"]
    assert answer["speedup"] == max(rung["speedup"] for rung in answer["rungs"] if rung["kept"])
    assert answer["batch_tokens"] == 32
    table = (tmp_path / "again.md").read_text()
    assert table.startswith("| rung ")
    seconds = [rung["seconds"] for rung in answer["rungs"]]
    assert [line.split("|")[2].strip() for line in table.splitlines()[2:4]] == [
        format_cell("seconds", s) for s in seconds
    ]
    assert [32 / s for s in seconds] == pytest.approx(
        [rung["tokens_per_second"] for rung in answer["rungs"]]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again.json",
        "again.md",
        "again.png",
    ]
    assert (tmp_path / "again.png").read_bytes().startswith(b"\x89PNG")
    assert main([*words, "--batch-tokens", "33", "--out", str(tmp_path)]) == ExitCode.CONFIG
    assert "33 tokens are no whole sequences" in capsys.readouterr().err


def test_the_speed_up_is_the_same_wherever_it_is_shown() -> None:
    """In the record, the scoreboard and the page of a run."""
    record = json.loads((Path(__file__).parents[2] / "records" / "ladder.json").read_text())
    ratios = [row["ratio"] for row in list_speeds({"here": record["answer"]}, every=True)]
    rungs = [rung for rung in record["answer"]["rungs"] if rung["rate"]]
    assert [rung["speedup"] for rung in rungs] == pytest.approx(ratios)
    rungs[-1]["speedup"] = 99.0  # as a product of gains, in records of earlier versions
    assert all(f"{ratio:.2f}x" in tabulate_ladder(record) for ratio in ratios)


PLAIN_NAME = "plain: fp32, explicit attention, loop AdamW"
