"""Saving and restoring the training state with any optimizer; checkpoints of another model are refused."""

import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatoken.checkpoint import save as checkpoint_save
from megatoken.checkpoint.commit import commit, prune
from megatoken.checkpoint.load import describe_optimizer, load_checkpoint_model, restore_state
from megatoken.checkpoint.manifest import CheckpointManifest, VerifiedFile, verify
from megatoken.checkpoint.save import AsyncSave, copy_tensors
from megatoken.checkpoint.tensor_files import consolidate
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import OptimConfig
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.tokenizer import load_tokenizer
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.distributed.parallelize import ShardedParams
from megatoken.distributed.tensor_slice import TensorSlice, chunk
from megatoken.errors import CheckpointError, ConfigError, MegatokenError, StorageError
from megatoken.model.gpt import GPT
from megatoken.train.state import TrainState, build_state
from megatoken.train.step import train_step
from tests.tiny_model import (
    CPU,
    TINY_GPT,
    TINY_LLAMA,
    tiny_batch,
    tiny_config,
    tiny_rows,
    tiny_state,
    tiny_step_config,
)

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, with its state in bf16 and a step count in the parameter group."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "fused": False, "steps": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                momentum = self.state[param].setdefault(
                    "momentum", torch.zeros_like(param, dtype=torch.bfloat16)
                )
                update = momentum.float().lerp(param.grad, 0.1)
                param.sub_(update.sign() * group["lr"] / group["steps"])
                momentum.copy_(momentum.float().lerp(param.grad, 0.01))


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, nesterov=True),
    "lion": Lion,
}


def files_of(folder: Path) -> dict[str, Path]:
    return {"config": folder / "config.yaml", "tokenizer": folder / "tokenizer"}


def save(state: TrainState, folder: Path) -> tuple[Path, CheckpointManifest]:
    (folder / "tokenizer").mkdir(exist_ok=True, parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    (folder / "config.yaml").write_text("version: 2\n")
    copies = files_of(folder)
    saved = AsyncSave(folder / "checkpoints", state, **copies, meta={"dataset": "d"}).finish()
    return saved, verify(saved)


@pytest.mark.fault(54)
def test_a_reader_takes_the_newer_checkpoint_when_its_own_is_removed_while_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    load_tokenizer("bytes").save(tmp_path / "tokenizer")
    (tmp_path / "config.yaml").touch()
    states = [
        tiny_state(seed=step, model_config=replace(TINY_GPT, vocab_size=257)) for step in (0, 1)
    ]
    root, read = tmp_path / "checkpoints", []

    def write(step: int) -> None:
        states[step].step = step
        AsyncSave(root, states[step], **files_of(tmp_path), meta={}).finish()

    def remove_first(folder: Path, manifest: CheckpointManifest) -> GPT:
        read.append(folder.name)
        if len(read) == 1:
            write(1)
            prune(root, keep_last=1, keep_every=0)
        return load_checkpoint_model(folder, manifest)

    write(0)
    monkeypatch.setattr("megatoken.convert.load_pretrained.load_checkpoint_model", remove_first)
    loaded = load_pretrained(tmp_path)
    assert read == ["step-00000000", "step-00000001"]
    assert loaded.source == f"{tmp_path} at step 1"
    name = "tokens.weight"
    assert torch.equal(loaded.model.state_dict()[name], states[1].model.state_dict()[name])


@pytest.mark.fault(47)
def test_a_save_tells_whether_it_still_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "tokenizer").mkdir()
    hangs, goes_on = threading.Event(), threading.Event()
    seen: list[int] = []
    polls: list[int] = []
    write, read_progress = checkpoint_save.write_tensors, AsyncSave._read_progress

    def hang(path: Path, **tensors: Any) -> None:
        if path.name == "optimizer.safetensors":
            hangs.set()
            assert goes_on.wait(120)
        write(path, **tensors)

    def poll(save: AsyncSave) -> int:
        polls.append(read_progress(save))
        return polls[-1]

    def wait_for_polls(count: int) -> None:
        enough = len(polls) + count
        while len(polls) < enough:
            time.sleep(0.01)

    monkeypatch.setattr(checkpoint_save, "write_tensors", hang)
    monkeypatch.setattr(checkpoint_save, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(AsyncSave, "_read_progress", poll)
    pending = AsyncSave(tmp_path, tiny_state(), **files_of(tmp_path), meta={})
    assert hangs.wait(120)
    with ThreadPoolExecutor(1) as threads:
        finished = threads.submit(pending.finish, seen.append)
        wait_for_polls(2)
        assert seen == [1]  # of what was written before
        wait_for_polls(5)
        assert seen == [1]
        goes_on.set()
        assert finished.result().name == "step-00000000"
    assert seen == [*range(1, len(seen) + 1)] != [1]
    sizes = [path.stat().st_size for path in finished.result().glob("*.safetensors")]
    synced = 2 * 64 * 2**20 if sys.platform == "linux" else 0
    assert pending._n_bytes == sum(sizes) + synced  # hashed, and made durable in pieces


def new_state(optimizer: str = "", seed: int = 1) -> TrainState:
    """Return a state with AdamW or Muon as built, or with an optimizer whose first step creates its state."""
    name: Any = "muon" if optimizer == "muon" else "adamw"
    state = tiny_state(seed=seed, optim=OptimConfig(name=name))
    if optimizer in OPTIMIZERS:
        state.optimizer = OPTIMIZERS[optimizer](state.sharded.local_params.values())  # type: ignore[assignment]
    return state


def trained(steps: int, optimizer: str = "") -> TrainState:
    state = new_state(optimizer)
    for step in range(steps):
        train_step(state, tiny_step_config(), CPU, tiny_batch(step))
    return state


@pytest.mark.parametrize("optimizer", ["", "muon", *OPTIMIZERS])
@pytest.mark.parametrize("steps", [0, 3])
def test_training_resumes_bit_exactly(optimizer: str, steps: int, tmp_path: Path):
    state = trained(steps, optimizer)
    saved, manifest = save(state, tmp_path)
    resumed = new_state(optimizer, seed=99)
    restore_state(saved, manifest, resumed)
    assert resumed.step == steps
    assert manifest.meta["dataset"] == "d"
    for step in range(steps, steps + 3):
        losses = [
            train_step(s, tiny_step_config(), CPU, tiny_batch(step)).loss for s in (state, resumed)
        ]
        assert losses[0] == losses[1]
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])


def test_a_load_verifies_each_byte_that_it_uses_and_reads_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved, manifest = save(trained(2, "sgd"), tmp_path)
    monkeypatch.setattr("megatoken.checkpoint.manifest.hash_file", pytest.fail)
    path = saved / "optimizer.safetensors"
    data = path.read_bytes()
    for place in (9, len(data) // 2, len(data) - 1):  # in the header, in a tensor, in the last byte
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        state = new_state("sgd", seed=5)
        with pytest.raises(CheckpointError) as raised:
            restore_state(saved, manifest, state)
        assert place == 9 or f"expected {manifest.files[path.name].xxh3_128}" in str(raised.value)
        assert (state.step, dict(state.optimizer.state)) == (0, {})
    path.write_bytes(data)
    files = restore_state(saved, manifest, state)
    assert files == {
        name: entry for name, entry in manifest.files.items() if name.endswith(".safetensors")
    }
    assert all(entry.mtime_ns == (saved / name).stat().st_mtime_ns for name, entry in files.items())


def test_the_files_hold_the_state_of_the_optimizer(tmp_path: Path):
    names = set(tiny_state().sharded.full_shapes)
    for optimizer, keys in (
        ("", {"exp_avg", "exp_avg_sq", "step"}),
        ("sgd", {"momentum_buffer"}),
        ("lion", {"momentum"}),
    ):
        saved, manifest = save(trained(2, optimizer), tmp_path / f"run-{optimizer}")
        tensors = load_file(saved / "optimizer.safetensors")
        assert set(tensors) == {f"{name}/{key}" for name in names for key in keys}
        if not optimizer:
            assert set(manifest.meta) == {"shape", "scaler", "dataset"}
            assert (tensors["norm.weight/step"].shape, tensors["norm.weight/step"].item()) == (
                (),
                2.0,
            )
        elif optimizer == "lion":
            assert tensors["norm.weight/momentum"].dtype == torch.bfloat16
            assert manifest.meta["optimizer"] == {"name": "Lion", "groups": [{"steps": 2}]}


@pytest.mark.fault(27)
def test_another_optimizer_is_refused_before_a_weight_changes(tmp_path: Path):
    saved, manifest = save(trained(1), tmp_path)
    sgd, other = new_state("sgd"), new_state()
    before = {name: tensor.clone() for name, tensor in sgd.model.state_dict().items()}
    with pytest.raises(CheckpointError):
        restore_state(saved, manifest, sgd)
    two = replace(
        manifest,
        meta={**manifest.meta, "optimizer": {"name": "SGD", "groups": [{"lr_scale": 2.0}]}},
    )
    with pytest.raises(MegatokenError):
        restore_state(saved, two, sgd)
    assert all(torch.equal(tensor, before[name]) for name, tensor in sgd.model.state_dict().items())
    for optimizer_state in other.optimizer.state.values():
        optimizer_state["max_exp_avg_sq"] = torch.zeros_like(optimizer_state["exp_avg"])
    with pytest.raises(CheckpointError):
        restore_state(saved, manifest, other)


def test_optimizer_state_that_cannot_be_saved_is_refused(tmp_path: Path):
    state = trained(1, "sgd")
    state.optimizer.state[state.sharded.local_params["norm.weight"]]["count"] = 3
    with pytest.raises(ConfigError):
        save(state, tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    sharded = shard(trained(1, "sgd"), "sgd", rank=0, shards=2)
    sharded.optimizer.state[sharded.sharded.local_params["norm.weight"]]["factor"] = torch.zeros(3)
    with pytest.raises(ConfigError):
        copy_tensors(sharded)


@dataclass
class Shard:
    """The training state of one of several ranks, without their processes."""

    model: GPT
    sharded: ShardedParams
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    comm: Comm
    step: int


def shard(state: TrainState, optimizer: str, rank: int, shards: int) -> Shard:
    """Rows of every parameter as one of `shards` ranks holds them, with a new optimizer."""
    dims = ParallelDims(sharding="zero1", dp_shard=shards, rank=rank)
    sizes = state.sharded.full_shapes
    parts = {
        name: TensorSlice.full(size).cut_rows(*chunk(size[0], shards, rank))
        for name, size in sizes.items()
    }
    parts = {name: part for name, part in parts.items() if part.n_rows}
    local = {
        name: part.take(state.sharded.local_params[name].detach()).clone()
        for name, part in parts.items()
    }
    copies = dict.fromkeys(local, 1)
    sharded = replace(
        state.sharded, dims=dims, trained=local, local_params=local, slices=parts, n_copies=copies
    )
    comm = Comm(DistEnv(rank=rank, world_size=shards))
    return Shard(
        state.model, sharded, OPTIMIZERS[optimizer](local.values()), state.scaler, comm, state.step
    )


def step_elementwise(state: TrainState | Shard, step: int) -> None:
    """An update in which every number depends on itself only, so that shards and the whole get the same bits."""
    for param in state.sharded.local_params.values():
        param.grad = torch.sin(param.detach() * (step + 1))
    state.optimizer.step()
    state.step += 1


def check_equal(whole: TrainState, shard: Shard) -> None:
    for name, param in shard.sharded.local_params.items():
        assert torch.equal(param, shard.sharded.slices[name].take(whole.sharded.local_params[name]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_state_is_resharded_like_its_parameters(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = new_state(optimizer)
    for step in range(2):
        step_elementwise(whole, step)
    saved, manifest = save(whole, tmp_path)
    shards = [shard(new_state(seed=5), optimizer, rank, 3) for rank in range(3)]
    for each in shards:
        restore_state(saved, manifest, each)
        step_elementwise(each, 2)
    step_elementwise(whole, 2)
    for each in shards:
        check_equal(whole, each)
    files = {name: writer for each in shards for name, writer in copy_tensors(each)[0].items()}
    assert sorted(files)[0] == "model-00000-of-00003.safetensors"
    meta = {**manifest.meta, **describe_optimizer(shards[0].optimizer)}
    resaved = commit(tmp_path / "sharded", 3, files, meta=meta)
    read: list[str] = []
    monkeypatch.setattr(
        VerifiedFile, "__enter__", lambda file: [read.append(file._path.name), file][1]
    )
    own = restore_state(
        resaved, verify(resaved), shard(new_state(seed=6), optimizer, 1, 3), slice(1, None, 3)
    )
    assert (
        [*own]
        == read
        == ["model-00001-of-00003.safetensors", "optimizer-00001-of-00003.safetensors"]
    )
    for states in (
        [new_state(optimizer, seed=7)],
        [shard(new_state(seed=8), optimizer, rank, 2) for rank in range(2)],
    ):
        for each in states:
            restore_state(resaved, verify(resaved), each)
            step_elementwise(each, 3)
    step_elementwise(whole, 3)
    for each in states:
        check_equal(whole, each)


@pytest.mark.parametrize(
    "model_config", [TINY_GPT, replace(TINY_LLAMA, tie_embeddings=False, rope_factor=2.0)]
)
def test_load_checkpoint_model(model_config: ModelConfig, tmp_path: Path):
    state = tiny_state(model_config=model_config)
    model = load_checkpoint_model(*save(state, tmp_path))
    assert model.config == model_config
    inputs, _ = tiny_rows()
    assert torch.equal(model(inputs), state.model(inputs))


def test_the_manifest_has_these_field_names(tmp_path: Path):
    saved, manifest = save(tiny_state(model_config=TINY_LLAMA), tmp_path)
    assert manifest.meta["shape"] == {
        "n_layer": 2, "n_head": 2, "n_kv_head": 1, "d_model": 32, "d_ff": 96, "vocab_size": 97, "seq_len": 16,
        "norm": "rmsnorm", "norm_eps": 1e-5, "positions": "rotary", "rope_theta": 100.0, "rope_factor": 1.0,
        "rope_low": 1.0, "rope_high": 4.0, "rope_context": 8192, "mlp": "swiglu", "bias": False, "tied": True,
        "vocab_multiple": 128, "qk_norm": False, "embedding_norm": False, "residual_scales": False,
        "value_embeddings": False, "logit_softcap": 0.0, "window": 0, "window_pattern": "SSSL",
        "value_head": False, "head_dim": 0, "norm_position": "pre", "rope_scaling": "llama3",
        "rope_attention": 0.0, "rope_local_theta": 0.0, "nope_interval": 0, "bias_in": "all",
        "qk_norm_over": "head", "embedding_scale": False, "lora_rank": 0, "lora_alpha": 0.0,
        "smear": False, "backout": False,
    }  # fmt: skip
    assert load_checkpoint_model(saved, manifest).config == TINY_LLAMA


def test_the_loss_scale_is_restored(tmp_path: Path):
    state = trained(1)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state.scaler.scale(torch.ones(()))  # the scale exists from its first use on
    state.scaler.update(512.0)
    saved, manifest = save(state, tmp_path)
    resumed = tiny_state()
    resumed.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    restore_state(saved, manifest, resumed)
    assert resumed.scaler.state_dict() == state.scaler.state_dict()


def test_fp16_resumes_what_another_precision_saved(tmp_path: Path):
    state = trained(2)
    assert state.scaler.state_dict() == {}
    saved, manifest = save(state, tmp_path)
    resumed = tiny_state(seed=2)
    resumed.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    restore_state(saved, manifest, resumed)
    assert resumed.step == 2
    assert resumed.scaler.get_scale() == 4.0
    assert train_step(resumed, tiny_step_config(), CPU, tiny_batch()).loss == pytest.approx(
        train_step(state, tiny_step_config(), CPU, tiny_batch()).loss, rel=1e-6
    )


@pytest.mark.fault(27)
@pytest.mark.parametrize("change", [{"n_layer": 3}, {"d_ff": 128}, {"vocab_size": 200}])
def test_another_model_is_refused_before_a_weight_changes(tmp_path: Path, change: dict[str, int]):
    saved, manifest = save(trained(1), tmp_path)
    model = GPT(replace(TINY_GPT, **change), seed=1)
    other = build_state(model, tiny_config(), CPU)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError):
        restore_state(saved, manifest, other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_consolidate_never_returns_another_runs_checkpoint(tmp_path: Path):
    runs = [save(tiny_state(seed=seed), tmp_path / str(seed))[0] for seed in (1, 2)]
    weights = [load_file(run / "model.safetensors")["tokens.weight"] for run in runs]
    merged = consolidate(runs[0], tmp_path / "out", pytest.fail)
    for source, out in (
        (runs[1], tmp_path / "out"),
        (runs[1].parent, runs[1].parent),
        (tmp_path / "1", tmp_path / "2" / ".." / "1"),
    ):
        with pytest.raises(StorageError):
            consolidate(source, out, pytest.fail)
    assert torch.equal(load_file(merged / "model.safetensors")["tokens.weight"], weights[0])


def test_a_scaled_step_that_overflows_is_skipped_and_the_scale_halved():
    state = tiny_state()
    # The scaled loss overflows fp32.
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    report = train_step(state, tiny_step_config(), CPU, tiny_batch())
    assert report.overflowed
    assert state.step == 1
    assert state.scaler.get_scale() == 2.0**126
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(tensor, before[name])
