"""Check loss, gradients, a run and its resume in fp32 and in bf16."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatoken.base.errors import ExitCode
from megatoken.base.system.device import Device
from megatoken.train.step import forward_backward
from tests.tiny_model import CPU, relative_error, tiny_batch, tiny_state, tiny_step_config
from tests.tiny_run import assert_equal_tensors, read_losses, train, write_shards

RELATIVE = {"fp32": 1e-5, "bf16": 2e-2}  # bf16 has 8 bits: 2^-8 a rounding, some of them in a row


# Fixed kernels instead of measured ones: the same bits each time.
SETTINGS = (
    "data.tokenizer=bytes optim.lr=1e-2 model.dropout=0.1 model.n_layer=2 model.n_head=2 "
    "model.d_model=32 model.seq_len=16 budget.steps=12 budget.batch_tokens=128 sample.every=0 "
    "log.plots=false log.every=1steps machine.device=cpu machine.micro_batch=4 machine.threads=1 "
    "save.every=0 machine.attention=flash machine.gemm_backend=torch machine.master_weights=on"
)


def test_gradients_are_those_of_fp32(device: Device):
    gradients = []
    for each in (CPU, device):
        state = tiny_state()
        loss = forward_backward(state, tiny_step_config(2), each, tiny_batch()).item()
        parameters = state.model.parameters()
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        assert loss == pytest.approx(np.log(97), abs=0.1)
    error = relative_error(gradients[1], gradients[0])
    assert error < RELATIVE[device.precision]
    assert (error > 0) == (device.precision == "bf16")


def test_a_run_learns_and_resumes_bit_identical(precision: str, tmp_path: Path):
    data = write_shards(tmp_path)

    def fit(out: Path, stop: int = 0) -> int:
        return train(out, data, SETTINGS, recipe="quickstart", stop=stop).code

    full, stopped = tmp_path / "full", tmp_path / "stopped"
    assert fit(full) == ExitCode.DONE
    assert json.loads((full / "provenance.json").read_text())["precision"] == precision
    losses = read_losses(full)
    assert losses[0] == pytest.approx(np.log(257), abs=0.2)
    assert losses[-1] < losses[0] - 2
    assert fit(stopped, stop=5) == ExitCode.STOPPED
    assert fit(stopped) == ExitCode.DONE
    assert read_losses(stopped) == losses
    assert_equal_tensors(stopped, full)
