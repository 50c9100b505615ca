"""GPT-2's MLP with GELU in cuBLASLt's epilogues equals torch in fp64.

Without a card, torch computes the two products with epilogues, and the MLP's gradients are tested.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.model.gpt import GPT, set_activation_checkpointing, set_block_kernels
from megatoken.model.kernels import cublaslt
from tests.nullgpu.counters import is_loaded
from tests.tiny_model import TINY_GPT, differentiate, draw, relative_error

HAS_CARD = torch.cuda.is_available() and not is_loaded()
DEVICE = "cuda" if HAS_CARD else "cpu"
LIMIT = 8e-3  # relative L2 error; bf16 has 8 significant bits


@cublaslt.linear_gelu.register_kernel("cpu")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    up = F.linear(x, weight, bias)
    return F.gelu(up, approximate="tanh"), up


@cublaslt.gelu_gradient.register_kernel("cpu")
def gelu_gradient(dy: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(dy @ weight, up, approximate="tanh")


@pytest.mark.parametrize(("rows", "width", "out"), [(24, 16, 40), (3001, 160, 640)])
def test_values_and_gradients(rows: int, width: int, out: int):
    shapes = (rows, width), (out, width), (out,), (width, out), (width,), (rows, width)
    *inputs, dy = (
        (draw(*shape, seed=seed) / shape[-1] ** 0.5).to(DEVICE, torch.bfloat16)
        for seed, shape in enumerate(shapes)
    )
    found = differentiate(cublaslt.KERNELS.gelu_mlp, inputs, dy)
    expected = differentiate(
        lambda *x: F.linear(F.gelu(F.linear(*x[:3]), approximate="tanh"), *x[3:]),
        inputs,
        dy,
        torch.float64,
    )
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative_error(ours, exact) < LIMIT


@pytest.mark.parametrize("mode", ["none", "gelu"])
def test_a_model_has_the_same_hidden_states(mode: Any):
    model = GPT(TINY_GPT, 64).to(DEVICE, torch.bfloat16)
    ids = torch.arange(8, device=DEVICE)[None]
    expected = model(ids).detach()
    set_block_kernels(model, cublaslt.KERNELS)
    set_activation_checkpointing(model, mode)
    assert relative_error(model(ids), expected) < LIMIT
