"""Muon on 2 and 4 processes: every layout trains as one process does, and shares the matrices over the processes."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatoken.checkpoint.load import restore_state
from megatoken.checkpoint.manifest import verify
from megatoken.checkpoint.save import save_state
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import OptimConfig
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import ParallelDims, build_dims
from megatoken.distributed.sharded_matrices import assign_owners
from megatoken.model.gpt import GPT, init_weights
from megatoken.optim.muon import Muon, list_hidden_matrices
from megatoken.train.state import StepConfig, TrainState, build_state, gather_model
from megatoken.train.step import train_step
from tests.ranks import run_ranks
from tests.tiny_model import CPU, TINY_GPT, TINY_LLAMA, TINY_MODERN, tiny_config, tiny_step_config

STEPS, ROWS = 4, 8
GPT2 = replace(TINY_GPT, n_head=4)
LLAMA = replace(TINY_LLAMA, n_head=4, n_kv_head=2, tie_embeddings=False)
MODERN = replace(TINY_MODERN, n_head=4, n_kv_head=4)
# model, sharding, tensor-parallel size, processes, processes per machine
LAYOUTS = {
    "ddp on 4": (GPT2, "none", 1, 4, 4),
    "zero1 on 4": (GPT2, "zero1", 1, 4, 4),
    "zero3 on 4": (GPT2, "zero3", 1, 4, 4),
    "hybrid on 2 x 2": (GPT2, "hybrid", 1, 4, 2),
    "tensor on 2 x 2": (GPT2, "none", 2, 4, 4),
    "zero3 x tensor": (GPT2, "zero3", 2, 4, 4),
    "llama, zero3 x tensor": (LLAMA, "zero3", 2, 4, 4),
    "modern, tensor on 2 x 2": (MODERN, "none", 2, 4, 4),
    "modern, zero3 on 4": (MODERN, "zero3", 1, 4, 4),
    "ddp on 2": (GPT2, "none", 1, 2, 2),
    "zero3 on 2": (LLAMA, "zero3", 1, 2, 2),
    "tensor on 2": (LLAMA, "none", 2, 2, 2),
}
OPTIM = OptimConfig(name="muon", lr=1e-3, matrix_lr=0.02, grad_clip=0.5, cautious_decay=True)


def batch(step: int, dims: ParallelDims) -> tuple[Tensor, Tensor]:
    """This rank's rows of a step."""
    rows = torch.randint(0, 97, (ROWS, 17), generator=torch.Generator().manual_seed(step))
    share = ROWS // dims.dp_size
    return rows[dims.dp_rank * share : (dims.dp_rank + 1) * share, :-1], rows[
        dims.dp_rank * share : (dims.dp_rank + 1) * share, 1:
    ]


def step_config_of(dims: ParallelDims) -> StepConfig:
    """Two micro-batches a step."""
    return tiny_step_config(ROWS // dims.dp_size // 2, optim__lr=1e-3, optim__grad_clip=0.5)


def build(model_config: ModelConfig, dims: ParallelDims, comm: Comm) -> TrainState:
    with torch.device("cpu" if dims.is_unsharded else "meta"):
        model = GPT(model_config)
    state = build_state(model, replace(tiny_config(), optim=OPTIM), CPU, dims)
    state.sharded.copy_from_full(init_weights(model, 1))
    state.start_grad_reduction(comm)
    return state


def train(state: TrainState, steps: int) -> list[float]:
    step_config = step_config_of(state.dims)
    return [
        train_step(state, step_config, CPU, Batch(*batch(state.step, state.dims))).loss
        for _ in range(steps)
    ]


def map_known_matrices(state: TrainState) -> list[list[int]]:
    """Check that a function gets whole matrices, and everyone its part of the results; return the shapes it got."""
    full = dict(init_weights(state.model, 7))
    assert isinstance(state.optimizer, Muon)
    matrices, slices = state.optimizer.matrices, state.sharded.slices
    seen: list[list[int]] = []

    def add_corners(wholes: list[Tensor]) -> list[Tensor]:
        seen.extend(list(whole.shape) for whole in wholes)
        return [whole + whole[0, 0] + 2 * whole[-1, -1] for whole in wholes]

    found = matrices.map(add_corners, [slices[name].take(full[name]) for name in matrices.names])
    rows = list_hidden_matrices(state.model)
    for name, part in zip(matrices.names, found, strict=True):
        pieces = full[name].split(rows[name])
        expected = torch.cat([piece + piece[0, 0] + 2 * piece[-1, -1] for piece in pieces])
        assert torch.equal(part, slices[name].take(expected)), name
    return seen


def work(rank: int, world: int, where: str) -> None:
    torch.set_num_threads(1)
    folder = Path(where)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / f'join {world}'}", rank=rank, world_size=world
    )
    dist_env = DistEnv(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    comm = Comm(dist_env, dist.new_group(backend="gloo"))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    found = {}
    for name, (model_config, sharding, tensor, processes, local) in LAYOUTS.items():
        if processes != world:
            continue
        dims = build_dims(
            sharding, tensor, DistEnv(rank=rank, world_size=world, local_world_size=local)
        )
        state = build(model_config, dims, comm)
        found[name] = {"matrices": map_known_matrices(state), "curve": train(state, STEPS)}
        model = gather_model(state)
        if model is not None:
            torch.save(dict(model.named_parameters()), folder / f"{name}.pt")
        if name == "zero3 on 4":
            files = {"config": folder / "config.yaml", "tokenizer": folder / "tokenizer"}
            save_state(folder / name, state, **files, meta={})
    (folder / f"{rank} of {world}.json").write_text(json.dumps(found))
    comm.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muon")
    (folder / "config.yaml").touch()
    (folder / "tokenizer").mkdir()
    for world in (2, 4):
        run_ranks(work, world, str(folder), nprocs=world)
    return folder


@pytest.fixture(scope="module")
def alone() -> dict[int, tuple[list[float], dict[str, Any], list[float]]]:
    """Of one process: the curve, the weights after it, and how the curve goes on."""
    found = {}
    for model_config in (GPT2, LLAMA, MODERN):
        state = build(model_config, ParallelDims(), Comm(DistEnv()))
        curve = train(state, STEPS)
        weights = {
            name: param.detach().clone() for name, param in state.sharded.local_params.items()
        }
        found[id(model_config)] = curve, weights, train(state, 2)
    return found


def read_ranks(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    world = LAYOUTS[name][3]
    for rank in range(world):
        yield json.loads((folder / f"{rank} of {world}.json").read_text())[name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process(
    name: str, results: Path, alone: dict[int, Any]
) -> None:
    curve, weights, _ = alone[id(LAYOUTS[name][0])]
    for found in read_ranks(results, name):
        assert found["curve"] == pytest.approx(curve, rel=1e-6)
    trained = torch.load(results / f"{name}.pt", weights_only=True)
    assert set(trained) == set(weights)
    for parameter, expected in weights.items():
        if (
            ".attention.qkv.bias" in parameter
        ):  # keys' biases cancel in the softmax: their gradient is rounding alone
            continue
        far = ~torch.isclose(trained[parameter], expected, rtol=1e-4, atol=1e-5)
        assert far.float().mean() <= 1e-3, (
            parameter
        )  # AdamW: where a gradient is rounding alone, its sign decides
        torch.testing.assert_close(trained[parameter], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_matrix_is_computed_once_and_the_work_is_shared(name: str, results: Path) -> None:
    model_config = LAYOUTS[name][0]
    rows = list_hidden_matrices(GPT(model_config))
    columns = {
        key: param.shape[1] for key, param in GPT(model_config).named_parameters() if key in rows
    }
    expected = sorted([size, columns[key]] for key, sizes in rows.items() for size in sizes)
    of_ranks = [found["matrices"] for found in read_ranks(results, name)]
    assert sorted(shape for shapes in of_ranks for shape in shapes) == expected
    work = [sum(min(shape) * shape[0] * shape[1] for shape in shapes) for shapes in of_ranks]
    assert max(work) <= 1.5 * sum(work) / len(work)


def test_what_four_processes_saved_one_resumes(results: Path, alone: dict[int, Any]) -> None:
    state = build(GPT2, ParallelDims(), Comm(DistEnv()))
    folder = results / "zero3 on 4" / f"step-{STEPS:08d}"
    restore_state(folder, verify(folder), state)
    assert train(state, 2) == pytest.approx(alone[id(GPT2)][2], rel=1e-6)


def test_owners_share_gpt2_evenly() -> None:
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
