"""Plans from measurements of this machine, and the lines that training prints about them."""

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatoken.base.config.fields import Duration
from megatoken.base.config.load import load_config
from megatoken.base.config.schema import Config
from megatoken.base.console import Console
from megatoken.base.system import device
from megatoken.base.system.gpus import GPUS
from megatoken.data.dataloader import Batch
from megatoken.model.flops import count_padded_parameters
from megatoken.plan.calibrate import StepTimer, build_run, calibrate
from megatoken.plan.calibration import Calibration, count_run_bytes
from megatoken.plan.commands import plan
from megatoken.plan.expectation import find_calibration
from megatoken.plan.memory_tracker import MemoryTracker
from megatoken.plan.speed import Layout, estimate_step
from megatoken.plan.tuning import micro_batch
from megatoken.train.step import train_step
from megatoken.train.train import Trainer
from tests.conftest import Ask
from tests.tiny_run import read_events

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
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Change to an empty folder, without the data/python that the quickstart's recipe names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    np.save("train_0.npy", np.arange(5000, dtype=np.uint16) % 256)


def load(*arguments: str) -> Config:
    config = load_config("quickstart", "data.path=*.npy", *WORDS, *arguments)
    return replace(config, model=config.model.resolve(257))


def planned_rate(run: str) -> float:
    (event,) = read_events(Path(run), "planned")
    return float(event["tokens_per_second"])


def train(config: Config, run: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Train, and return the printed lines about the plan."""
    Trainer(config, Path(run)).fit()
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan ")]


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
    config = load("evaluate.every=3", "evaluate.tokens=96")
    # 6 steps of 2 micro-batches; 3 evaluations of 1.5 micro-batches, at a third of the seconds.
    seconds = known.run_seconds(config, 6 * 128)
    assert seconds == pytest.approx(6 * (2 * 7 + 3.5) + 3 * 1.5 * 7 / 3)
    one = replace(known, layers=[2], backward_seconds=[2.0], update_seconds=[1.0], step_bytes=[100])
    assert (one.step_seconds(2, 8), one.memory_bytes(2)) == (5.0, 150)


def test_the_micro_batch_is_the_one_that_a_run_takes(monkeypatch: pytest.MonkeyPatch):
    rates = iter([{1: 50.0, 2: 90.0, 4: 101.0, 8: 100.0}])
    monkeypatch.setattr(micro_batch, "tune_micro_batch", lambda *_: next(rates))
    config = load("machine.micro_batch=auto")
    here, known = calibrate(config, 0.0)
    assert (known.micro_batch, known.timed_seqs) == (8, 8)  # of 16 tokens
    Trainer(config, Path("run")).fit()  # measures nothing again
    assert json.loads(Path("run/machine.json").read_text())["micro_batch"] == 8
    assert planned_rate("run") == 128 / known.step_seconds(6, 8)
    assert here.type == "cpu"


@pytest.mark.parametrize(
    ("micro_batch", "batch_seqs", "timed"), [(4, 8, 4), (64, 128, 32), (64, 64, 32)]
)
def test_memory_is_that_of_the_whole_micro_batch_and_time_that_of_a_part(
    micro_batch: int, batch_seqs: int, timed: int
):
    sizes = f"budget.batch_tokens={batch_seqs * 32}", f"machine.micro_batch={micro_batch}"
    config = load("model.seq_len=32", "model.n_layer=2", *sizes)
    here = device.open_device(config.machine)
    timer = StepTimer(config, here)
    timer.run_interleaved()
    assert (timer.micro_batch, timer.timed_seqs) == (micro_batch, timed)
    ids = torch.zeros(batch_seqs, 32, dtype=torch.int64)
    with MemoryTracker() as tracker:
        state, step_config, _ = build_run(config, config.model, here, micro_batch)
        for _ in range(2):
            train_step(state, step_config, here, Batch(ids, ids))
    assert timer.result().step_bytes == [pytest.approx(tracker.peak_bytes, rel=0.03)]


def test_what_was_measured_is_kept_and_training_says_how_far_off_it_was(
    ask: Ask, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plan, "CALIBRATE_SECONDS", 0.0)
    config = load()
    assert train(config, "before", capsys) == []  # nothing measured, nothing guessed
    result = ask(f"plan quickstart --calibrate {WORD_LIST}")
    assert result["tokens"] == 6 * 128
    assert result["hours"] * 3600 * result["tokens_per_second"] >= result["tokens"]
    # Weights, gradients and moments of the blocks.
    assert result["memory_bytes"] > 12 * 6 * 12 * 32**2
    here, _ = calibrate(config, 0.0)
    known = find_calibration(config, here, 4)
    assert known.layers == [1, 4]
    muon = replace(config, optim=replace(config.optim, name="muon"))
    wide = replace(config, model=replace(config.model, d_model=64))
    for other, size in (config, 8), (wide, 4), (muon, 4):
        assert find_calibration(other, here, size) is None
    first, last = train(config, "after", capsys)
    assert "(this machine, measured before)" in first
    assert re.search("than planned|as planned", last)
    assert planned_rate("after") == 128 / known.step_seconds(6, 8)
    saving = replace(config, save=replace(config.save, every=Duration(2)))
    copied = 12 * count_padded_parameters(config.model)  # weights and two moments
    for run, copy in ((config, 0), (saving, copied)):
        assert count_run_bytes(known, run, here) == known.memory_bytes(6) + copy


def plan_six_layers(
    patch: pytest.MonkeyPatch, tokens: float, *arguments: str, memory: int = 10**10
) -> dict[str, Any]:
    """Plan a run as if SIX_LAYERS had been measured on this machine."""
    config = load(*arguments)
    here = device.open_device(config.machine)
    patch.setattr("megatoken.plan.calibrate.calibrate", lambda *_: (here, SIX_LAYERS))
    patch.setattr(type(here), "memory_bytes", lambda *_: memory)
    options = Namespace(recipe="quickstart", price=[3.0, 6.0])
    return plan.plan_here(options, config, tokens, Console())


def test_what_does_not_fit_here_has_no_price(monkeypatch: pytest.MonkeyPatch):
    hours = 2 + 32_768 / 64 / 3 / 3600  # with one evaluation, in micro-batches of 64 tokens
    for memory, costs in (
        (10**10, [pytest.approx(hours), pytest.approx(3 * hours)]),
        (10**9, [None, None]),
    ):
        result = plan_six_layers(monkeypatch, 2 * 3600 * 32.0, memory=memory)
        assert result["tokens_per_second"] == 128 / (2 * 1.0 + 2.0)
        assert result["fits"] == (memory == 10**10)
        assert [result["hours"], result["dollars"]] == costs


def test_a_growing_batch_takes_longer_here(monkeypatch: pytest.MonkeyPatch):
    # 300 batches of half a micro-batch, 150 of one, 100 of one and a half, each with its update,
    # then 35,200 tokens.
    smaller = 300 * (0.5 + 2) + 150 * (1 + 2) + 100 * (1.5 + 2)
    ramp = ("budget.batch_start=32", "budget.batch_ramp=28800")
    for arguments, seconds in (((), 64000 / 128 * 4), (ramp, smaller + 35200 / 128 * 4)):
        budget = ("budget.steps=0", "budget.tokens=64000", "evaluate.tokens=0")
        result = plan_six_layers(monkeypatch, 64000.0, *budget, *arguments)
        assert 3600 * result["hours"] == pytest.approx(seconds)


def test_a_gpu_that_is_known_is_planned_by_arithmetic(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Rename the CPU to an H100: the printed line has the planner's speed for that card."""
    monkeypatch.setattr(device, "find_processor_name", lambda: GPUS["H100"].driver)
    config = load()
    first, last = train(config, "run", capsys)
    layout = Layout(micro_batch=4, micro_steps=2, precision="tf32", program="eager")
    rate = estimate_step(config.model, GPUS["H100"], layout).tokens_per_second
    assert re.match(rf"plan     0s of steps, {rate:,.0f} tokens/s, [\d.]+ MB \(arithmetic\)", first)
    assert last.startswith("plan     steps took ")  # how far off depends on this machine
