"""knob and its worker processes: interleaved rounds on the same ids; failures are reported."""

import json
import math
import multiprocessing
import os
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import build_parser
from benchmarks.knob import run_knob
from benchmarks.rounds import measure_workers
from megatoken.base.console import Console
from megatoken.base.system import environment
from megatoken.data.dataloader import Batch
from megatoken.study.bench import runner
from megatoken.study.bench.main import run_bench
from megatoken.study.bench.runner import Worker
from megatoken.study.bench.training import Training
from megatoken.study.bench.worker import WorkerSpec
from tests.tiny_model import CPU, TINY_GPT

QUIET = Console(quiet=True)
SPEC = WorkerSpec(model_config=TINY_GPT, batch_seqs=4, device="cpu")


def make_training(spec: WorkerSpec, step: Callable[[Batch], float]) -> Training:
    print("not an answer")
    return Training(
        spec=spec, device=CPU, step=step, chosen="stand-in", peak_memory_bytes=lambda: 1
    )


def build_failing(spec: WorkerSpec, stack: ExitStack) -> Training:
    raise ValueError(f"no room {os.environ.get('ADDED')}\nmore")


def build_exiting(spec: WorkerSpec, stack: ExitStack) -> Training:
    return make_training(spec, lambda batch: os._exit(3))


def build_summing(spec: WorkerSpec, stack: ExitStack) -> Training:
    return make_training(spec, lambda batch: float(batch.targets_BT.sum()))


def test_a_failing_worker_is_reported_and_the_others_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "_ADDED_VARIABLES", {"ADDED"})
    monkeypatch.setenv("ADDED", "123")
    names = ("build_failing", "build_exiting", "build_summing", "build_summing")
    specs = [replace(SPEC, builder=f"{__name__}:{name}", prepare_process=False) for name in names]
    measured = []
    for workers in measure_workers([SPEC, *specs], 2, QUIET):
        measured.append(sum(bool(worker.seconds) for worker in workers))
    assert measured == [1, 1, 1, 2, 3]
    ours, failed, exited, other, last = workers
    assert not any(worker.skipped for worker in (ours, other, last))
    assert failed.skipped == "ValueError: no room None"
    assert "code 3" in exited.skipped
    assert (len(ours.seconds), len(last.seconds)) == (6, 2), "ours runs alone, and in every pair"
    pairs = zip(ours.seconds[4:], last.seconds, strict=True)
    assert last.ratios == [reference / seconds for reference, seconds in pairs]
    assert ours.steps == last.steps, "losses after the same number of steps"
    assert last.loss == other.loss, "the same ids"
    assert not any(worker.processes for worker in workers)


@pytest.mark.long
def test_nothing_outlives_the_benchmark(monkeypatch: pytest.MonkeyPatch):
    killed, closed = Worker(spec=SPEC), Worker(spec=SPEC)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "SPAWN", multiprocessing.get_context("spawn"))  # as in use
        assert killed.warm_up()
    killed.processes[0].kill()
    assert killed.run_round(1) is None
    assert "killed" in killed.skipped
    assert closed.warm_up()
    process = closed.processes[0]
    assert process.is_alive()
    closed.close()
    assert not process.is_alive()


def test_a_killed_benchmark_keeps_what_it_measured(tmp_path: Path):
    def bench(options, console):
        yield {"rows": [1]}
        raise KeyboardInterrupt

    options = Namespace(out=tmp_path, name="killed", bench="knob", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        run_bench(bench, options, QUIET, [])
    result = json.loads((tmp_path / "killed.json").read_text())["answer"]
    assert result == {"rows": [1], "unfinished": True}


def test_values_are_interleaved_with_the_first(tmp_path: Path):
    arguments = "knob activation_checkpointing --preset tiny --batch-seqs 4 --repeats 2"
    arguments = f"{arguments} --device cpu --out {tmp_path}"
    rows = run_bench(run_knob, build_parser().parse_args(arguments.split()), QUIET, [])["rows"]
    losses = {row["chosen"]: row["loss"] for row in rows}  # each value chooses its kernels
    assert {(row["chosen"], row["loss"]) for row in rows} == losses.items()
    assert 0 < math.log(TINY_GPT.vocab_size) - rows[0]["loss"] < 1  # it has learned
    assert list(losses.values()) == pytest.approx([rows[0]["loss"]] * len(losses), rel=1e-3)
    for row in rows:
        assert row["gain"] == pytest.approx(rows[0]["seconds"] / row["seconds"])
        repeats = 2 * len(rows) if row is rows[0] else 2
        assert row["tokens_per_second"]["repeats"] == repeats
