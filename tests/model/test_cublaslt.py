"""On a card: a linear layer with GELU in cuBLASLt's epilogue equals torch in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.model.gpt import GPT, set_activation_checkpointing, set_block_kernels
from megatoken.model.kernels import cublaslt
from tests.nullgpu.counters import is_loaded
from tests.tiny_model import TINY_GPT, differentiate, draw, relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or is_loaded(), reason="needs an NVIDIA GPU"
)
LIMIT = 8e-3  # relative L2 error; bf16 has 8 significant bits


def draw_scaled(*shape: int, seed: int) -> Tensor:
    return (draw(*shape, seed=seed) / shape[-1] ** 0.5).to("cuda", torch.bfloat16)


@pytest.mark.parametrize(("rows", "width", "out"), [(24, 16, 40), (3001, 160, 640)])
def test_values_and_gradients(rows: int, width: int, out: int):
    shapes = (rows, width), (out, width), (out,), (rows, out)
    *inputs, dy = (draw_scaled(*shape, seed=seed) for seed, shape in enumerate(shapes))
    found = differentiate(lambda *x: cublaslt.linear_gelu(*x)[0], inputs, dy)
    expected = differentiate(
        lambda *x: F.gelu(F.linear(*x), approximate="tanh"), inputs, dy, torch.float64
    )
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative_error(ours, exact) < LIMIT


@pytest.mark.parametrize("mode", ["none", "gelu"])
def test_a_model_has_the_same_hidden_states(mode: Any):
    model = GPT(TINY_GPT, 64).to("cuda", torch.bfloat16)
    ids = torch.arange(8, device="cuda")[None]
    expected = model(ids).detach()
    set_block_kernels(model, cublaslt.KERNELS)
    set_activation_checkpointing(model, mode)
    assert relative_error(model(ids), expected) < LIMIT
