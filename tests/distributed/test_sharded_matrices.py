"""Muon on 4 processes: every layout trains as one process does and shares the matrices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatoken.checkpoint.load import restore_state
from megatoken.checkpoint.manifest import verify
from megatoken.checkpoint.save import AsyncSave
from megatoken.config.schema import OptimConfig
from megatoken.distributed.comm import Comm, join_process_group
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import ParallelDims, build_dims
from megatoken.distributed.sharded_matrices import assign_owners
from megatoken.model.gpt import GPT, init_weights
from megatoken.optim.muon import Muon, list_hidden_matrices
from megatoken.train.state import TrainState, gather_model
from tests.distributed.sharded_run import assert_close_weights, build_sharded, collect_ranks, train
from tests.tiny_model import TINY_GPT, TINY_LLAMA, TINY_MODERN, tiny_config

STEPS = 3
GPT2 = replace(TINY_GPT, n_head=4)
LLAMA = replace(TINY_LLAMA, n_head=4, n_kv_head=2, tie_embeddings=False)
MODERN = replace(TINY_MODERN, n_head=4, n_kv_head=4, smear=False)
# model, sharding, tensor-parallel size, processes per machine
LAYOUTS = {
    "ddp on 4": (GPT2, "none", 1, 4),
    "zero1 on 4": (GPT2, "zero1", 1, 4),
    "zero3 on 4": (GPT2, "zero3", 1, 4),
    "hybrid on 2 x 2": (GPT2, "hybrid", 1, 2),
    "tensor on 2 x 2": (GPT2, "none", 2, 4),
    "llama, zero3 x tensor": (LLAMA, "zero3", 2, 4),
    "modern, tensor on 2 x 2": (MODERN, "none", 2, 4),
    "modern, zero3 on 4": (MODERN, "zero3", 1, 4),
}
OPTIM = OptimConfig(
    name="muon", lr=1e-3, matrix_lr=0.02, grad_clip=0.5, cautious_decay=True, equal_rows=True
)
CONFIG = replace(tiny_config(), optim=OPTIM)


def map_matrices(state: TrainState) -> list[list[int]]:
    """Check that a function gets full matrices and each rank its part; return their shapes."""
    full = dict(init_weights(state.model, 7))
    assert isinstance(state.optimizer, Muon)
    matrices, slices = state.optimizer.matrices, state.sharded.slices
    seen: list[list[int]] = []

    def add_corners(matrices: list[Tensor]) -> list[Tensor]:
        seen.extend(list(whole.shape) for whole in matrices)
        return [whole + whole[0, 0] + 2 * whole[-1, -1] for whole in matrices]

    found = matrices.map(add_corners, [slices[name].take(full[name]) for name in matrices.names])
    rows = list_hidden_matrices(state.model)
    for name, part in zip(matrices.names, found, strict=True):
        pieces = full[name].split(rows[name])
        expected = torch.cat([piece + piece[0, 0] + 2 * piece[-1, -1] for piece in pieces])
        assert torch.equal(part, slices[name].take(expected)), name
    return seen


def train_layouts(env: DistEnv, folder: Path) -> dict[str, Any]:
    found = {}
    with join_process_group(env, "cpu") as comm:
        for name, (model_config, sharding, tensor, local) in LAYOUTS.items():
            dims = build_dims(sharding, tensor, replace(env, local_rank=0, local_world_size=local))
            state = build_sharded(model_config, dims, comm, config=CONFIG)
            found[name] = {"matrices": map_matrices(state), "curve": train(state, STEPS)}
            model = gather_model(state)
            if model is not None:
                torch.save(dict(model.named_parameters()), folder / f"{name}.pt")
            if name == "zero3 on 4":
                files = {"config": folder / "config.yaml", "tokenizer": folder / "tokenizer"}
                AsyncSave(folder / name, state, **files, meta={}).finish()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks write what tensors they trained."""
    folder = tmp_path_factory.mktemp("muon")
    (folder / "config.yaml").touch()
    (folder / "tokenizer").mkdir()
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    return collect_ranks(train_layouts, folder, nprocs=4)


@pytest.fixture(scope="module")
def alone() -> dict[int, tuple[list[float], dict[str, Tensor], list[float]]]:
    """Of one process: the curve, the weights after it, and how the curve continues."""
    found = {}
    for model_config in (GPT2, LLAMA, MODERN):
        state = build_sharded(model_config, ParallelDims(), Comm(DistEnv()), config=CONFIG)
        curve = train(state, STEPS)
        params = state.sharded.local_params
        weights = {name: param.detach().clone() for name, param in params.items()}
        found[id(model_config)] = curve, weights, train(state, 2)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process(
    name: str, ranks: list[dict[str, Any]], folder: Path, alone: dict[int, Any]
):
    curve, weights, _ = alone[id(LAYOUTS[name][0])]
    for found in ranks:
        assert found[name]["curve"] == pytest.approx(curve, rel=1e-6)
    assert_close_weights(torch.load(folder / f"{name}.pt", weights_only=True), weights, 5e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_matrix_is_computed_once_and_the_work_is_shared(
    name: str, ranks: list[dict[str, Any]]
):
    model = GPT(LAYOUTS[name][0])
    expected = [
        [size, model.get_parameter(key).shape[1]]
        for key, sizes in list_hidden_matrices(model).items()
        for size in sizes
    ]
    shapes_of_ranks = [found[name]["matrices"] for found in ranks]
    assert sorted(shape for shapes in shapes_of_ranks for shape in shapes) == sorted(expected)
    work = [sum(min(shape) * shape[0] * shape[1] for shape in shapes) for shapes in shapes_of_ranks]
    assert max(work) <= 1.5 * sum(work) / len(work)


@pytest.mark.usefixtures("ranks")
def test_what_four_processes_saved_one_resumes(folder: Path, alone: dict[int, Any]):
    state = build_sharded(GPT2, ParallelDims(), Comm(DistEnv()), config=CONFIG)
    saved = folder / "zero3 on 4" / f"step-{STEPS:08d}"
    restore_state(saved, verify(saved), state)
    assert train(state, 2) == pytest.approx(alone[id(GPT2)][2], rel=1e-6)


def test_owners_share_gpt2_evenly():
    """12 layers of 4 matrices 768 x 768 and 2 of 768 x 3,072, on 8 processes: each has 6 and 3."""
    rows = {
        f"{layer}.{name}": [768] * 3 if name == "qkv" else [768]
        for layer in range(12)
        for name in ("qkv", "out")
    }
    rows |= {
        f"{layer}.{name}": [size]
        for layer in range(12)
        for name, size in (("up", 3072), ("down", 768))
    }
    shapes = {name: (sum(sizes), 3072 if "down" in name else 768) for name, sizes in rows.items()}
    owned = [
        [m.shape for m in assign_owners(rows, shapes, 8) if m.owner == rank] for rank in range(8)
    ]
    assert [len(each) for each in owned] == [9] * 8
    assert all(sum(768 == rows == columns for rows, columns in each) == 6 for each in owned)
