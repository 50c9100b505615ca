"""bench ladder: switches add up, a slower one is left out, and the loss does not change."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.bench import ladder
from megatoken.bench.ladder import (
    PLAIN,
    Rung,
    describe_rung,
    list_published,
    list_rungs,
    list_scalings,
    measure_rungs,
    select_rungs,
)
from megatoken.bench.report import format_cell
from megatoken.bench.runner import Worker
from megatoken.bench.worker import WorkerSpec
from megatoken.cli.main import main
from megatoken.config.presets import PRESETS
from megatoken.console import Console
from megatoken.errors import ConfigError, ExitCode, PeerError
from tests.conftest import Ask
from tests.tiny_model import CPU, TINY_GPT

QUIET = Console(quiet=True)
FIRST = WorkerSpec(
    model_config=replace(TINY_GPT, vocab_multiple=1),
    batch_seqs=2,
    device="cpu",
    machine=PLAIN | {"threads": 1},
    micro_batch=1,
    prepare_process=False,
)


def test_rungs_add_switches_and_keep_the_loss():
    rungs = select_rungs(list_rungs(CPU, TINY_GPT, 2), "2,4,7,12")
    rows = list(measure_rungs(FIRST, rungs, CPU, 2, QUIET))
    assert [row["name"] for row in rows] == [rung.name for rung in rungs]
    measured = [row for row in rows if not row["skipped"]]
    assert measured[0]["name"].startswith("plain")
    assert [row["name"] for row in measured[1:]] == [
        "flash attention",
        "padded vocabulary",
        "32 tokens per step",
    ]
    for row in measured:
        assert row["loss"] == pytest.approx(measured[0]["loss"], rel=1e-4)
        assert row["rate"]["repeats"] == 2
        assert row["tokens_per_second"] == row["rate"]["median"]
        assert row["first_step_seconds"] is not None
    assert measured[0]["speedup"] == 1.0
    for row in measured:
        assert row["speedup"] == row["tokens_per_second"] / row["plain_tokens_per_second"]


def test_switches_change_what_they_are_named_after():
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
    assert (spec.micro_batch, spec.prepare_process) == (0, True)


def make_worker(seconds: list[float]) -> Worker:
    spec = replace(FIRST, batch_seqs=100)  # of 16 tokens
    return Worker(spec=spec, seconds=seconds, peak_memory_bytes=5, loss=1.5, first_step_seconds=1.0)


@pytest.mark.parametrize(
    ("last_speedup", "kept", "note"),
    [
        (2.6, True, ""),
        (2.7, True, "no gain beyond noise"),
        (2.8, False, "slower here: left out of the rungs below"),
    ],
)
def test_a_slower_rung_is_left_out(last_speedup: float, kept: bool, note: str):
    row = describe_rung(Rung(name="x"), make_worker([2.0, 4.0, 3.0]), 200.0, last_speedup, CPU)
    assert (row["kept"], row["note"]) == (kept, note)
    assert row["speedup"] == pytest.approx(8 / 3)
    assert row["tokens_per_second"] == pytest.approx(1600 / 3.0)
    assert (row["peak_memory_bytes"], row["loss"], row["mfu"]) == (5, 1.5, None)


def test_rungs_that_this_hardware_lacks(monkeypatch: pytest.MonkeyPatch):
    rungs = list_rungs(CPU, TINY_GPT, 1)
    missing = {rung.name for rung in rungs if rung.missing} - {"compile", "native kernels"}
    assert missing == {"TF32 products", "bf16 products", "16 tokens per step"}
    bf16 = list_rungs(replace(CPU, precision="bf16"), TINY_GPT, 1)
    assert not bf16[2].missing
    monkeypatch.setattr(ladder, "cpu_count", lambda: 1)
    assert list_rungs(CPU, TINY_GPT, 1)[-1].name == "16 tokens per step"
    row = describe_rung(Rung(name="x"), Worker(spec=FIRST, skipped="alone"), 2.0, 1.0, CPU)
    assert (row["speedup"], row["kept"], row["skipped"]) == (None, False, "alone")


def test_processes_double_up_to_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ladder, "cpu_count", lambda: 5)
    rungs = list_rungs(CPU, TINY_GPT, 2)[12:]
    assert [(rung.fields["nproc"], rung.fields["batch_seqs"]) for rung in rungs] == [(2, 4), (4, 8)]
    scalings = list_scalings(CPU, 2)
    fields = [(rung.fields["nproc"], rung.fields["batch_seqs"], rung.linear) for rung in scalings]
    assert fields == [(1, 2, 1), (2, 2, 2), (2, 4, 2), (4, 2, 4), (4, 8, 4)]
    assert [rung.name for rung in scalings if rung.missing] == ["4 strong (one batch divided)"]


def test_two_processes_match_one_on_the_same_batch():
    losses = []
    for nproc in (1, 2):
        worker = Worker(spec=replace(FIRST, batch_seqs=4, nproc=nproc))
        assert worker.warm_up(), worker.skipped
        worker.run_round(3)
        losses.append(worker.loss)
        worker.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_rungs_are_selected_by_number():
    rungs = list_rungs(CPU, TINY_GPT, 1)
    names = [rung.name for rung in select_rungs(rungs, "4, 6")]
    assert names == [rungs[0].name, rungs[3].name, rungs[5].name]
    with pytest.raises(ConfigError):
        select_rungs(rungs, "99")


def test_a_failing_rung_is_skipped_unless_it_is_the_reference():
    first = list_rungs(CPU, TINY_GPT, 2)[0]
    broken = Rung(name="broken", machine={"attention": "nothing"})
    rows = list(measure_rungs(FIRST, [first, broken, first], CPU, 1, QUIET))
    assert "nothing" in rows[1]["skipped"]
    assert [row["kept"] for row in rows][:2] == [True, False]
    speedup = rows[2]["tokens_per_second"] / rows[2]["plain_tokens_per_second"]
    assert rows[2]["speedup"] == speedup, "measured against the first"
    with pytest.raises(PeerError):
        list(measure_rungs(broken.apply(FIRST), [first], CPU, 1, QUIET))


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask):
    monkeypatch.setitem(PRESETS, "tiny", TINY_GPT)
    sizes = "--preset tiny --rungs 4,12 --repeats 1 --device cpu"
    words = f"bench ladder {sizes} --out {tmp_path} --name new --batch-tokens"
    answer = ask(f"{words} 32")
    rungs = answer["rungs"]
    assert [rung["batch_tokens"] for rung in rungs] == [16, 16, 32]
    assert answer["speedup"] == max(rung["speedup"] for rung in rungs if rung["kept"])
    assert answer["batch_tokens"] == 16
    for rung in rungs:
        assert rung["batch_tokens"] / rung["seconds"] == pytest.approx(rung["tokens_per_second"])
        assert rung["speedup"] * rung["plain_tokens_per_second"] == pytest.approx(
            rung["tokens_per_second"]
        )
    table = (tmp_path / "new.md").read_text()
    assert format_cell("seconds", rungs[1]["seconds"]) in table
    assert (tmp_path / "new.png").read_bytes().startswith(b"\x89PNG")
    assert main([*words.split(), "33"]) == ExitCode.CONFIG


def test_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask):
    monkeypatch.setitem(PRESETS, "tiny", TINY_GPT)
    monkeypatch.setattr(ladder, "cpu_count", lambda: 2)
    words = "bench processes --preset tiny --batch-tokens 32 --repeats 1 --device cpu"
    answer = ask(f"{words} --out {tmp_path}")
    one, *others = answer["rungs"]
    assert [row["batch_tokens"] for row in answer["rungs"]] == [32, 32, 64]
    assert (one["nproc"], one["speedup"], one["share_of_linear"]) == (1, 1, 1)
    for row in others:
        assert row["nproc"] == 2
        assert row["share_of_linear"] == row["speedup"] / 2
    assert others[0]["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert (tmp_path / "processes.png").read_bytes().startswith(b"\x89PNG")


def test_published_rungs_are_compared_with_the_first_of_their_device():
    rows = {row["name"]: row for row in list_published()}
    assert rows["T4, notebook: fused AdamW"]["speedup"] == pytest.approx(1200 / 250)
    eight = rows["H100, journey: 8 GPUs"]
    assert eight["speedup"] == pytest.approx(3_046_409 / 27_026)
    assert eight["batch_tokens"] / eight["seconds"] == pytest.approx(3_046_409)
