"""Trainer as a Python program uses it: own model and optimizer, callbacks, several processes."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatoken.base.config.schema import Config
from megatoken.base.console import Console
from megatoken.base.errors import CheckpointError, ConfigError, ExitCode
from megatoken.base.rooms import REGISTERED
from megatoken.distributed import preemption
from megatoken.model.gpt import GPT, Norm
from megatoken.model.kernels.attention import explicit_attention
from megatoken.plan.tuning import compilation
from megatoken.text.load_pretrained import load_pretrained
from megatoken.train import train as pretrain
from megatoken.train.train import Summary, Trainer
from tests.tiny_run import assert_equal_tensors, read_column, read_losses, stop_at, tiny_run


@pytest.fixture(scope="module")
def config(data: str) -> Config:
    return build_config(data)


def build_config(data: str, *settings: str) -> Config:
    own = "evaluate.every=6steps evaluate.tokens=256 save.every=0"
    return tiny_run(data, own, *settings).config


def fit(config: Config, out: Path, **options: Any) -> Summary:
    return Trainer(config, out, console=Console(quiet=True), **options).fit()


def test_a_finished_run_was_not_stopped(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The time limit passes after the last action."""
    clock = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(preemption, "time", clock)
    report_end = pretrain.report_end

    def pass_time(*arguments):
        clock.monotonic = lambda: math.inf
        report_end(*arguments)

    monkeypatch.setattr(pretrain, "report_end", pass_time)
    summary = fit(build_config(data, "save.time_limit=9h"), tmp_path / "run")
    assert (summary.code, summary.reason, summary.tokens) == (ExitCode.DONE, "", 12 * 192)


def test_callbacks_see_every_row_and_status_what_the_run_does(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megatoken.base.system.metrics_log.STATUS_SECONDS", 0.0)
    statuses = {}

    def keep(row):
        at = row["kind"], row["step"]
        statuses[at] = json.loads((tmp_path / "status.json").read_text())

    fit(config, tmp_path, callbacks=[keep])
    trained = [("train", step) for step in range(1, 13)]
    seen = [at for at in statuses if at[0] not in ("event", "save")]
    val = [("val", step) for step in (0, 6, 12)]
    start, ends = ("start", 0), [("finish", 12), ("end", 12)]
    assert seen == [start, val[0], *trained[:6], val[1], *trained[6:], val[2], *ends]
    shown = {at: (row["state"], row["phase"], row["step"]) for at, row in statuses.items()}
    assert shown["val", 0] == ("running", "validate", 0)
    assert shown["train", 3] == ("running", "step", 2)  # the row is written before its status
    assert shown["val", 6] == ("running", "validate", 6)
    assert shown["end", 12] == ("done", "", 12)
    for key in ("loss", "tokens_per_second"):
        assert statuses["val", 0][key] is None
        assert statuses["train", 3][key] == read_column(tmp_path, key)[2]
    end = statuses["end", 12]
    assert statuses["train", 3]["eta_seconds"] >= 0 == end["eta_seconds"]
    assert end["total_steps"] == 12


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_validation_and_samples_do_not_recompile_the_blocks(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled = []

    def keep_graph(graph, _):
        compiled.append(torch.is_grad_enabled())
        return graph.forward

    def compile_blocks(model):
        for block in model.blocks:
            block.compile(backend=keep_graph)

    monkeypatch.setattr(compilation, "_compile_blocks", compile_blocks)
    sampling = "sample.every=6 sample.at_start=true sample.tokens=4"
    fit(build_config(data, sampling, "machine.compile=blocks"), tmp_path / "run")
    assert compiled
    assert all(compiled)


def momentum_sgd(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def test_own_model_and_optimizer_resume_bit_identical(config: Config, tmp_path: Path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for out, seed, stops in ((whole, 3, ()), (stopped, 3, (stop_at(5),)), (stopped, 99, ())):
        model = GPT(config.model, vocab_size=257, seed=seed)  # 99: the checkpoint's replace them
        fit(config, out, model=model, optimizer=momentum_sgd(model), callbacks=stops)
    assert read_losses(stopped) == read_losses(whole)
    assert_equal_tensors(stopped, whole)


def test_own_model_sets_the_starting_weights(config: Config, tmp_path: Path):
    models = {str(seed): GPT(config.model, vocab_size=257, seed=seed) for seed in (config.seed, 3)}
    for name, model in {"none": None, **models}.items():
        fit(config, tmp_path / name, model=model, callbacks=[stop_at(1)])
    none, same, other = (read_losses(tmp_path / name) for name in ("none", *models))
    assert none == same != other


class HalvedNorm(Norm):
    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BTC) / 2


def test_own_modules_are_recorded_and_needed_to_use_the_checkpoint(config: Config, tmp_path: Path):
    model, out = GPT(config.model, vocab_size=257), tmp_path / "run"
    model.norm = HalvedNorm(config.model, config.model.d_model)
    fit(config, out, model=model, callbacks=[stop_at(3)])
    for use in (lambda: fit(config, out), lambda: load_pretrained(out)):
        with pytest.raises(CheckpointError, match=r"test_trainer:HalvedNorm, the model has none"):
            use()
    assert fit(config, out, model=model).code == ExitCode.DONE


class OwnLoss(GPT):
    def loss(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        return 0 * super().loss(inputs_BT, targets_BT)


def test_what_cannot_be_combined_is_refused(config: Config, tmp_path: Path):
    def build(model_class=GPT, **changes):
        return model_class(replace(config.model, **changes), vocab_size=257)

    model = build()
    with pytest.raises(ConfigError):
        Trainer(replace(config, budget=replace(config.budget, batch_tokens=100)), tmp_path / "run")
    for options in (
        {"model": model, "nproc": 2},
        {"optimizer": momentum_sgd(model)},
        *({"model": other} for other in (build(seq_len=8), build(dropout=0.5), build(OwnLoss))),
        {"model": model, "optimizer": momentum_sgd(build())},
        {"model": model, "optimizer": torch.optim.SGD([model.tokens.weight], lr=1e-2)},
    ):
        with pytest.raises(ConfigError):
            fit(config, tmp_path / "run", **options)


def test_resume_with_another_rate_of_the_own_optimizer_is_refused(config: Config, tmp_path: Path):
    model, out = GPT(config.model, vocab_size=257), tmp_path / "run"
    fast, slow = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (2e-2, 1e-2))
    fit(config, out, model=model, optimizer=fast, callbacks=[stop_at(3)])
    # The applied rate is twice the schedule's.
    assert read_column(out, "lr")[3] == fast.param_groups[0]["lr"]
    with pytest.raises(ConfigError):
        fit(config, out, model=model, optimizer=slow)


def test_attention_without_masks_is_refused_before_the_first_step(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def causal(q, k, v, **options):
        return explicit_attention(q, k, v, **options)

    causal.supports_mask = False  # type: ignore[attr-defined]
    monkeypatch.setitem(REGISTERED, "attention", {"test-causal": causal})
    with pytest.raises(ConfigError):
        fit(build_config(data, "sample.every=1 machine.attention=test-causal"), tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.long
def test_two_processes_started_from_python_train_as_one(data: str, tmp_path: Path):
    short = build_config(data, "budget.steps=2")
    alone, split = (fit(short, tmp_path / str(nproc), nproc=nproc) for nproc in (1, 2))
    assert (split.code, split.steps, split.tokens) == (ExitCode.DONE, 2, alone.tokens)
    assert split.loss == pytest.approx(alone.loss, rel=1e-6)
