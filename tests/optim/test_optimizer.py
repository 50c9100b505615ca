"""Optimizers by name: groups, rates, registration, and what is refused."""

import pytest
import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import OptimConfig
from megatoken.base.errors import ConfigError
from megatoken.base.rooms import register
from megatoken.optim.costs import count_optimizer_bytes
from megatoken.optim.optimizer import OptimizerSpec, adopt_optimizer, build_optimizer, set_lr


def small_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6))


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def build_sgd(
    groups: list[dict[str, object]], optim: OptimConfig, implementation: str
) -> torch.optim.Optimizer:
    groups[1]["lr_scale"] = 0.1
    return torch.optim.SGD(groups, lr=optim.lr, momentum=0.9)


def test_adamw_takes_every_setting_and_decays_matrices_only():
    optim = OptimConfig(lr=3e-4, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2)
    matrices, vectors = build_optimizer(small_model(), optim).param_groups
    assert (matrices["lr"], matrices["betas"], matrices["eps"]) == (3e-4, (0.8, 0.9), 1e-6)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
    assert [param.shape for param in matrices["params"]] == [(6, 4)]
    assert [param.shape for param in vectors["params"]] == 3 * [(6,)]


def test_a_registered_optimizer_is_counted_and_group_rates_keep_their_ratio_to_the_schedule():
    register("optimizer", "test-sgd", OptimizerSpec(build=build_sgd, bytes_per_param=4))
    model = ModelConfig(n_layer=2, n_head=2, d_model=32, vocab_size=128, seq_len=16).resolve(0)
    assert 2 * count_optimizer_bytes("test-sgd", model) == count_optimizer_bytes("adamw", model) > 0
    optimizer = build_optimizer(small_model(), OptimConfig(name="test-sgd", lr=0.5))  # type: ignore[arg-type]
    assert rates_of(optimizer) == [0.5, 0.05]
    set_lr(optimizer, 0.2)
    assert rates_of(optimizer) == pytest.approx([0.2, 0.02])
    pairs = zip(small_model(), (0.2, 0.1), strict=True)
    own = torch.optim.SGD([{"params": part.parameters(), "lr": lr} for part, lr in pairs])
    adopt_optimizer(own, 0.1)
    set_lr(own, 0.05)
    assert rates_of(own) == pytest.approx([0.1, 0.05])


def test_optimizer_of_whole_matrices_refuses_shards():
    spec = OptimizerSpec(build=build_sgd, bytes_per_param=0, whole_matrices=True)
    register("optimizer", "test-whole", spec)
    params = {"weight": torch.zeros(3, 4), "bias": torch.zeros(4)}
    optim = OptimConfig(name="test-whole")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"test-whole needs full matrices"):
        build_optimizer(params, optim, sizes={"weight": (6, 4), "bias": (4,)})
    assert build_optimizer(params, optim).param_groups[0]["params"][0].shape == (3, 4)
