"""Muon against torch's and against its formula in double precision; groups, bad steps, resume, and what it costs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatoken.config.fields import Duration
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import OptimConfig
from megatoken.optim.costs import STATE_BYTES, count_optimizer_bytes, count_saved_bytes
from megatoken.optim.muon import COEFFICIENTS, WholeMatrices, list_hidden_matrices, orthogonalize
from megatoken.optim.optimizer import build_optimizer
from megatoken.train.state import StepConfig, TrainState
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
    model_config: ModelConfig = TINY_GPT, form: str = "auto", **values: object
) -> TrainState:
    optim = OptimConfig(**{"name": "muon", "lr": 3e-3} | values)  # type: ignore[arg-type]
    return tiny_state(optim=optim, model_config=model_config, form=form)


def in_double(matrix: Tensor) -> Tensor:
    """The formula as published, one matrix at a time."""
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    x = matrix.double() if rows <= columns else matrix.double().T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if rows <= columns else x.T) * max(1.0, rows / columns) ** 0.5


@pytest.mark.parametrize("batch_numbers", [1, 1 << 20])
def test_orthogonalize_is_the_published_iteration(
    batch_numbers: int, monkeypatch: pytest.MonkeyPatch
):
    """One matrix at a time, and all of a size together."""
    monkeypatch.setattr("megatoken.optim.muon.BATCH_NUMBERS", {"cpu": batch_numbers})
    matrices = random_matrices()
    for result, matrix in zip(orthogonalize(matrices), matrices, strict=True):
        torch.testing.assert_close(result, in_double(matrix).float(), rtol=1e-4, atol=1e-5)
        scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
        singular = torch.linalg.svdvals(result) / scale
        assert float(singular.max()) < 1.25
        assert int((singular > 0.6).sum()) >= 15  # of 16; one was near 0
    for equal_rows in (False, True):
        (zeros,) = orthogonalize([torch.zeros(3, 4)], equal_rows=equal_rows)
        assert not zeros.any()


def test_equal_rows_keep_direction_and_total_norm():
    pairs = [
        orthogonalize(random_matrices(), equal_rows=equal_rows) for equal_rows in (False, True)
    ]
    for plain, equal in zip(*pairs, strict=True):
        norms = equal.norm(dim=1)
        torch.testing.assert_close(norms, plain.norm().div(len(plain) ** 0.5).expand_as(norms))
        cosines = torch.nn.functional.cosine_similarity(equal, plain)
        torch.testing.assert_close(cosines, torch.ones_like(cosines))


def test_it_equals_torchs_muon():
    """Which computes in bf16; the shapes make sqrt(max(1, rows / columns)) 1.22 once."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(columns, rows, bias=False) for rows, columns in SHAPES]
    ours = torch.nn.Sequential(*layers, torch.nn.LayerNorm(8))
    theirs = [torch.nn.Parameter(layer.weight.detach().clone()) for layer in layers]
    before = [param.detach().clone() for param in theirs]
    optim = OptimConfig(name="muon", lr=0.02, matrix_lr=0.02, weight_decay=0.1, momentum=0.9)
    matrices = WholeMatrices(list_hidden_matrices(ours), torch.bfloat16)
    optimizer = build_optimizer(ours, optim, matrices=matrices)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.9)
    for step in range(4):
        for gradient, layer, param in zip(random_matrices(step), layers, theirs, strict=True):
            layer.weight.grad, param.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    for start, layer, param in zip(before, layers, theirs, strict=True):
        moved, apart = param.detach() - start, (layer.weight - param).detach()
        assert float(apart.norm()) < 0.02 * float(moved.norm())  # rounding to bf16
        assert float(moved.norm()) > 0.1


@pytest.mark.parametrize(
    "model_config", [TINY_GPT, UNTIED, TINY_MODERN], ids=["gpt", "llama", "modern"]
)
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
    seen = []

    def record(matrices: list[Tensor]) -> list[Tensor]:
        seen.extend(matrix.shape for matrix in matrices)
        return [matrix + index for index, matrix in enumerate(matrices)]

    (packed,) = WholeMatrices({"qkv": [2, 1, 1]}).map(record, [torch.zeros(4, 3)])
    assert (seen, packed[:, 0].tolist()) == ([(2, 3), (1, 3), (1, 3)], [0, 0, 1, 2])


def test_the_other_groups_are_adamw():
    state = muon_state(grad_clip=0.0)
    params = dict(state.model.named_parameters())
    names = params.keys() - list_hidden_matrices(state.model).keys()
    others = {name: params[name].detach().clone() for name in sorted(names)}
    twin = build_optimizer(others, OptimConfig(lr=3e-3))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, param in params.items():
            param.grad = torch.randn(param.shape, generator=generator)
            if name in others:
                others[name].grad = param.grad.clone()
        state.optimizer.step()
        twin.step()
    for name, param in others.items():
        assert torch.equal(params[name], param), name


@pytest.mark.parametrize("form", ["fused", "loop"])
def test_clipping_is_that_of_other_optimizers(form: str):
    """A norm far above the limit, twice: momentum mixes gradients of equal lengths."""
    step_config = tiny_step_config(optim__lr=3e-3, optim__grad_clip=0.05)
    state = muon_state(form=form)
    assert state.skips_bad_on_device == (form == "fused")
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
    shrinks = start * update >= 0
    assert shrinks.tolist() == [[True, False], [False, False]]
    for cautious, decayed in (
        (False, start * 0.9),
        (True, torch.where(shrinks, start * 0.9, start)),
    ):
        layer = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.LayerNorm(2))
        layer[0].weight.data.copy_(start)
        layer[0].weight.grad = gradient.clone()
        rates = {"lr": 0.1, "matrix_lr": 0.1, "weight_decay": 1.0}
        build_optimizer(layer, OptimConfig(name="muon", cautious_decay=cautious, **rates)).step()
        torch.testing.assert_close(layer[0].weight.detach(), decayed - 0.1 * update)


def test_momentum_grows_from_085():
    def config(momentum: float) -> StepConfig:
        growth = {"optim__momentum": momentum, "optim__momentum_warmup": Duration(4)}
        return tiny_step_config(optim__name="muon", **growth)

    expected = [0.85, 0.875, 0.9, 0.95, 0.95]
    assert [config(0.95).momentum_of(step) for step in (0, 1, 2, 4, 9)] == pytest.approx(expected)
    state = muon_state()
    for momentum in expected[:3]:
        train_step(state, config(0.95), CPU, tiny_batch())
        assert state.optimizer.param_groups[-1]["momentum"] == pytest.approx(momentum)
    assert [config(0.5).momentum_of(step) for step in (0, 4)] == [0.5, 0.5]
    assert tiny_step_config(optim__momentum=0.9).momentum_of(0) == 0.9  # no growth unless asked for


@pytest.mark.parametrize(
    "model_config",
    [TINY_GPT, UNTIED, TINY_MODERN, replace(TINY_GPT, value_head=True)],
    ids=["gpt", "llama", "modern", "value head"],
)
def test_state_bytes_are_those_of_the_formula(model_config: ModelConfig):
    model = (state := muon_state(model_config)).model
    hidden, sizes = list_hidden_matrices(model), []
    for name, param in model.named_parameters():
        values = state.optimizer.state[param].items()
        sizes.append(sum(value.nbytes for key, value in values if key != "step"))
        assert sizes[-1] == STATE_BYTES["muon"][name not in hidden] * param.numel(), name
    assert count_optimizer_bytes("muon", model.config) == sum(sizes)
    parameters = sum(4 * param.numel() for param in model.parameters())
    assert count_saved_bytes("muon", model.config) == parameters + sum(sizes)
    assert count_optimizer_bytes("adamw", model.config) == 2 * parameters
