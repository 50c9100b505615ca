"""Compute-optimal runs derived from a number of layers."""

from dataclasses import replace

import pytest

from megatoken.base.config.load import load_config, resolve
from megatoken.base.config.presets import PRESETS
from megatoken.base.errors import ConfigError
from megatoken.model.flops import count_matmul_parameters

WIDTH = 64 * 12


def test_depth_12_is_the_size_of_modern_124m():
    config = load_config("depth-12")
    base = load_config("modern-124m")
    assert config.model.resolve(50257) == PRESETS["modern-124m"]
    assert config.model.zero_init
    flops = (72 * 12 * WIDTH**2 + 12 * 12 * WIDTH * 1024) * config.budget.tokens
    assert 0.2920 * flops**0.3271 == pytest.approx(259_666, rel=1e-4)
    assert config.budget.batch_tokens == 262144  # the nearest power of two
    assert config.optim.name == base.optim.name == "muon"
    # Half of its batch, the same width.
    assert (base.model.d_model or WIDTH, base.budget.batch_tokens) == (WIDTH, 524288)
    assert config.optim.lr == pytest.approx(base.optim.lr / 2**0.5, rel=0.01)
    assert config.optim.matrix_lr == pytest.approx(base.optim.matrix_lr / 2**0.5, rel=0.01)


@pytest.mark.parametrize(("depth", "heads"), [(1, 1), (3, 3), (6, 3), (12, 6), (20, 10)])
def test_sizes_of_a_depth(depth: int, heads: int):
    config, width = load_config(f"depth-{depth}"), 64 * depth
    model = config.model.resolve(50257)
    sizes = (model.n_layer, model.d_model, model.n_head, model.d_ff)
    assert sizes == (depth, width, heads, 4 * width)
    weights = count_matmul_parameters(replace(model, value_embeddings=False))
    assert config.budget.tokens == 20 * weights
    assert load_config(f"depth-{depth}", "budget.tokens=1e6").budget.tokens == 1e6


def test_learning_rates_follow_width_and_batch():
    small, large = (load_config(f"depth-{depth}") for depth in (6, 24))
    ratio = (large.budget.batch_tokens / small.budget.batch_tokens) ** 0.5
    assert large.optim.matrix_lr / small.optim.matrix_lr == pytest.approx(ratio, rel=0.01)
    assert large.optim.lr / small.optim.lr == pytest.approx(ratio / 4**0.5, rel=0.01)


@pytest.mark.parametrize("name", ["depth-0", "depth-201", "depth12"])
def test_other_depths_are_refused(name: str):
    with pytest.raises(ConfigError):
        resolve(name)
