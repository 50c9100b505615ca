"""A plan by measurement of this machine, and what training says of it."""

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatoken.cli import plan
from megatoken.config.fields import Duration
from megatoken.config.load import load_config
from megatoken.console import Console
from megatoken.data.dataloader import Batch
from megatoken.estimate.calibration import Calibration, count_run_bytes
from megatoken.estimate.speed import Layout, estimate_step
from megatoken.measure.calibrate import StepTimer, build_run, calibrate
from megatoken.measure.memory_tracker import MemoryTracker
from megatoken.model.flops import count_padded_parameters
from megatoken.system import device
from megatoken.system.gpus import GPUS
from megatoken.system.metrics_log import read_metrics
from megatoken.train import micro_batch
from megatoken.train.expectation import find_calibration
from megatoken.train.step import train_step
from megatoken.train.train import Trainer
from tests.conftest import Ask

WORD_LIST = """
    model.n_layer=6 model.n_head=2 model.d_model=32 model.seq_len=16 model.vocab_size=257
    machine.device=cpu machine.precision=fp32 machine.micro_batch=4 machine.threads=1
    budget.steps=6 budget.batch_tokens=128 save.every=0 evaluate.every=0 sample.every=0
    log.plots=false data.tokenizer=bytes optim.name=adamw
"""
WORDS = tuple(WORD_LIST.split())
SIX_LAYERS = Calibration(
    layers=[6],
    micro_batch=4,
    timed_seqs=4,
    backward_seconds=[1.0],
    update_seconds=[2.0],
    step_bytes=[10**9],
    base_bytes=10**9,
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data/python of an earlier quickstart is beside these tests, whose recipe names it."""
    monkeypatch.chdir(tmp_path)


def test_layers_and_micro_batches_add_up():
    known = Calibration(
        layers=[1, 4],
        micro_batch=8,
        timed_seqs=4,
        backward_seconds=[2.0, 5.0],
        update_seconds=[1.0, 2.5],
        step_bytes=[100, 400],
        base_bytes=50,
    )
    assert known.step_seconds(12, 4) == 2 + 11 + 1 + 11 * 0.5
    assert known.step_seconds(12, 12) == 3 * 13 + 6.5
    assert known.memory_bytes(12) == 50 + 1200
    config = load_config("quickstart", *WORDS, "evaluate.every=3", "evaluate.tokens=96")
    # 6 steps of 2 micro-batches; 3 evaluations of 1.5 micro-batches, at a third of the seconds.
    seconds = known.run_seconds(config, config.model, 6 * 128)
    assert seconds == pytest.approx(6 * (2 * 7 + 3.5) + 3 * 1.5 * 7 / 3)
    one = replace(known, layers=[2], backward_seconds=[2.0], update_seconds=[1.0], step_bytes=[100])
    assert (one.step_seconds(2, 8), one.memory_bytes(2)) == (5.0, 150)


def test_the_micro_batch_is_the_one_that_a_run_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
):
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    rates = iter([{1: 50.0, 2: 90.0, 4: 101.0, 8: 100.0}])
    monkeypatch.setattr(micro_batch, "tune_micro_batch", lambda *_: next(rates))
    np.save(tmp_path / "train_0.npy", np.arange(5000, dtype=np.uint16) % 256)
    config = load_config(
        "quickstart", f"data.path={tmp_path}/*.npy", *WORDS, "machine.micro_batch=auto"
    )
    here, known = calibrate(config, config.model.resolve(257), 0.0)
    assert (known.micro_batch, known.timed_seqs) == (8, 8)  # of 16 tokens
    trainer = Trainer(config, tmp_path / "run")
    trainer.fit()  # measures nothing anew
    assert json.loads((tmp_path / "run" / "machine.json").read_text())["micro_batch"] == 8
    (row,) = [row for row in read_metrics(tmp_path / "run") if row.get("what") == "planned"]
    assert row["tokens_per_second"] == 128 / known.step_seconds(6, 8)
    assert here.type == "cpu"


@pytest.mark.parametrize(
    ("micro_batch", "batch_seqs", "timed"), [(4, 8, 4), (64, 128, 32), (64, 64, 32)]
)
def test_memory_is_that_of_the_whole_micro_batch_and_time_that_of_a_part(
    micro_batch: int,
    batch_seqs: int,
    timed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
):
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    sizes = f"budget.batch_tokens={batch_seqs * 32}", f"machine.micro_batch={micro_batch}"
    config = load_config("quickstart", *WORDS, "model.seq_len=32", "model.n_layer=2", *sizes)
    model = config.model.resolve(257)
    here = device.open_device(config.machine)
    timer = StepTimer(config, model, here)
    timer.run_interleaved()
    assert (timer.micro_batch, timer.timed_seqs) == (micro_batch, timed)
    ids = torch.zeros(batch_seqs, 32, dtype=torch.int64)
    with MemoryTracker() as tracker:
        state, step_config, _ = build_run(config, model, here, micro_batch)
        for _ in range(2):
            train_step(state, step_config, here, Batch(ids, ids))
    assert timer.result(0).step_bytes == [pytest.approx(tracker.peak_bytes, rel=0.03)]


def test_what_was_measured_is_kept_and_training_says_how_far_off_it_was(
    tmp_path: Path,
    ask: Ask,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
):
    monkeypatch.setattr(plan, "CALIBRATE_SECONDS", 0.0)
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    np.save(tmp_path / "train_0.npy", np.arange(5000, dtype=np.uint16) % 256)
    config = load_config("quickstart", f"data.path={tmp_path}/*.npy", *WORDS)

    def train(name: str) -> list[str]:
        Trainer(config, tmp_path / name).fit()
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan ")]

    assert train("before") == []  # nothing measured, nothing guessed
    answer = ask(f"plan quickstart --calibrate {WORD_LIST}")
    assert answer["tokens"] == 6 * 128
    assert answer["hours"] * 3600 * answer["tokens_per_second"] >= answer["tokens"]
    assert (
        answer["memory_bytes"] > 12 * 6 * 12 * 32**2
    )  # weights, gradients and moments of the blocks
    model = config.model.resolve(257)
    here, _ = calibrate(config, model, 0.0)
    known = find_calibration(config, model, here, 4)
    assert known is not None
    assert known.layers == [1, 4]
    assert find_calibration(config, model, here, 8) is None
    assert find_calibration(config, replace(model, d_model=64), here, 4) is None
    assert (
        find_calibration(replace(config, optim=replace(config.optim, name="muon")), model, here, 4)
        is None
    )
    first, last = train("after")
    assert "tokens/s" in first
    assert "(this machine, measured before)" in first
    assert "than planned" in last or "as planned" in last
    saving = replace(
        config, save=replace(config.save, every=Duration(2))
    )  # a copy of weights and two moments
    assert count_run_bytes(known, config, model, here) == known.memory_bytes(6)
    assert count_run_bytes(known, saving, model, here) == known.memory_bytes(
        6
    ) + 12 * count_padded_parameters(model)
    (row,) = [row for row in read_metrics(tmp_path / "after") if row.get("what") == "planned"]
    assert row["tokens_per_second"] == 128 / known.step_seconds(6, 8)


@pytest.mark.parametrize("fits", [True, False])
def test_what_does_not_fit_here_has_no_price(fits: bool, monkeypatch: pytest.MonkeyPatch):
    here = device.open_device(load_config("quickstart", "machine.device=cpu").machine)
    monkeypatch.setattr("megatoken.measure.calibrate.calibrate", lambda *_: (here, SIX_LAYERS))
    monkeypatch.setattr(type(here), "memory_bytes", lambda *_: 10**10 if fits else 10**9)
    config = load_config("quickstart", *WORDS)
    options = Namespace(recipe="quickstart", price=[3.0, 6.0])
    answer = plan.plan_here(options, config, config.model, 2 * 3600 * 32.0, Console()).data
    assert answer is not None
    assert answer["tokens_per_second"] == 128 / (2 * 1.0 + 2.0)
    assert answer["fits"] == fits
    hours = 2 + 32_768 / 64 / 3 / 3600  # with one evaluation, in micro-batches of 64 tokens
    costs = [answer[key] for key in ("hours", "dollars")]
    assert costs == ([pytest.approx(hours), pytest.approx(3 * hours)] if fits else [None, None])


def test_a_growing_batch_takes_longer_here(monkeypatch: pytest.MonkeyPatch):
    here = device.open_device(load_config("quickstart", "machine.device=cpu").machine)
    monkeypatch.setattr("megatoken.measure.calibrate.calibrate", lambda *_: (here, SIX_LAYERS))
    words = (*WORDS, "budget.steps=0", "budget.tokens=64000", "evaluate.tokens=0")
    options = Namespace(recipe="quickstart", price=[])

    def plan_seconds(*others: str) -> float:
        config = load_config("quickstart", *words, *others)
        answer = plan.plan_here(options, config, config.model, 64000.0, Console()).data
        assert answer is not None
        return 3600 * float(answer["hours"])

    assert plan_seconds() == pytest.approx(64000 / 128 * 4)
    # 300 batches of half a micro-batch, 150 of one, 100 of one and a half, each with its update,
    # then 35,200 tokens.
    smaller = 300 * (0.5 + 2) + 150 * (1 + 2) + 100 * (1.5 + 2)
    assert plan_seconds("budget.batch_start=32", "budget.batch_ramp=28800") == pytest.approx(
        smaller + 35200 / 128 * 4
    )


def test_a_gpu_that_is_known_is_planned_by_arithmetic(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
):
    """A CPU under the name of an H100: the line has the planner's speed for that card."""
    np.save(tmp_path / "train_0.npy", np.arange(5000, dtype=np.uint16) % 256)
    monkeypatch.setattr(device, "find_processor_name", lambda: GPUS["H100"].driver)
    config = load_config("quickstart", f"data.path={tmp_path}/*.npy", *WORDS)
    Trainer(config, tmp_path / "run").fit()
    first, last = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("plan ")
    )
    layout = Layout(micro_batch=4, micro_steps=2, precision="tf32", program="eager")
    rate = estimate_step(config.model.resolve(257), GPUS["H100"], layout).tokens_per_second
    assert re.match(rf"plan     0s of steps, {rate:,.0f} tokens/s, [\d.]+ MB \(arithmetic\)", first)
    assert last.startswith("plan     steps took ")  # how far off depends on this machine
