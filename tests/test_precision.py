"""Check loss and gradients in fp32 and in bf16."""

import numpy as np
import pytest
import torch

from megatoken.base.system.device import Device
from megatoken.train.step import forward_backward
from tests.tiny_model import CPU, relative_error, tiny_batch, tiny_state, tiny_step_config

RELATIVE = {
    "fp32": 1e-5,
    "bf16": 2e-2,
}  # bf16 has 8 bits: each rounding adds 2^-8, and several follow each other


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
