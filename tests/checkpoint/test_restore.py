"""A state to files and back: nothing lost, and another model's files refused before a weight is touched."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatoken.checkpoint.restore import load_checkpoint_model, restore_state
from megatoken.checkpoint.save import save_state
from megatoken.checkpoint.store import Manifest, verify
from megatoken.errors import Exit, Fault
from megatoken.model.gpt import GPT, initialize
from megatoken.train.state import State, build_state
from megatoken.train.step import train_step
from tests.tiny import CPU, LLAMA, SHAPE, tiny_batch, tiny_plan, tiny_run, tiny_state


def save(state: State, folder: Path) -> tuple[Path, Manifest]:
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    (folder / "config.yaml").write_text("version: 1\n")
    saved = save_state(
        folder / "checkpoints",
        state,
        config=folder / "config.yaml",
        tokenizer=folder / "tokenizer",
        meta={"dataset": "d"},
    )
    return saved, verify(saved)


def trained(steps: int) -> State:
    state = tiny_state()
    for step in range(steps):
        train_step(state, tiny_plan(), CPU, *tiny_batch(step))
    return state


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    state = trained(3)
    saved, manifest = save(state, tmp_path)
    twin = tiny_state(seed=99)
    restore_state(saved, manifest, twin)
    assert twin.step == 3
    assert manifest.meta["dataset"] == "d"
    for step in range(3, 6):
        losses = [train_step(s, tiny_plan(), CPU, *tiny_batch(step)).loss for s in (state, twin)]
        assert losses[0] == losses[1]
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(tensor, twin.model.state_dict()[name])


def test_the_plain_model_alone(tmp_path: Path) -> None:
    state = trained(2)
    model = load_checkpoint_model(*save(state, tmp_path))
    assert model.shape == SHAPE
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in state.model.state_dict().items())


def test_a_model_saved_before_there_were_switches_is_a_gpt(tmp_path: Path) -> None:
    saved, manifest = save(tiny_state(), tmp_path)
    old = ("n_layer", "n_head", "d_model", "d_ff", "vocab_size", "seq_len", "vocab_multiple")
    meta = {"shape": {name: manifest.meta["shape"][name] for name in old}}
    assert load_checkpoint_model(saved, replace(manifest, meta=meta)).shape == SHAPE


def test_a_llama_comes_back_with_its_switches(tmp_path: Path) -> None:
    state = tiny_state(shape=replace(LLAMA, tied=False, rope_factor=2.0))
    model = load_checkpoint_model(*save(state, tmp_path))
    assert model.shape == state.model.shape
    inputs, _ = tiny_batch()
    assert torch.equal(model(inputs), state.model(inputs))


def test_a_state_that_never_stepped_is_saved_too(tmp_path: Path) -> None:
    saved, manifest = save(tiny_state(), tmp_path)
    twin = tiny_state(seed=2)
    restore_state(saved, manifest, twin)
    assert twin.step == 0


def test_the_loss_scale_is_carried(tmp_path: Path) -> None:
    state = trained(1)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state.scaler.scale(torch.ones(()))  # the scale exists from its first use on
    state.scaler.update(512.0)
    saved, manifest = save(state, tmp_path)
    twin = tiny_state()
    twin.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    restore_state(saved, manifest, twin)
    assert twin.scaler.state_dict() == state.scaler.state_dict()


def test_a_scaled_step_that_overflows_is_skipped_and_the_scale_halved() -> None:
    state = tiny_state()
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # the scaled loss overflows fp32
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    report = train_step(state, tiny_plan(), CPU, *tiny_batch())
    assert report.skipped
    assert state.step == 1
    assert state.scaler.get_scale() == 2.0**126
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.model.state_dict().items())


@pytest.mark.parametrize("change", [{"n_layer": 3}, {"d_ff": 128}, {"vocab_size": 200}])
def test_another_model_is_refused_with_the_difference(tmp_path: Path, change: dict[str, int]) -> None:
    saved, manifest = save(trained(1), tmp_path)
    model = GPT(replace(SHAPE, **change))
    initialize(model, 1)
    other = build_state(model, tiny_run(), CPU)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(Fault, match="checkpoint does not fit") as fault:
        restore_state(saved, manifest, other)
    assert fault.value.code == Exit.CHECKPOINT
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
