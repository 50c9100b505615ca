"""Every sharding trains like the plain model, and resumes checkpoints of any other sharding.

Four processes are started once, and write all results to files.
"""

import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import OptimConfig
from megatoken.convert.consolidate import consolidate
from megatoken.distributed.comm import Comm, join_process_group
from megatoken.distributed.env import DistEnv
from megatoken.distributed.grad_reduce import fill_buckets
from megatoken.distributed.parallel_dims import ParallelDims, build_dims
from megatoken.distributed.parallelize import local_slice
from megatoken.distributed.sharded_matrices import assign_owners
from megatoken.inference.scorer import ScoredSequence, build_tree, score_trees
from megatoken.model.gpt import GPT, init_weights
from megatoken.optim.muon import Muon, list_hidden_matrices
from megatoken.posttrain.batches import full_model
from megatoken.store.load import load_checkpoint_model, restore_state
from megatoken.store.manifest import verify
from megatoken.store.save import AsyncSave
from megatoken.store.tensor_files import MODEL, OPTIMIZER, TensorReader
from megatoken.train.state import Position, TrainState, gather_model
from megatoken.train.step import forward_backward
from megatoken.train.val_loss import validation_loss
from tests.distributed.sharded_run import (
    ROWS,
    assert_close_weights,
    build_sharded,
    collect_ranks,
    local_batch,
    train,
    two_micro_batches,
)
from tests.tiny_model import CPU, TINY_LLAMA, TINY_MODERN, tiny_config, tiny_step_config

pytestmark = pytest.mark.long  # four processes train in a dozen layouts

WORLD, STEPS = 4, 2
TINY_GPT = ModelConfig(n_layer=2, n_head=4, d_model=32, d_ff=64, vocab_size=97, seq_len=16)
MODERN = replace(
    TINY_MODERN, n_head=4, n_kv_head=2, dropout=0.2, head_dim=16, norm_position="both", bias=True, bias_in="qkv",
    embedding_scale=True, smear=False, backout=False,
)  # fmt: skip
MUON = OptimConfig(
    name="muon", lr=1e-3, matrix_lr=0.02, grad_clip=0.5, cautious_decay=True, equal_rows=True
)
# A layout is of the first family in its name; otherwise of a GPT-2.
FAMILIES = {
    "muon llama": replace(TINY_LLAMA, n_layer=1, n_head=4, n_kv_head=2, tie_embeddings=False),
    "muon modern": replace(TINY_MODERN, n_head=4, n_kv_head=4, smear=False),
    "muon": TINY_GPT,
    "modern": MODERN,
    "dropout": replace(TINY_GPT, dropout=0.1),
    "gpt2": TINY_GPT,
}
BF16 = replace(CPU, precision="bf16")


def read_layouts(table: str) -> dict[str, tuple[str, int, int]]:
    """Return the layout of each line `NAME: SHARDING NUMBER NUMBER`."""
    pairs = (line.split(": ") for line in table.strip().splitlines())
    rows = {name: layout.split() for name, layout in pairs}
    return {name: (kind, int(first), int(second)) for name, (kind, first, second) in rows.items()}


# Sharding, tensor-parallel size, processes per machine.
DIMS = read_layouts("""
ddp: none 1 4
zero1: zero1 1 4
zero2: zero2 1 4
zero3: zero3 1 4
hybrid: hybrid 1 2
tensor: none 2 4
modern, zero3 x tensor: zero3 2 4
muon, ddp: none 1 4
muon, zero1: zero1 1 4
muon, hybrid: hybrid 1 2
muon llama, zero3 x tensor: zero3 2 4
muon modern, zero3: zero3 1 4
""")
# Sharding, tensor-parallel size, processes.
RESUMES = read_layouts("""
3 x zero3: zero3 1 3
2 x zero1: zero1 1 2
2 x ddp: none 1 2
2 x tensor: none 2 2
alone: none 1 1
muon modern alone: none 1 1
""")


@dataclass(frozen=True)
class Results:
    """What four ranks and a single process found; folder: of the ranks' tensors and checkpoints."""

    folder: Path
    ranks: list[dict[str, Any]]
    plain: dict[str, dict[str, Any]]


def windows(dims: ParallelDims, count: int) -> Iterator[np.ndarray]:
    """Return this rank's validation rows, one per forward; the last ranks may have none."""
    rows = np.random.default_rng(5).integers(0, 97, (count, 16))
    for row in range(dims.dp_rank, count + dims.dp_rank, dims.dp_size):
        yield rows[row : row + 1]


def family_of(name: str) -> str:
    return next((family for family in FAMILIES if family in name), "gpt2")


def build(dims: ParallelDims, comm: Comm, family: str = "gpt2") -> TrainState:
    two_axes = dims.dp_shard > 1 and dims.tp_size > 1
    config = tiny_config(machine__activation_checkpointing="block" if two_axes else "none")
    if "muon" in family:
        config = replace(config, optim=MUON)
    return build_sharded(FAMILIES[family], dims, comm, config=config)


def map_matrices(state: TrainState, muon: Muon) -> list[list[int]]:
    """Check that a function gets full matrices and each rank its part; return their shapes."""
    full, slices = dict(init_weights(state.model, 7)), state.sharded.slices
    seen = []

    def add_corners(matrices):
        seen.extend(list(whole.shape) for whole in matrices)
        return [whole + whole[0, 0] + 2 * whole[-1, -1] for whole in matrices]

    names, rows = muon.matrices.names, list_hidden_matrices(state.model)
    parts = muon.matrices.map(add_corners, [slices[name].take(full[name]) for name in names])
    shapes, seen = seen, []
    for name, part in zip(names, parts, strict=True):
        expected = torch.cat(add_corners(list(full[name].split(rows[name]))))
        assert torch.equal(part, slices[name].take(expected)), name
    return shapes


def score(state: TrainState, count: int) -> list[float]:
    options = {"chunk": 8, "comm": state.comm, "dims": state.dims}
    metrics = validation_loss(
        state.model,
        windows(state.dims, count),
        CPU,
        count_bytes=lambda inputs, targets: int(targets[targets >= 0].sum()),
        **options,
    )
    return [metrics[key] for key in ("loss", "target_tokens", "text_bytes")]


def score_questions(state: TrainState) -> list[float]:
    """Log-likelihoods of five questions' branches: one batch, so most ranks have none."""
    rows = np.random.default_rng(6).integers(0, 97, (5, 3, 12))
    rows[:, :, :4] = rows[:, :1, :4]
    trees = [build_tree([ScoredSequence(ids, 6) for ids in question]) for question in rows.tolist()]
    scores = score_trees(state.model, trees, CPU, state.comm)
    return [float(x) for sums in scores for x in sums.log_p]


def run_steps(state: TrainState, comm: Comm) -> dict[str, Any]:
    """Return the gradient norm of the first step, the curve and scores after it."""
    norm = float(state.sharded.global_grad_norm(comm))
    state.optimizer.zero_grad()
    found = {"norm": norm, "curve": train(state, STEPS)}
    found |= {"val": score(state, 7), "val of one window": score(state, 1)}
    if state.dims.tp_size == 1:
        found["scores"] = score_questions(state)
    return found


def run_dims(name: str, dims: ParallelDims, comm: Comm, folder: Path) -> dict[str, Any]:
    """Return the results of one rank for one layout."""
    state = build(dims, comm, family_of(name))
    muon, sharded = state.optimizer, state.sharded
    matrices = map_matrices(state, muon) if isinstance(muon, Muon) else []
    loss = forward_backward(state, two_micro_batches(dims), CPU, local_batch(0, dims))
    gradients = torch.load(folder / f"{family_of(name)}.pt", weights_only=True)
    for key, param in sharded.local_params.items():
        expected = sharded.slices[key].take(gradients[key])
        torch.testing.assert_close(param.grad, expected, rtol=0, atol=1e-7, msg=key)
    found = {"loss": float(loss), "matrices": matrices, **run_steps(state, comm)}
    model, low = gather_model(state), full_model(state, BF16)
    if not dims.is_unsharded:  # a full copy on every rank
        copied = dict(low.named_parameters())
        for key, param in sharded.local_params.items():
            assert torch.equal(sharded.slices[key].take(copied[key]), param.bfloat16())
    if model is not None:
        torch.save(dict(model.named_parameters()), folder / f"{name}.pt")
    save = AsyncSave(folder / name, state, **files_of(folder), meta={})
    train(state, 1)  # while it is written
    save.finish()
    return found


def files_of(folder: Path) -> dict[str, Path]:
    return {"config": folder / "config.yaml", "tokenizer": folder / "tokenizer"}


def work(env: DistEnv, folder: Path) -> dict[str, Any]:
    found = {}
    with join_process_group(env, "cpu") as comm:
        filters = list(warnings.filters)
        for name, (kind, tensor, local) in DIMS.items():
            dims = build_dims(kind, tensor, replace(env, local_rank=0, local_world_size=local))
            found[name] = run_dims(name, dims, comm, folder)
        assert warnings.filters == filters  # those of the host process are unchanged
        found |= train_unsharded(comm, folder)
        low = build_sharded(TINY_GPT, build_dims("zero3", 1, env), comm, device=BF16)
        found["bf16"] = train(low, 2, BF16)
        found["masters"] = reduce_masters(build_dims("none", 1, env), comm, folder)
    # Below the ports that the system gives to other processes.
    first_port = 10_000 + env.port % 10_000
    for port, (name, (kind, tensor, world)) in enumerate(RESUMES.items(), start=first_port):
        if env.rank < world:
            smaller = replace(env, world_size=world, local_world_size=world, port=port)
            with join_process_group(smaller, "cpu") as comm:
                found |= resume(name, build_dims(kind, tensor, smaller), comm, folder)
    return found


def train_unsharded(comm: Comm, folder: Path) -> dict[str, Any]:
    """Train two steps with dropout in micro-batches of 1 and 2, and return both curves.

    Train with fixed micro-batches and gradients added pairwise, and write curve and weights.
    """
    dims, world = build_dims("none", 1, comm.dist_env), comm.dist_env.world_size
    step_configs = [tiny_step_config(size, optim__lr=1e-3) for size in (1, 2)]
    grid = [train(build(dims, comm, "dropout"), 2, step_config=each) for each in step_configs]
    if ROWS // world % 3 == 0:
        state = build(dims, comm)
        step_config = tiny_step_config(3, optim__lr=1e-3, optim__grad_clip=0.5)
        curve = train(state, 3, step_config=replace(step_config, deterministic=True))
        tensors = {"curve": torch.tensor(curve), **state.sharded.local_params}
        torch.save(tensors, folder / f"deterministic on {world}.pt")
    return {f"grid {world}": grid}


def reduce_masters(dims: ParallelDims, comm: Comm, folder: Path) -> list[int]:
    """Write loss and gradients of master weights; return the sizes of the sums over ranks."""
    state = build_sharded(TINY_GPT, dims, comm, starts_reduction=False)
    state.enable_master_weights(deepcopy(state.model).bfloat16())
    state.start_grad_reduction()
    sizes, reduce = [], dist.all_reduce

    def count(tensor, *args, **options):
        sizes.append(tensor.numel())
        return reduce(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", count)
        loss = forward_backward(state, tiny_step_config(1), CPU, local_batch(0, dims))
    found = {name: param.grad for name, param in state.model.named_parameters()}
    torch.save({"loss": loss, **found}, folder / f"masters on {dims.dp_size}.pt")
    return [size for size in sizes if size > 1]


def source_of(name: str) -> str:
    """Return whose checkpoint is resumed."""
    return "muon modern, zero3" if "muon" in name else "zero3"


def resume(name: str, dims: ParallelDims, comm: Comm, folder: Path) -> dict[str, Any]:
    """Resume what four ranks saved, save it again, continue training."""
    state = build(dims, comm, family_of(name))
    saved = folder / source_of(name) / f"step-{STEPS:08d}"
    restore_state(saved, verify(saved), state)
    state.position = Position(step=STEPS)
    AsyncSave(folder / name, state, **files_of(folder), meta={}).finish()
    found = {name: train(state, 2)}
    if name in ("alone", "2 x ddp", "3 x zero3"):
        found |= train_unsharded(comm, folder)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "config.yaml").write_text("version: 2\n")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/vocab.json").write_text("{}")
    plain = {
        family: run_single_process(family, folder / f"{family}.pt")
        for family in {family_of(name) for name in DIMS}
    }
    return Results(folder, collect_ranks(work, folder, nprocs=WORLD), plain)


def run_single_process(family: str, gradients: Path) -> dict[str, Any]:
    """Return the expected results; write the gradients of the first step to a file."""
    comm, dims = Comm(DistEnv()), ParallelDims()
    state = build(dims, comm, family)
    params = state.sharded.local_params
    loss = forward_backward(state, two_micro_batches(dims), CPU, local_batch(0, dims))
    torch.save({name: param.grad for name, param in params.items()}, gradients)
    found = {"loss": float(loss), **run_steps(state, comm)}
    weights = {name: param.detach().clone() for name, param in params.items()}
    return found | {"weights": weights, "next": train(state, 2)}


@pytest.mark.parametrize("name", DIMS)
def test_sharded_training_equals_the_plain_model(name: str, results: Results):
    expected = results.plain[family_of(name)]
    for rank in results.ranks:
        found = rank[name]
        for key in ("loss", "norm", "curve"):
            assert found[key] == pytest.approx(expected[key], rel=1e-6)
        assert found["curve"] == results.ranks[0][name]["curve"]
        if "scores" in found:
            assert found["scores"] == pytest.approx(expected["scores"], rel=1e-5)
        for key in ("val", "val of one window"):
            assert found[key][0] == pytest.approx(expected[key][0], rel=1e-6)
            assert found[key][1:] == expected[key][1:]
    weights = torch.load(results.folder / f"{name}.pt", weights_only=True)
    assert_close_weights(weights, expected["weights"], 5e-5 if "muon" in name else 1e-5)


@pytest.mark.parametrize("name", [name for name in DIMS if "muon" in name])
def test_every_matrix_is_computed_once_and_the_work_is_shared(name: str, results: Results):
    model = GPT(FAMILIES[family_of(name)])
    expected = [
        [size, model.get_parameter(key).shape[1]]
        for key, sizes in list_hidden_matrices(model).items()
        for size in sizes
    ]
    shapes_of_ranks = [found[name]["matrices"] for found in results.ranks]
    assert sorted(chain.from_iterable(shapes_of_ranks)) == sorted(expected)
    work = [sum(min(shape) * shape[0] * shape[1] for shape in shapes) for shapes in shapes_of_ranks]
    assert max(work) <= 1.5 * sum(work) / len(work)


def test_owners_share_gpt2_evenly():
    """12 layers of 4 matrices 768 x 768 and 2 of 768 x 3,072, on 8 processes: each has 6 and 3."""
    with torch.device("meta"):
        model = GPT(PRESETS["gpt2-124m"])
    rows = list_hidden_matrices(model)
    matrices = assign_owners(rows, {name: model.get_parameter(name).shape for name in rows}, 8)
    for rank in range(8):
        owned = [m.shape for m in matrices if m.owner == rank]
        assert (len(owned), owned.count((768, 768))) == (9, 6)


@pytest.mark.parametrize("name", DIMS)
def test_a_checkpoint_has_the_weights_of_its_step(name: str, results: Results):
    """Training continues while the checkpoint is written."""
    saved = saved_by(name, results)
    expected = torch.load(results.folder / f"{name}.pt", weights_only=True)
    assert_equal_tensors(read_all(saved, MODEL), expected)
    ranks = {int(path.stem[6:11]) for path in saved.glob("model-*.safetensors")}
    # The second replica writes nothing.
    replicated = {"ddp": 0, "hybrid": 2, "tensor": 2}
    assert ranks == {*range(replicated.get(name.split(", ")[-1], WORLD))}


def saved_by(name: str, results: Results) -> Path:
    return results.folder / name / f"step-{STEPS:08d}"


def read_all(saved: Path, kind: str) -> dict[str, Tensor]:
    """Return the model's or the optimizer's tensors of a checkpoint."""
    reader = TensorReader(saved, verify(saved), kind)
    return {name: reader.read(name) for name in reader.shapes}


def assert_equal_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_bf16_gathered_by_fsdp_equals_master_weights(results: Results):
    state = build_sharded(TINY_GPT, ParallelDims(), Comm(DistEnv()), device=BF16)
    state.enable_master_weights(deepcopy(state.model).bfloat16())
    assert results.ranks[0]["bf16"] == pytest.approx(train(state, 2, BF16), rel=1e-4)


@pytest.mark.usefixtures("one_thread")  # sums in bf16 depend on the sharding
def test_master_weights_are_summed_once_a_step(results: Results):
    """Six micro-batches on each rank, one sum of everything."""
    assert reduce_masters(ParallelDims(), Comm(DistEnv()), results.folder) == []
    alone, found = (
        torch.load(results.folder / f"masters on {world}.pt", weights_only=True)
        for world in (1, WORLD)
    )
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-7)
    n_params = sum(param.numel() for param in alone.values()) - 1
    assert [rank["masters"] for rank in results.ranks] == WORLD * [[n_params]]


def test_buckets_go_from_the_last_parameter_to_the_first():
    tensors = [torch.zeros(size) for size in (100, 10, 20, 30)]
    buckets = fill_buckets([(tensor, tensor) for tensor in tensors], 4 * 45)
    assert [[len(grad) for grad, _ in bucket] for bucket in buckets] == [[30, 20], [10, 100]]


def test_consolidate_merges_sharded_files(results: Results, tmp_path: Path):
    split = saved_by("modern, zero3 x tensor", results)
    merged = consolidate(split, tmp_path, pytest.fail)
    weights = load_checkpoint_model(split, verify(split)).state_dict()
    assert_equal_tensors(load_file(merged / "model.safetensors"), weights)
    moments = read_all(split, OPTIMIZER)
    assert_equal_tensors(load_file(merged / "optimizer.safetensors"), moments)
    assert verify(merged).meta == verify(split).meta


@pytest.mark.parametrize("name", RESUMES)
def test_four_shards_resume_with_other_dims(name: str, results: Results):
    for kind in (MODEL, OPTIMIZER):
        again, saved = (read_all(saved_by(each, results), kind) for each in (name, source_of(name)))
        assert_equal_tensors(again, saved)
    assert results.ranks[0][name] == pytest.approx(results.plain[family_of(name)]["next"], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in DIMS if "ddp" not in name])
def test_a_rank_opens_only_the_files_that_hold_its_slices(name: str, results: Results):
    (kind, tensor, local), saved = DIMS[name], saved_by(name, results)
    written = build_dims(kind, tensor, DistEnv(world_size=WORLD, local_world_size=local))
    full = torch.load(results.folder / f"{name}.pt", weights_only=True)
    writers = {key: torch.empty(it.shape) for key, it in full.items()}

    def cut(dims):
        config = FAMILIES[family_of(name)]
        return {key: local_slice(key, tuple(it.shape), config, dims) for key, it in full.items()}

    for rank in reversed(range(WORLD)):  # the first of the ranks with the same slice saves it
        for key, part in cut(replace(written, rank=rank)).items():
            part.put(writers[key], torch.full(part.shape, float(rank)))
    for dims in (written, ParallelDims(dp_shard=3), ParallelDims(dp_shard=2, tp_size=2)):
        for rank in range(dims.world_size):
            parts = cut(replace(dims, rank=rank))
            needed = {
                int(n) for key, part in parts.items() for n in part.take(writers[key]).flatten()
            }
            expected = {key: part.take(full[key]) for key, part in parts.items()}
            found = {key: torch.empty(it.shape) for key, it in expected.items()}
            reader = TensorReader(saved, verify(saved), MODEL)
            assert reader.fill(found, parts, lambda _: False) == {}  # none is read in full
            assert {*reader._opened} == {f"model-{n:05d}-of-00004.safetensors" for n in needed}
            assert_equal_tensors(found, expected)


@pytest.mark.fault(41)
def test_the_curve_does_not_depend_on_ranks_and_micro_batches(results: Results):
    curves = [curve for world in (1, 2, 3, 4) for curve in results.ranks[0][f"grid {world}"]]
    for curve in curves:
        assert curve == pytest.approx(curves[0], rel=1e-6)


def test_deterministic_runs_have_the_same_bits_on_1_2_and_4_ranks(results: Results):
    alone, *others = (
        torch.load(results.folder / f"deterministic on {world}.pt", weights_only=True)
        for world in (1, 2, 4)
    )
    for tensors in others:
        assert_equal_tensors(tensors, alone)
