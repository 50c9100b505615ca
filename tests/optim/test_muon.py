"""Muon equals torch's, and its formula in double precision; groups, bad steps and costs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatoken.base.config.fields import Duration
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import OptimConfig
from megatoken.optim.costs import STATE_BYTES, count_optimizer_bytes, count_saved_bytes
from megatoken.optim.muon import COEFFICIENTS, WholeMatrices, list_hidden_matrices, orthogonalize
from megatoken.optim.optimizer import build_optimizer
from megatoken.train.state import TrainState
from megatoken.train.step import train_step
from tests.tiny_model import (
    CPU,
    TINY_GPT,
    TINY_LLAMA,
    TINY_MODERN,
    tiny_batch,
    tiny_state,
    tiny_step_config,
)

UNTIED = replace(TINY_LLAMA, tie_embeddings=False)
SHAPES = ((24, 16), (16, 24), (16, 16), (16, 16))


def random_matrices(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def muon_state(
    model_config: ModelConfig = TINY_GPT, implementation: str = "auto", **values: Any
) -> TrainState:
    optim = OptimConfig(**{"name": "muon", "lr": 3e-3} | values)
    return tiny_state(optim=optim, model_config=model_config, implementation=implementation)


def in_double(matrix: Tensor, equal_rows: bool = False) -> Tensor:
    """The formula as published, one matrix at a time; rows of equal norms keep the total norm."""
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    x = matrix.double() if rows <= columns else matrix.double().T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = (x if rows <= columns else x.T) * max(1.0, rows / columns) ** 0.5
    return x / x.norm(dim=1, keepdim=True) * x.norm() / rows**0.5 if equal_rows else x


@pytest.mark.parametrize("equal_rows", [False, True])
@pytest.mark.parametrize("batch_numbers", [1, 1 << 20])
def test_orthogonalize_is_the_published_iteration(
    batch_numbers: int, equal_rows: bool, monkeypatch: pytest.MonkeyPatch
):
    """Compare single matrices, and batches of equal shapes."""
    monkeypatch.setattr("megatoken.optim.muon.BATCH_NUMBERS", {"cpu": batch_numbers})
    matrices = random_matrices()
    for result, matrix in zip(
        orthogonalize(matrices, equal_rows=equal_rows), matrices, strict=True
    ):
        expected = in_double(matrix, equal_rows).float()
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        singular = torch.linalg.svdvals(in_double(matrix))
        scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
        assert float(singular.max()) < 1.25 * scale
        assert int((singular > 0.6 * scale).sum()) >= 15  # of 16; one was near 0
    (zeros,) = orthogonalize([torch.zeros(3, 4)], equal_rows=equal_rows)
    assert not zeros.any()


def test_it_equals_torchs_muon():
    """torch computes in bf16. For one shape, sqrt(max(1, rows / columns)) is 1.22."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(columns, rows, bias=False) for rows, columns in SHAPES]
    ours = torch.nn.Sequential(*layers, torch.nn.LayerNorm(8))
    before = [layer.weight.detach().clone() for layer in layers]
    theirs = [torch.nn.Parameter(start.clone()) for start in before]
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    matrices = WholeMatrices(list_hidden_matrices(ours), torch.bfloat16)
    optim = OptimConfig(name="muon", matrix_lr=0.02, **settings)
    optimizer = build_optimizer(ours, optim, matrices=matrices)
    reference = torch.optim.Muon(theirs, **settings)
    for step in range(4):
        for gradient, layer, param in zip(random_matrices(step), layers, theirs, strict=True):
            layer.weight.grad, param.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    for start, layer, param in zip(before, layers, theirs, strict=True):
        moved, apart = (param - start).detach().norm(), (layer.weight - param).detach().norm()
        assert float(apart) < 0.02 * float(moved)  # rounding to bf16
        assert float(moved) > 0.1


@pytest.mark.parametrize("model_config", [TINY_GPT, UNTIED, TINY_MODERN])
def test_every_parameter_is_in_one_group(model_config: ModelConfig):
    state = muon_state(model_config, matrix_lr=0.03)
    names = {param: name for name, param in state.model.named_parameters()}
    groups = state.optimizer.param_groups
    decayed, vectors, hidden = ([names[param] for param in group["params"]] for group in groups)
    assert sorted(decayed + vectors + hidden) == sorted(names.values())
    embeddings = ("tokens.weight", "positions.weight", "head.weight")
    assert {*decayed} == {name for name in names.values() if name.endswith(embeddings)}
    modules = state.model.blocks.named_modules(prefix="blocks")
    assert hidden == [f"{name}.weight" for name, x in modules if isinstance(x, torch.nn.Linear)]
    rates = [(group["lr"], group["weight_decay"]) for group in groups]
    assert rates == [(3e-3, 0.1), (3e-3, 0.0), (pytest.approx(0.03), 0.1)]


def test_queries_keys_and_values_are_matrices_of_their_own():
    rows = list_hidden_matrices(muon_state(TINY_LLAMA).model)
    assert rows["blocks.0.attention.qkv.weight"] == [32, 16, 16]
    matrices = WholeMatrices({"qkv": [2, 1, 1]})
    (packed,) = matrices.map(
        lambda parts: [part + len(part) for part in parts], [torch.zeros(4, 3)]
    )
    assert packed[:, 0].tolist() == [2, 2, 1, 1]


def test_the_other_groups_are_adamw():
    state = muon_state(grad_clip=0.0)
    params = dict(state.model.named_parameters())
    names = sorted(params.keys() - list_hidden_matrices(state.model).keys())
    others = {name: params[name].detach().clone() for name in names}
    twin = build_optimizer(others, OptimConfig(lr=3e-3))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, param in params.items():
            param.grad = torch.randn(param.shape, generator=generator)
            if name in others:
                others[name].grad = param.grad.clone()
        state.optimizer.step()
        twin.step()
    torch.testing.assert_close({name: params[name] for name in names}, others, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["fused", "loop"])
def test_clipping_is_that_of_other_optimizers(implementation: str):
    """Take two steps with norms far above the limit, so that momentum mixes clipped gradients."""
    step_config = tiny_step_config(optim__lr=3e-3, optim__grad_clip=0.05)
    state = muon_state(implementation=implementation)
    assert state.skips_bad_on_device == (implementation == "fused")
    param = state.model.get_parameter("blocks.0.mlp.up.weight")
    for step in range(2):
        before = param.detach().clone()
        assert train_step(state, step_config, CPU, tiny_batch(step)).grad_norm > 0.1
        assert float(state.optimizer.state[param]["momentum_buffer"].norm()) < 0.05
        assert not torch.equal(param, before)


def test_cautious_decay_spares_weights_that_the_update_lets_grow():
    start = torch.tensor([[0.5, -0.5], [0.25, -0.25]])
    gradient = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    update = orthogonalize([gradient])[0]
    shrinks = torch.tensor([[True, False], [False, False]])
    assert torch.equal(start * update >= 0, shrinks)
    for cautious in (False, True):
        layer = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.LayerNorm(2))
        weight = layer[0].weight
        weight.data.copy_(start)
        weight.grad = gradient.clone()
        rates = {"lr": 0.1, "matrix_lr": 0.1, "weight_decay": 1.0}
        matrices = WholeMatrices(list_hidden_matrices(layer))
        optim = OptimConfig(name="muon", cautious_decay=cautious, **rates)
        build_optimizer(layer, optim, matrices=matrices).step()
        decayed = torch.where(shrinks, start * 0.9, start) if cautious else start * 0.9
        torch.testing.assert_close(weight.detach(), decayed - 0.1 * update)


def test_momentum_grows_from_085():
    growth = {"optim__name": "muon", "optim__momentum_warmup": Duration(4)}
    step_config = tiny_step_config(optim__momentum=0.95, **growth)
    expected = [0.85, 0.875, 0.9, 0.95, 0.95]
    assert [step_config.momentum_of(step) for step in (0, 1, 2, 4, 9)] == pytest.approx(expected)
    state = muon_state()
    for momentum in expected[:3]:
        train_step(state, step_config, CPU, tiny_batch())
        assert state.optimizer.param_groups[-1]["momentum"] == pytest.approx(momentum)
    assert tiny_step_config(optim__momentum=0.5, **growth).momentum_of(0) == 0.5
    assert tiny_step_config(optim__momentum=0.9).momentum_of(0) == 0.9  # no growth unless asked for


@pytest.mark.parametrize(
    "model_config", [TINY_GPT, UNTIED, TINY_MODERN, replace(TINY_GPT, value_head=True)]
)
def test_state_bytes_are_those_of_the_formula(model_config: ModelConfig):
    state, total, parameters = muon_state(model_config), 0, 0
    config, hidden = state.model.config, list_hidden_matrices(state.model)
    for name, param in state.model.named_parameters():
        values = state.optimizer.state[param].items()
        size = sum(value.nbytes for key, value in values if key != "step")
        assert size == STATE_BYTES["muon"][name not in hidden] * param.numel(), name
        total, parameters = total + size, parameters + param.nbytes
    assert count_optimizer_bytes("muon", config) == total
    assert count_saved_bytes("muon", config) == parameters + total
    assert count_optimizer_bytes("adamw", config) == 2 * parameters
