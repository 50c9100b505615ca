"""Save and restore the training state with any optimizer; refuse checkpoints of another model."""

import copy
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatoken.base.config.schema import OptimConfig
from megatoken.base.errors import CheckpointError, ConfigError, MegatokenError, StorageError
from megatoken.convert.consolidate import consolidate
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.model.gpt import GPT
from megatoken.store import save as checkpoint_save
from megatoken.store.commit import prune
from megatoken.store.load import load_checkpoint_model, restore_state
from megatoken.store.manifest import CheckpointManifest, verify
from megatoken.store.save import AsyncSave
from megatoken.text.load_pretrained import load_pretrained
from megatoken.train.state import Position, TrainState
from megatoken.train.step import train_step
from tests.convert.models import begin_save
from tests.flip import flip_bit
from tests.processes import HANG_SECONDS, wait_until
from tests.tiny_model import CPU, TINY_GPT, tiny_batch, tiny_state, tiny_step_config


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, with its state in bf16 and a step count in the parameter group."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "fused": False, "steps": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                zeros = torch.zeros_like(param, dtype=torch.bfloat16)
                momentum = self.state[param].setdefault("momentum", zeros)
                update = momentum.float().lerp(param.grad, 0.1).sign()
                param.sub_(update * group["lr"] / group["steps"])
                momentum.copy_(momentum.float().lerp(param.grad, 0.01))


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, nesterov=True),
    "lion": Lion,
}


def save(state: TrainState, folder: Path) -> tuple[Path, CheckpointManifest]:
    saved = begin_save(folder, state, dataset="d").finish()
    return saved, verify(saved)


@pytest.mark.fault(54)
def test_a_reader_takes_the_newer_checkpoint_when_its_own_is_removed_while_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, read = replace(TINY_GPT, vocab_size=257), []
    first, second = (tiny_state(seed=seed, model_config=config) for seed in (0, 1))
    second.position = Position(step=1)

    def remove_first(folder, manifest):
        read.append(folder.name)
        if len(read) == 1:
            save(second, tmp_path)
            prune(folder.parent, keep_last=1, keep_every=0)
        return load_checkpoint_model(folder, manifest)

    save(first, tmp_path)
    monkeypatch.setattr("megatoken.store.pretrained.load_checkpoint_model", remove_first)
    loaded = load_pretrained(tmp_path)
    assert read == ["step-00000000", "step-00000001"]
    assert loaded.source == f"{tmp_path} at step 1"
    assert_equal_states(loaded.model, second.model)


def assert_equal_states(model: GPT, expected: GPT) -> None:
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


@pytest.mark.fault(47)
def test_a_save_tells_whether_it_still_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hangs, goes_on = threading.Event(), threading.Event()
    seen, polls = [], []
    write, read_progress = checkpoint_save.write_tensors, AsyncSave._read_progress

    def hang(path, **options):
        if path.name == "optimizer.safetensors":
            hangs.set()
            assert goes_on.wait(HANG_SECONDS)
        write(path, **options)

    def poll(save):
        polls.append(read_progress(save))
        return polls[-1]

    monkeypatch.setattr(checkpoint_save, "write_tensors", hang)
    monkeypatch.setattr(checkpoint_save, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(AsyncSave, "_read_progress", poll)
    pending = begin_save(tmp_path, tiny_state())
    assert hangs.wait(HANG_SECONDS)
    with ThreadPoolExecutor(1) as threads:
        finished = threads.submit(pending.finish, seen.append)
        wait_until(lambda: len(polls) > 7)
        assert seen == [1]  # of the checkpoint written before
        unfinished = checkpoint_save.writing_folder(pending._draft, 0)
        unfinished.mkdir()
        (unfinished / ".tmp").write_bytes(bytes(9_999))
        wait_until(lambda: seen == [1, 2])
        goes_on.set()
        assert finished.result().name == "step-00000000"
    assert seen == [*range(1, len(seen) + 1)] != [1]
    files = verify(finished.result()).files.values()
    synced = 64 * 2**20 if sys.platform == "linux" else 0  # a file, hashed and then made durable
    assert pending._n_bytes == sum(entry.bytes + synced * (entry.bytes > 0) for entry in files)


def new_state(optimizer: str = "", seed: int = 1) -> TrainState:
    """Return a state with AdamW or Muon, or with an optimizer whose first step creates its state."""
    name = "muon" if optimizer == "muon" else "adamw"
    state = tiny_state(seed=seed, optim=OptimConfig(name=name))
    if optimizer in OPTIMIZERS:
        state.optimizer = OPTIMIZERS[optimizer](state.sharded.local_params.values())
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
    resumed.position = Position(step=manifest.step)
    for each in (state, resumed):
        for step in range(steps, steps + 3):
            train_step(each, tiny_step_config(), CPU, tiny_batch(step))
    assert_equal_states(resumed.model, state.model)


def test_a_load_verifies_each_byte_that_it_uses_and_reads_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved, manifest = save(trained(2, "sgd"), tmp_path)
    monkeypatch.setattr("megatoken.store.manifest.hash_file", pytest.fail)
    path, state = saved / "optimizer.safetensors", new_state("sgd", seed=5)
    size = path.stat().st_size
    for index in (9, size // 2, size - 1):  # in the header, in a tensor, in the last byte
        flip_bit(path, 8 * index + 2)
        with pytest.raises(CheckpointError) as raised:
            restore_state(saved, manifest, state)
        assert index == 9 or f"expected {manifest.files[path.name].xxh3_128}" in str(raised.value)
        assert (state.step, dict(state.optimizer.state)) == (0, {})
        flip_bit(path, 8 * index + 2)
    files = restore_state(saved, manifest, state)
    assert files == {
        name: entry for name, entry in manifest.files.items() if name.endswith(".safetensors")
    }
    assert all(entry.mtime_ns == (saved / name).stat().st_mtime_ns for name, entry in files.items())


def test_the_files_hold_the_state_of_the_optimizer(tmp_path: Path):
    keys = {"": "exp_avg exp_avg_sq step", "sgd": "momentum_buffer", "lion": "momentum"}
    for optimizer, expected in keys.items():
        saved, manifest = save(trained(2, optimizer), tmp_path / optimizer)
        tensors = load_file(saved / "optimizer.safetensors")
        names = tiny_state().sharded.full_shapes
        assert {*tensors} == {f"{name}/{key}" for name in names for key in expected.split()}
        assert manifest.meta.keys() - {"optimizer"} == {"shape", "scaler", "dataset"}
    assert manifest.meta["optimizer"] == {"name": "Lion", "groups": [{"steps": 2}]}


@pytest.mark.fault(27)
def test_another_optimizer_or_model_is_refused_before_a_weight_changes(tmp_path: Path):
    saved, manifest = save(trained(1), tmp_path)
    scaled = {"optimizer": {"name": "SGD", "groups": [{"lr_scale": 2.0}]}}
    amsgrad = new_state()
    for values in amsgrad.optimizer.state.values():
        values["max_exp_avg_sq"] = torch.zeros_like(values["exp_avg"])
    changes = [{"n_layer": 3}, {"d_ff": 128}, {"vocab_size": 200}]
    models = [tiny_state(model_config=replace(TINY_GPT, **change)) for change in changes]
    others = [new_state("sgd"), amsgrad, *models]
    for state, meta in ((new_state("sgd"), scaled), *((other, {}) for other in others)):
        before = copy.deepcopy(state.model)
        with pytest.raises(MegatokenError):
            restore_state(saved, replace(manifest, meta=manifest.meta | meta), state)
        assert_equal_states(state.model, before)


def test_optimizer_state_that_cannot_be_saved_is_refused(tmp_path: Path):
    for shards, key, value in ((1, "count", 3), (2, "factor", torch.zeros(3))):
        state = trained(1, "sgd")
        dims = ParallelDims(dp_shard=shards)
        state = replace(state, sharded=replace(state.sharded, dims=dims))
        state.optimizer.state[state.sharded.local_params["norm.weight"]][key] = value
        with pytest.raises(ConfigError):
            save(state, tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_the_shape_in_a_manifest_keeps_its_names(tmp_path: Path):
    """They are a file format: old checkpoints have them."""
    names = (
        "n_layer n_head n_kv_head d_model d_ff vocab_size seq_len norm norm_eps positions rope_theta "
        "rope_factor rope_low rope_high rope_context mlp bias tied vocab_multiple qk_norm "
        "embedding_norm residual_scales value_embeddings logit_softcap window window_pattern "
        "value_head head_dim norm_position rope_scaling rope_attention rope_local_theta "
        "nope_interval bias_in qk_norm_over embedding_scale lora_rank lora_alpha smear backout "
        "block"
    )
    assert {*save(tiny_state(), tmp_path)[1].meta["shape"]} == {*names.split()}


def test_the_loss_scale_is_halved_by_an_overflow_and_restored_or_keeps_its_start(tmp_path: Path):
    """A run of another precision has saved no loss scale."""
    plain, scaled, unscaled = trained(1), tiny_state(), tiny_state()
    # The scaled loss overflows fp32, and the step is skipped.
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    assert train_step(scaled, tiny_step_config(), CPU, tiny_batch()).overflowed
    assert (scaled.step, scaled.scaler.get_scale()) == (1, 2.0**126)
    assert_equal_states(scaled.model, unscaled.model)
    for state, scale in ((scaled, 2.0**126), (plain, 4.0)):
        resumed = tiny_state()
        resumed.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        restore_state(*save(state, tmp_path / str(scale)), resumed)
        assert resumed.scaler.get_scale() == scale
        assert state is plain or resumed.scaler.state_dict() == state.scaler.state_dict()


def test_consolidate_never_returns_another_runs_checkpoint(tmp_path: Path):
    one, two = (save(tiny_state(seed=seed), tmp_path / str(seed))[0] for seed in (1, 2))
    out = tmp_path / "out"
    consolidate(one, out, pytest.fail)
    same = tmp_path / "2/../1"
    for source, target in ((two, out), (two.parent, two.parent), (tmp_path / "1", same)):
        with pytest.raises(StorageError):
            consolidate(source, target, pytest.fail)
