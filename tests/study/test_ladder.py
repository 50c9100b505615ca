"""bench ladder: switches add up, a slower one is left out, and the loss does not change."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.base.console import Console
from megatoken.base.errors import ExitCode, PeerError
from megatoken.base.system.metrics_log import Row
from megatoken.cli.main import main
from megatoken.study.bench import ladder
from megatoken.study.bench.ladder import (
    PLAIN,
    Rung,
    describe_rung,
    list_rungs,
    list_scalings,
    measure_rungs,
)
from megatoken.study.bench.runner import Worker
from megatoken.study.bench.worker import WorkerSpec
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


def test_a_slower_rung_is_left_out():
    worker = Worker(spec=replace(FIRST, batch_seqs=100), seconds=[2.0, 4.0, 3.0])  # of 16 tokens
    for last_speedup, kept, note in (
        (2.6, True, ""),
        (2.7, True, "no gain beyond noise"),
        (2.8, False, "slower here: left out of the rungs below"),
    ):
        row = describe_rung(Rung(name="x"), worker, 200.0, last_speedup, CPU)
        assert (row["kept"], row["note"], row["speedup"]) == (kept, note, pytest.approx(8 / 3))


def test_rungs_that_this_hardware_lacks(monkeypatch: pytest.MonkeyPatch):
    rungs = list_rungs(CPU, TINY_GPT, 1)
    missing = {rung.name for rung in rungs if rung.missing} - {"compile", "native kernels"}
    assert missing == {"TF32 products", "bf16 products", "16 tokens per step"}
    bf16 = list_rungs(replace(CPU, precision="bf16"), TINY_GPT, 1)
    assert not bf16[2].missing
    monkeypatch.setattr(ladder, "cpu_count", lambda: 1)
    assert list_rungs(CPU, TINY_GPT, 1)[-1].name == "16 tokens per step"


def test_processes_double_up_to_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ladder, "cpu_count", lambda: 5)
    scalings = list_scalings(CPU, 2)
    fields = [(each.fields["nproc"], each.fields["batch_seqs"], each.linear) for each in scalings]
    assert fields == [(1, 2, 1), (2, 2, 2), (2, 4, 2), (4, 2, 4), (4, 8, 4)]
    assert [rung.name for rung in scalings if rung.missing] == ["4 strong (one batch divided)"]


def test_a_failing_rung_is_skipped_unless_it_is_the_reference():
    first = list_rungs(CPU, TINY_GPT, 2)[0]
    broken = Rung(name="broken", machine={"attention": "nothing"})
    rows = list(measure_rungs(FIRST, [first, broken, first], CPU, 1, QUIET))
    assert "nothing" in rows[1]["skipped"]
    assert [(row["kept"], row["speedup"]) for row in rows][:2] == [(True, 1.0), (False, None)]
    with pytest.raises(PeerError):
        list(measure_rungs(broken.apply(FIRST), [first], CPU, 1, QUIET))


def bench(arguments: str, tmp_path: Path, ask: Ask) -> list[Row]:
    """Run a benchmark on a tiny preset, which draws a picture; return the rungs."""
    arguments = (
        f"bench {arguments} --preset tiny --repeats 1 --device cpu --out {tmp_path} --name new"
    )
    rungs = ask(arguments)["rungs"]
    for rung in rungs:
        ratio = rung["tokens_per_second"] / rung["plain_tokens_per_second"]
        assert rung["speedup"] == pytest.approx(ratio), "relative to the first"
        assert rung["batch_tokens"] / rung["seconds"] == pytest.approx(rung["tokens_per_second"])
    assert (tmp_path / "new.png").is_file()
    return rungs


def test_switches_keep_the_loss(tmp_path: Path, ask: Ask):
    rungs = bench("ladder --rungs 4,7,12 --batch-tokens 32", tmp_path, ask)
    names = ["flash attention", "padded vocabulary", "32 tokens per step"]
    assert [row["name"] for row in rungs[1:]] == names
    assert [row["batch_tokens"] for row in rungs] == [16, 16, 16, 32]
    losses = [row["loss"] for row in rungs[:3]]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    for wrong in ("--batch-tokens 33", "--rungs 99"):
        arguments = f"bench ladder --preset tiny --device cpu --out {tmp_path} {wrong}"
        assert main(arguments.split()) == ExitCode.CONFIG


def test_processes_divide_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask):
    monkeypatch.setattr(ladder, "cpu_count", lambda: 2)
    one, strong, weak = bench("processes --batch-tokens 32", tmp_path, ask)
    assert [row["batch_tokens"] for row in (one, strong, weak)] == [32, 32, 64]
    assert [row["nproc"] for row in (one, strong, weak)] == [1, 2, 2]
    assert strong["share_of_linear"] == strong["speedup"] / 2
    assert strong["loss"] == pytest.approx(one["loss"], rel=1e-4)
