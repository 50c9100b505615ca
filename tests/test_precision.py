"""Check loss, gradients, a run and its resume in fp32 and in bf16."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatoken.config.load import load_config
from megatoken.config.schema import Config
from megatoken.console import Console
from megatoken.errors import ExitCode
from megatoken.system.device import Device
from megatoken.train.step import forward_backward
from megatoken.train.train import Trainer
from tests.tiny_model import CPU, tiny_batch, tiny_state, tiny_step_config
from tests.tiny_run import assert_equal_tensors, read_losses, stop_at, write_shards

RELATIVE = {"fp32": 1e-5, "bf16": 2e-2}  # bf16 has 8 bits: 2^-8 a rounding, some of them in a row


@pytest.fixture
def config(tmp_path: Path, precision: str) -> Config:
    return load_config(
        "quickstart",
        *(write_shards(tmp_path), "data.tokenizer=bytes", "optim.lr=1e-2", "model.dropout=0.1"),
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


def test_gradients_are_those_of_fp32(device: Device):
    gradients = []
    for each in (CPU, device):
        state = tiny_state()
        loss = forward_backward(state, tiny_step_config(2), each, tiny_batch()).item()
        gradients.append(
            torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None])
        )
        assert loss == pytest.approx(np.log(97), abs=0.1)
    error = torch.linalg.vector_norm(gradients[1] - gradients[0]) / torch.linalg.vector_norm(
        gradients[0]
    )
    assert error < RELATIVE[device.precision]
    assert (error > 0) == (device.precision == "bf16")


def test_a_run_learns_and_resumes_bit_identical(config: Config, precision: str, tmp_path: Path):
    def fit(out: Path, *callbacks: Callable[[dict[str, Any]], bool]) -> int:
        return Trainer(config, out, console=Console(quiet=True), callbacks=callbacks).fit().code

    full = tmp_path / "full"
    stopped = tmp_path / "stopped"
    assert fit(full) == ExitCode.DONE
    assert json.loads((full / "provenance.json").read_text())["precision"] == precision
    losses = read_losses(full)
    assert losses[0] == pytest.approx(np.log(257), abs=0.2)
    assert losses[-1] < losses[0] - 2
    assert fit(stopped, stop_at(5)) == ExitCode.STOPPED
    assert fit(stopped) == ExitCode.DONE
    assert read_losses(stopped) == losses
    assert_equal_tensors(stopped, full)
