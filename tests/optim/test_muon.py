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


def random_matrices(seed: int = 0, shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def muon_state(
    model_config: ModelConfig = TINY_GPT, form: str = "auto", **values: object
) -> TrainState:
    optim = OptimConfig(**{"name": "muon", "lr": 3e-3} | values)  # type: ignore[arg-type]
    return tiny_state(optim=optim, model_config=model_config, form=form)


def weights_of(state: TrainState) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in state.model.named_parameters()}


def in_double(matrix: Tensor) -> Tensor:
    """The formula as published, one matrix at a time."""
    a, b, c = COEFFICIENTS
    x = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x if matrix.shape[0] <= matrix.shape[1] else x.T
    return x * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5


def test_orthogonalize_is_the_published_iteration():
    matrices = random_matrices()
    for result, matrix in zip(orthogonalize(matrices), matrices, strict=True):
        torch.testing.assert_close(result, in_double(matrix).float(), rtol=1e-4, atol=1e-5)
        scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
        singular = torch.linalg.svdvals(result) / scale
        assert float(singular.max()) < 1.25
        assert int((singular > 0.6).sum()) >= 15  # of 16; one was near 0


def test_equal_rows_keep_direction_and_total_norm():
    matrices = random_matrices()
    for plain, equal in zip(
        orthogonalize(matrices), orthogonalize(matrices, equal_rows=True), strict=True
    ):
        norms = equal.norm(dim=1)
        torch.testing.assert_close(norms, plain.norm().div(len(plain) ** 0.5).expand_as(norms))
        cosines = torch.nn.functional.cosine_similarity(equal, plain)
        torch.testing.assert_close(cosines, torch.ones_like(cosines))
    assert torch.equal(orthogonalize([torch.zeros(3, 4)], equal_rows=True)[0], torch.zeros(3, 4))


def test_a_batch_of_matrices_equals_one_at_a_time(monkeypatch: pytest.MonkeyPatch):
    together = orthogonalize(random_matrices())
    monkeypatch.setattr("megatoken.optim.muon.BATCH_NUMBERS", {"cpu": 1})
    for one, other in zip(orthogonalize(random_matrices()), together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(orthogonalize([torch.zeros(3, 4)])[0], torch.zeros(3, 4))


class Layers(torch.nn.Module):
    """Matrices alone, so that torch's Muon takes them all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(columns, rows, bias=False) for rows, columns in SHAPES
        )
        self.norm = torch.nn.LayerNorm(8)


def test_it_equals_torchs_muon():
    """Which computes in bf16; the shapes make sqrt(max(1, rows / columns)) 1.22 once."""
    torch.manual_seed(0)
    ours, theirs = Layers(), Layers()
    theirs.load_state_dict(ours.state_dict())
    before = [layer.weight.detach().clone() for layer in ours.layers]
    optim = OptimConfig(name="muon", lr=0.02, matrix_lr=0.02, weight_decay=0.1, momentum=0.9)
    matrices = WholeMatrices(list_hidden_matrices(ours), torch.bfloat16)
    optimizer = build_optimizer(ours, optim, matrices=matrices)
    reference = torch.optim.Muon(
        theirs.layers.parameters(), lr=0.02, weight_decay=0.1, momentum=0.9
    )
    for step in range(4):
        for gradient, own, other in zip(
            random_matrices(step), ours.layers, theirs.layers, strict=True
        ):
            own.weight.grad, other.weight.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    for start, own, other in zip(before, ours.layers, theirs.layers, strict=True):
        moved, apart = other.weight.detach() - start, (own.weight - other.weight).detach()
        assert float(apart.norm()) < 0.02 * float(moved.norm())  # rounding to bf16
        assert float(moved.norm()) > 0.1


@pytest.mark.parametrize(
    "model_config", [TINY_GPT, UNTIED, TINY_MODERN], ids=["gpt", "llama", "modern"]
)
def test_every_parameter_is_in_one_group(model_config: ModelConfig):
    state = muon_state(model_config, matrix_lr=0.03)
    params = dict(state.model.named_parameters())
    decayed, vectors, hidden = (
        [next(name for name, param in params.items() if param is each) for each in group["params"]]
        for group in state.optimizer.param_groups
    )
    assert sorted(decayed + vectors + hidden) == sorted(params)
    embeddings = {"tokens.weight", "positions.weight", "head.weight"} & params.keys()
    embeddings |= {name for name in params if name.endswith("value_tokens.weight")}
    assert set(decayed) == embeddings
    assert hidden == [
        name for name, param in params.items() if param.dim() == 2 and name not in embeddings
    ]
    assert len(hidden) == sum(
        isinstance(module, torch.nn.Linear) for module in state.model.blocks.modules()
    )
    rates = [(group["lr"], group["weight_decay"]) for group in state.optimizer.param_groups]
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
    others = {
        name: params[name].detach().clone()
        for name in params
        if name not in list_hidden_matrices(state.model)
    }
    twin = build_optimizer(others, OptimConfig(lr=3e-3))
    for step in range(3):
        train_step_with_gradients(state, others, step)
        twin.step()
    for name, param in others.items():
        assert torch.equal(params[name], param), name


def train_step_with_gradients(state: TrainState, others: dict[str, Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, param in state.model.named_parameters():
        param.grad = torch.randn(param.shape, generator=generator)
        if name in others:
            others[name].grad = param.grad.clone()
    state.optimizer.step()


@pytest.mark.parametrize("form", ["fused", "loop"])
def test_clipping_is_that_of_other_optimizers(form: str):
    """A norm far above the limit, twice: momentum mixes gradients of equal lengths."""
    step_config = tiny_step_config(optim__lr=3e-3, optim__grad_clip=0.05)
    state = muon_state(form=form)
    assert state.skips_bad_on_device == (form == "fused")
    name = "blocks.0.mlp.up.weight"
    seen: list[Tensor] = []
    for step in range(2):
        before = weights_of(state)
        report = train_step(state, step_config, CPU, tiny_batch(step))
        assert report.grad_norm > 0.1
        seen.append(
            state.optimizer.state[state.model.get_parameter(name)]["momentum_buffer"].clone()
        )
        assert not torch.equal(state.model.get_parameter(name), before[name])
    assert float(torch.stack([each.norm() for each in seen]).max()) < 0.05


def test_cautious_decay_spares_weights_that_the_update_lets_grow():
    start = torch.tensor([[0.5, -0.5], [0.25, -0.25]])
    gradient = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    ends = {}
    for cautious in (False, True):
        layer = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.LayerNorm(2))
        layer[0].weight.data.copy_(start)
        layer[0].weight.grad = gradient.clone()
        optim = OptimConfig(
            name="muon", lr=0.1, matrix_lr=0.1, weight_decay=1.0, cautious_decay=cautious
        )
        build_optimizer(layer, optim).step()
        ends[cautious] = layer[0].weight.detach()
    update = orthogonalize([gradient])[0]
    torch.testing.assert_close(ends[False], start * 0.9 - 0.1 * update)
    shrinks = start * update >= 0
    assert shrinks.tolist() == [[True, False], [False, False]]
    torch.testing.assert_close(ends[True], torch.where(shrinks, start * 0.9, start) - 0.1 * update)


def test_momentum_grows_from_085():
    step_config = tiny_step_config(
        optim__name="muon", optim__momentum=0.95, optim__momentum_warmup=Duration(4)
    )
    assert [round(step_config.momentum_of(step), 6) for step in (0, 1, 2, 4, 9)] == [
        0.85,
        0.875,
        0.9,
        0.95,
        0.95,
    ]
    state = muon_state()
    for expected in (0.85, 0.875, 0.9):
        train_step(state, step_config, CPU, tiny_batch())
        assert state.optimizer.param_groups[-1]["momentum"] == pytest.approx(expected)
    low = tiny_step_config(
        optim__name="muon", optim__momentum=0.5, optim__momentum_warmup=Duration(4)
    )
    assert [low.momentum_of(step) for step in (0, 4)] == [0.5, 0.5]
    assert tiny_step_config(optim__momentum=0.9).momentum_of(0) == 0.9  # no growth unless asked for


@pytest.mark.parametrize(
    "model_config",
    [TINY_GPT, UNTIED, TINY_MODERN, replace(TINY_GPT, value_head=True)],
    ids=["gpt", "llama", "modern", "value head"],
)
def test_state_bytes_are_those_of_the_formula(model_config: ModelConfig):
    state = muon_state(model_config)
    hidden = list_hidden_matrices(state.model)
    total = 0
    for name, param in state.model.named_parameters():
        size = sum(
            value.nbytes for key, value in state.optimizer.state[param].items() if key != "step"
        )
        assert size == STATE_BYTES["muon"][name not in hidden] * param.numel(), name
        total += size
    assert count_optimizer_bytes("muon", state.model.config) == total
    parameters = sum(4 * param.numel() for param in state.model.parameters())
    assert count_saved_bytes("muon", state.model.config) == parameters + total
    assert count_optimizer_bytes("adamw", state.model.config) == 2 * parameters
