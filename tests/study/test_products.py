"""`products` times the products of a training step: number, sizes and values are equal."""

import pytest
import torch

from benchmarks.products import Layer, build_products, list_layers
from megatoken.base.config.presets import PRESETS
from megatoken.model.flops import count_matmul_parameters
from tests.tiny_model import CPU, differentiate

TOKENS = 4096


@pytest.mark.parametrize("preset", ["gpt2-124m", "llama-110m", "modern-hf-124m"])
def test_products_are_those_of_a_step(preset: str):
    config = PRESETS[preset]
    layers = list_layers(config, TOKENS, [1024])
    flops = sum(6 * layer.rows * layer.width * layer.out * layer.calls for layer in layers)
    padding = (config.padded_vocab_size - config.vocab_size) * config.d_model
    assert flops == 6 * (count_matmul_parameters(config) + padding) * TOKENS


@pytest.mark.parametrize("chunk", [0, 6])
def test_products_are_those_of_autograd(chunk: int):
    layer = Layer(name="up", rows=6, width=3, out=5, has_bias=chunk == 0, calls=2, chunk=chunk)
    results = {name: call() for name, call in build_products(layer, CPU).items()}
    noise = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*size, generator=noise) for size in ((6, 3), (5, 3), (6, 5)))
    assert list(results) == ["forward", "input gradient", "weight gradient"]
    expected = differentiate(torch.nn.functional.linear, (x, weight), grad)
    torch.testing.assert_close([*results.values()], expected)
