"""Every layout computes the plain model, holds what the arithmetic says, and reads what any other saved.

All of it happens in four processes that are started once; they leave what they found in files.
"""

import gc
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatoken.checkpoint.consolidate import consolidate
from megatoken.checkpoint.restore import load_checkpoint_model, restore_state
from megatoken.checkpoint.save import Save, save_state
from megatoken.checkpoint.store import verify
from megatoken.checkpoint.tensors import MOMENTS, WEIGHTS, Reader
from megatoken.device import Device
from megatoken.evaluate.loss import held_out_loss
from megatoken.evaluate.score import score_trees
from megatoken.evaluate.tree import Asked, build_tree
from megatoken.model.gpt import GPT, draw_weights
from megatoken.parallel.layout import Layout, count_held, lay_out
from megatoken.parallel.ranks import Ranks
from megatoken.parallel.topology import Topology
from megatoken.presets import Shape
from megatoken.train.state import Plan, State, build_state, whole_model
from megatoken.train.step import accumulate_gradients, train_step
from tests.tiny import CPU, tiny_plan, tiny_run

WORLD, STEPS, ROWS = 4, 20, 24
SHAPE = Shape(n_layer=2, n_head=4, d_model=32, d_ff=64, vocab_size=97, seq_len=16)
LLAMA = replace(SHAPE, n_kv_head=2, norm="rmsnorm", positions="rotary", mlp="swiglu", bias=False, tied=False, d_ff=48)
BF16 = replace(CPU, precision="bf16")
LARGER = replace(SHAPE, n_layer=4, d_model=128, d_ff=512)  # next to whose matrices vectors are small
Found = tuple[Path, dict[str, dict[str, Any]]]
# kind, tensor neighbours, processes a machine; of a GPT-2 unless it says otherwise
LAYOUTS = {
    "ddp": ("none", 1, 4),
    "zero1": ("zero1", 1, 4),
    "zero2": ("zero2", 1, 4),
    "zero3": ("zero3", 1, 4),
    "hybrid": ("hybrid", 1, 2),
    "tensor": ("none", 2, 4),
    "zero3 x tensor": ("zero3", 2, 4),
    "llama, zero3 x tensor": ("zero3", 2, 4),
}
WEIGHED = ("zero1", "zero2", "zero3", "tensor", "zero3 x tensor")
RESUMES = {"3 x zero3": (3, "zero3", 1), "2 x zero1": (2, "zero1", 1), "2 x ddp": (2, "none", 1),
           "2 x tensor": (2, "none", 2), "alone": (1, "none", 1)}  # fmt: skip


def batch(step: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """This rank's rows; the first ones have targets that do not count, so that shares are uneven."""
    rows = torch.randint(0, 97, (ROWS, 17), generator=torch.Generator().manual_seed(step))
    inputs, targets = rows[:, :-1], rows[:, 1:].clone()
    targets[:3, 4:] = -1
    share = ROWS // layout.readers
    mine = slice(layout.reader * share, (layout.reader + 1) * share)
    return inputs[mine], targets[mine]


def windows(layout: Layout, count: int) -> Iterator[np.ndarray]:
    """Held-out rows of 16 tokens, one a forward, taken in turn: the last ranks may have none."""
    rows = np.random.default_rng(5).integers(0, 97, (count, 16))
    for turn in range(layout.reader, count + layout.reader, layout.readers):
        yield rows[turn : turn + 1]


def halved(layout: Layout) -> Plan:
    """Two micro-batches a step."""
    return tiny_plan(ROWS // layout.readers // 2, optim__lr=1e-3, optim__clip=0.5)


def shape_of(name: str) -> Shape:
    return LLAMA if "llama" in name else SHAPE


def build(layout: Layout, ranks: Ranks, shape: Shape = SHAPE, device: Device = CPU) -> State:
    with torch.device("cpu" if layout.is_whole else "meta"):
        model = GPT(shape)
    both = layout.shards > 1 and layout.tensor > 1
    run = tiny_run(machine__recompute="block" if both else "none")
    state = build_state(model, run, device, layout)
    state.placement.fill(draw_weights(model, 1))
    state.share(ranks)
    return state


def score(state: State, count: int) -> list[float]:
    held = held_out_loss(
        state.model,
        windows(state.layout, count),
        CPU,
        chunk=8,
        ranks=state.ranks,
        byte_lengths=np.arange(97),
        layout=state.layout,
    )
    return [held.loss, held.targets, held.text_bytes]


def ask(state: State) -> list[float]:
    """Log-likelihoods of the branches of five questions: one batch, so most ranks have none of their own."""
    rows = np.random.default_rng(6).integers(0, 97, (5, 3, 12))
    rows[:, :, :4] = rows[:, :1, :4]
    trees = [build_tree([Asked(ids, 6) for ids in question]) for question in rows]
    return [float(x) for sums in score_trees(state.model, trees, CPU, state.ranks) for x in sums.log_p]


def train(state: State, steps: int, device: Device = CPU) -> list[float]:
    plan = halved(state.layout)
    return [train_step(state, plan, device, *batch(state.step, state.layout)).loss for _ in range(steps)]


def examine(name: str, layout: Layout, ranks: Ranks, folder: Path) -> dict[str, object]:
    """What one rank finds out about one layout."""
    state = build(layout, ranks, shape_of(name))
    loss = accumulate_gradients(state, halved(layout), CPU, *batch(0, layout))
    plain = torch.load(folder / ("llama.pt" if "llama" in name else "gpt2.pt"), weights_only=True)
    placement = state.placement
    wrong = 0.0
    for parameter, kept in placement.kept.items():
        assert kept.grad is not None, parameter
        wrong = max(wrong, float((kept.grad - placement.parts[parameter].take(plain[parameter])).abs().max()))
    norm = float(placement.find_norm(ranks))
    state.optimizer.zero_grad()
    found = {"loss": float(loss), "gradient_error": wrong, "norm": norm}
    found |= {"curve": train(state, STEPS), "val": score(state, 7), "val of one window": score(state, 1)}
    found |= {"asked": ask(state)} if layout.tensor == 1 else {}
    model = whole_model(state)
    if model is not None:
        torch.save(dict(model.named_parameters()), folder / f"{name}.pt")
    save = Save(folder / name, state, config=folder / "config.yaml", tokenizer=folder / "tokenizer", meta={})
    train(state, 1)  # while it is written
    save.finish()
    return found


def live_bytes() -> int:
    """Of all storages that tensors of this process refer to."""
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor):  # some objects warn when asked for their class
            for tensor in (each, each.grad) if each.is_leaf else (each,):
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                if local is not None and local.device.type == "cpu":
                    storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def weigh(layout: Layout, ranks: Ranks) -> dict[str, int]:
    """Bytes that live before the second micro-batch, and what arithmetic says."""
    gc.collect()
    before, seen = live_bytes(), []
    state = build(layout, ranks, LARGER)
    forward = state.forward

    def watch(ids: Tensor) -> Tensor:
        seen.append(live_bytes() - before if len(seen) else 0)
        return forward(ids)

    state.forward = watch
    accumulate_gradients(state, halved(layout), CPU, *batch(0, layout))
    parameters = sum(math.prod(size) for size in state.placement.sizes.values())
    return {"measured": seen[1], "expected": count_held(layout, parameters, "fp32").total_bytes}


def meet(rank: int, world: int, folder: Path, name: str) -> Ranks:
    dist.init_process_group("gloo", init_method=f"file://{folder / name}", rank=rank, world_size=world)
    topology = Topology(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    return Ranks(topology, dist.new_group(backend="gloo"))


def work(rank: int, where: str) -> None:
    torch.set_num_threads(1)
    folder = Path(where)
    ranks = meet(rank, WORLD, folder, "meet")
    found: dict[str, dict[str, object]] = {}
    for name, (kind, tensor, local) in LAYOUTS.items():
        layout = lay_out(kind, tensor, rank=rank, world_size=WORLD, local_world_size=local)
        found[name] = examine(name, layout, ranks, folder)
        if name in WEIGHED:
            found[name] |= weigh(layout, ranks)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    train_in_order(lay_out("none", 1, rank=rank, world_size=WORLD), ranks, folder)
    train_grid(ranks, folder)
    low = lay_out("zero3", 1, rank=rank, world_size=WORLD)
    (folder / "bf16.json").write_text(json.dumps(train(build(low, ranks, device=BF16), 3, BF16)))
    ranks.wait()
    dist.destroy_process_group()
    for name, (world, kind, tensor) in RESUMES.items():
        if rank < world:
            resume(name, lay_out(kind, tensor, rank=rank, world_size=world, local_world_size=world), world, folder)


def train_grid(ranks: Ranks, folder: Path) -> None:
    """Five steps on 48 sequences, in micro-batches of 1, 2 and 4."""
    world, rank = ranks.topology.world_size, ranks.topology.rank
    layout = lay_out("none", 1, rank=rank, world_size=world)
    mine = slice(rank * 48 // world, (rank + 1) * 48 // world)
    curves = {}
    for micro_batch in (1, 2, 4):
        state, plan = build(layout, ranks), tiny_plan(micro_batch, optim__lr=1e-3)
        batches = [batch(step, Layout()) for step in range(10)]
        rows = [[torch.cat(parts)[mine] for parts in zip(*batches[i : i + 2], strict=True)] for i in range(0, 10, 2)]
        curves[micro_batch] = [train_step(state, plan, CPU, *row).loss for row in rows]
    if ranks.topology.is_first:
        (folder / f"grid {world}.json").write_text(json.dumps(curves))


def train_in_order(layout: Layout, ranks: Ranks, folder: Path) -> None:
    """Fixed micro-batches, gradients added in halves."""
    state, plan = build(layout, ranks), replace(tiny_plan(3, optim__lr=1e-3, optim__clip=0.5), ordered=True)
    curve = [train_step(state, plan, CPU, *batch(state.step, layout)).loss for _ in range(5)]
    torch.save({"curve": torch.tensor(curve), **state.placement.kept}, folder / f"in order on {layout.replicas}.pt")


def resume(name: str, layout: Layout, world: int, folder: Path) -> None:
    """Take up what zero3 saved on four ranks, save it anew, train on."""
    ranks = meet(layout.rank, world, folder, f"meet {name}")
    state = build(layout, ranks)
    saved = folder / "zero3" / f"step-{STEPS:08d}"
    restore_state(saved, verify(saved), state, verified=layout.rank == 0)
    save_state(folder / name, state, config=folder / "config.yaml", tokenizer=folder / "tokenizer", meta={})
    curve = train(state, 3)
    if ranks.topology.is_first:
        (folder / f"{name}.json").write_text(json.dumps(curve))
    if layout.is_whole:
        train_in_order(layout, ranks, folder)
    if name not in ("2 x zero1", "2 x tensor"):
        train_grid(ranks, folder)
    ranks.wait()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The folder with what the ranks found, and what one process finds."""
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "config.yaml").write_text("version: 1\n")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    found = {family: train_alone(shape_of(family), folder / f"{family}.pt") for family in ("gpt2", "llama")}
    mp.spawn(work, args=(str(folder),), nprocs=WORLD)
    return folder, found


def train_alone(shape: Shape, gradients: Path) -> dict[str, Any]:
    """What a layout should find; leaves the gradients of the first step in a file."""
    ranks = Ranks(Topology())
    state = build(Layout(), ranks, shape)
    kept = state.placement.kept
    loss = accumulate_gradients(state, halved(Layout()), CPU, *batch(0, Layout()))
    torch.save({name: each.grad for name, each in kept.items()}, gradients)
    norm = float(state.placement.find_norm(ranks))
    state.optimizer.zero_grad()
    found: dict[str, Any] = {"loss": float(loss), "norm": norm, "curve": train(state, STEPS), "val": score(state, 7)}
    found |= {"val of one window": score(state, 1), "asked": ask(state)}
    found |= {"weights": {name: each.detach().clone() for name, each in kept.items()}}
    return found | {"on": train(state, 3)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_the_plain_model(name: str, plain: Found) -> None:
    folder, wanted = plain[0], plain[1]["llama" if "llama" in name else "gpt2"]
    ranks = [json.loads((folder / f"{rank}.json").read_text())[name] for rank in range(WORLD)]
    for found in ranks:
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert found["gradient_error"] < 1e-7
        assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-6)
        assert found["curve"] == pytest.approx(wanted["curve"], rel=1e-6)
        assert found["curve"] == ranks[0]["curve"]
        assert found.get("asked", wanted["asked"]) == pytest.approx(wanted["asked"], rel=1e-5)
        for windows in ("val", "val of one window"):
            assert found[windows][0] == pytest.approx(wanted[windows][0], rel=1e-6)
            assert found[windows][1:] == wanted[windows][1:]
    weights = torch.load(folder / f"{name}.pt", weights_only=True)
    assert set(weights) == set(wanted["weights"])
    for parameter, tensor in wanted["weights"].items():
        if ".attention.qkv.bias" in parameter:  # keys' biases cancel in the softmax: their gradient is rounding alone
            continue
        torch.testing.assert_close(weights[parameter], tensor, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", WEIGHED)
def test_a_rank_holds_what_the_arithmetic_says(name: str, plain: Found) -> None:
    folder, _ = plain
    for rank in range(WORLD):
        found = json.loads((folder / f"{rank}.json").read_text())[name]
        assert found["measured"] == pytest.approx(found["expected"], rel=0.1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_layout_saves_is_what_it_held(name: str, plain: Found) -> None:
    """Also when it trains on while that is written."""
    folder, _ = plain
    saved = folder / name / f"step-{STEPS:08d}"
    weights = Reader(saved, verify(saved), WEIGHTS)
    held = torch.load(folder / f"{name}.pt", weights_only=True)
    assert set(weights.sizes) == set(held)
    for parameter, tensor in held.items():
        assert torch.equal(weights.read(parameter), tensor)
    files = sorted(path.name for path in saved.glob("*.safetensors"))
    whole = ["model.safetensors", "optimizer.safetensors"]
    parts = [f"{kind}-0000{rank}-of-00004.safetensors" for kind in ("model", "optimizer") for rank in range(WORLD)]
    if name == "ddp":
        assert files == whole
    elif name in ("hybrid", "tensor"):  # the second replica has nothing to add
        assert files == [parts[0], parts[1], parts[4], parts[5]]
    else:
        assert files == parts


def test_low_precision_is_gathered_as_masters_are_rounded(plain: Found) -> None:
    state = build(Layout(), Ranks(Topology()), device=BF16)
    state.hold_masters(torch.bfloat16)
    found = json.loads((plain[0] / "bf16.json").read_text())
    assert found == pytest.approx(train(state, 3, BF16), rel=1e-4)


def test_parts_become_one_file(plain: Found, tmp_path: Path) -> None:
    folder, _ = plain
    split = folder / "zero3 x tensor" / f"step-{STEPS:08d}"
    whole = consolidate(split, tmp_path, pytest.fail)
    assert sorted(path.name for path in whole.iterdir()) == [
        "config.yaml", "manifest.json", "model.safetensors", "optimizer.safetensors", "tokenizer",
    ]  # fmt: skip
    weights = load_file(whole / "model.safetensors")
    model = load_checkpoint_model(split, verify(split))
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    moments, parts = load_file(whole / "optimizer.safetensors"), Reader(split, verify(split), MOMENTS)
    assert all(torch.equal(moments[name], parts.read(name)) for name in parts.sizes)
    assert verify(whole).meta == verify(split).meta


@pytest.mark.parametrize("name", RESUMES)
def test_four_shards_resume_anywhere(name: str, plain: Found) -> None:
    folder, wanted = plain[0], plain[1]["gpt2"]
    saved, again = (folder / each / f"step-{STEPS:08d}" for each in ("zero3", name))
    for kind in (WEIGHTS, MOMENTS):
        first, second = Reader(saved, verify(saved), kind), Reader(again, verify(again), kind)
        assert first.sizes == second.sizes
        for tensor in first.sizes:
            assert torch.equal(first.read(tensor), second.read(tensor)), tensor
    assert json.loads((folder / f"{name}.json").read_text()) == pytest.approx(wanted["on"], rel=1e-6)


def test_ranks_and_micro_batches_do_not_show(plain: Found) -> None:
    folder, _ = plain
    grid = {world: json.loads((folder / f"grid {world}.json").read_text()) for world in (1, 2, 3, 4)}
    for world, curves in grid.items():
        for micro_batch, curve in curves.items():
            assert curve == pytest.approx(grid[1]["4"], rel=1e-6), (world, micro_batch)


def test_sums_in_order_are_the_same_bits_on_1_2_and_4_ranks(plain: Found) -> None:
    folder, _ = plain
    alone, *others = (torch.load(folder / f"in order on {world}.pt", weights_only=True) for world in (1, 2, 4))
    for tensors in others:
        assert set(tensors) == set(alone)
        for name, tensor in alone.items():
            assert torch.equal(tensors[name], tensor), name
