"""The core promises in fp32 and in bf16, whichever this machine prefers: loss, gradients, a run, its resume."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatoken.config.load import load_config
from megatoken.config.schema import Config
from megatoken.console import Console
from megatoken.data.dataloader import Batch
from megatoken.errors import ExitCode
from megatoken.system.device import Device
from megatoken.system.metrics_log import read_metrics
from megatoken.train.step import forward_backward, train_step
from megatoken.train.train import Trainer
from tests.tiny_model import CPU, tiny_batch, tiny_state, tiny_step_config

RELATIVE = {"fp32": 1e-5, "bf16": 2e-2}  # bf16 has 8 bits: 2^-8 a rounding, some of them in a row


@pytest.fixture
def config(tmp_path: Path, precision: str) -> Config:
    """Twelve steps on a repetitive byte text, in the precision that `auto` stands for."""
    text = b"to be or not to be, that is the question. " * 300
    np.save(tmp_path / "train_0.npy", np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
    return load_config(
        "quickstart",
        *(
            f"data.path={tmp_path}/*.npy",
            "data.tokenizer=bytes",
            "optim.lr=1e-2",
            "model.dropout=0.1",
        ),
        *("model.n_layer=2", "model.n_head=2", "model.d_model=32", "model.seq_len=16"),
        *(
            "budget.steps=12",
            "budget.batch_tokens=128",
            "sample.every=0",
            "log.plots=false",
            "log.every=1steps",
        ),
        *("machine.device=cpu", "machine.micro_batch=4", "machine.threads=1", "save.every=0"),
        # Fixed instead of measured: the same bits each time.
        *("machine.attention=flash", "machine.gemm_backend=torch", "machine.master_weights=on"),
    )


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out) if row["kind"] == "train"]


def test_gradients_are_those_of_fp32(device: Device) -> None:
    gradients = []
    for each in (CPU, device):
        state = tiny_state()
        loss = forward_backward(state, tiny_step_config(2), each, Batch(*tiny_batch())).item()
        gradients.append(
            torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None])
        )
        assert loss == pytest.approx(np.log(97), abs=0.1)
    error = torch.linalg.vector_norm(gradients[1] - gradients[0]) / torch.linalg.vector_norm(
        gradients[0]
    )
    assert error < RELATIVE[device.precision]
    assert (error > 0) == (device.precision == "bf16")


def test_a_step_does_not_depend_on_the_micro_batch(device: Device) -> None:
    reports = [
        train_step(tiny_state(), tiny_step_config(size), device, Batch(*tiny_batch()))
        for size in (1, 2, 8)
    ]
    for report in reports[1:]:
        assert report.loss == pytest.approx(reports[0].loss, rel=RELATIVE[device.precision] / 10)
        assert report.grad_norm == pytest.approx(
            reports[0].grad_norm, rel=RELATIVE[device.precision]
        )


def test_a_run_learns_and_resumes_bit_identical(
    config: Config, precision: str, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert Trainer(config, whole, console=Console(quiet=True)).fit().code == ExitCode.DONE
    assert json.loads((whole / "provenance.json").read_text())["precision"] == precision
    assert losses(whole)[0] == pytest.approx(np.log(257), abs=0.2)
    assert losses(whole)[-1] < losses(whole)[0] - 2

    stop = [lambda row: row["kind"] == "train" and row["step"] == 5]
    assert (
        Trainer(config, stopped, console=Console(quiet=True), callbacks=stop).fit().code
        == ExitCode.STOPPED
    )
    assert Trainer(config, stopped, console=Console(quiet=True)).fit().code == ExitCode.DONE
    assert losses(stopped) == losses(whole)
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            load_file(run / "checkpoints" / "step-00000012" / file) for run in (stopped, whole)
        )
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
