"""Forms are chosen by what was measured, remembered by circumstance, and never where the recipe decided."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatoken import device
from megatoken.config import Machine
from megatoken.device import misses_triton
from megatoken.errors import Fault
from megatoken.hardware import cpu_count, recall
from megatoken.model.kernels import ATTENTION, CUDA_ONLY, LOSS, Kernels
from megatoken.presets import Shape
from megatoken.train import choose
from megatoken.train.choose import CHOICES, choose_forms, list_options, pick
from megatoken.train.step import accumulate_gradients, train_step
from tests.tiny import CPU, LLAMA, SHAPE, tiny_batch, tiny_plan, tiny_state

BF16 = replace(CPU, precision="bf16")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path))


def test_the_plain_form_stays_unless_clearly_beaten() -> None:
    assert pick({"torch": 1.0, "numpy": 0.93}, 1.1) == "torch"
    assert pick({"torch": 1.0, "numpy": 0.9, "onednn": 0.8}, 1.1) == "onednn"
    assert pick({"flash": 1.0, "blocked": 2.0}, 1.01) == "flash"


def test_what_the_recipe_names_is_taken_unmeasured(tmp_path: Path) -> None:
    machine = Machine(linear="numpy", attention="explicit", mixed="autocast")
    choice = choose_forms(SHAPE, machine, CPU, micro_batch=2, dropout=0.0)
    assert choice.kernels == Kernels(linear="numpy", attention="explicit")
    assert not choice.masters
    assert choice.seconds == {}
    assert not (tmp_path / CHOICES).exists()


def test_options_follow_precision_dropout_and_threads() -> None:
    options = list_options(SHAPE, Machine(), CPU, 0.0)
    assert options["attention"] == ["flash", "blocked"]
    assert options["linear"][0] == "torch"
    assert options["mixed"] == ["autocast"]
    assert list_options(SHAPE, Machine(), CPU, 0.1)["attention"] == ["flash"]
    assert list_options(SHAPE, Machine(), BF16, 0.0)["linear"] == ["torch"]
    compiled = list_options(SHAPE, Machine(compile="on"), CPU, 0.0)
    assert (compiled["linear"], compiled["attention"], compiled["mixed"]) == (["torch"], ["flash"], ["autocast"])
    assert list_options(SHAPE, Machine(), BF16, 0.0)["mixed"] == ["autocast", "masters"]
    threads = torch.get_num_threads()
    torch.set_num_threads(cpu_count() + 1)
    try:
        assert "numpy" not in list_options(SHAPE, Machine(), CPU, 0.0)["linear"]
    finally:
        torch.set_num_threads(threads)


def test_options_on_a_gpu_follow_its_age_and_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    card = replace(CPU, place=torch.device("cuda"), name="card", precision="bf16")
    age = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: tuple(age))
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    both = ["torch", "triton"]
    options = list_options(SHAPE, Machine(), card, 0.0)
    assert options["attention"] == ["flash", "cudnn", "fa2", "fa3", "fa4"]
    assert options["linear"] == ["torch"]
    assert (options["norm"], options["gelu"], options["loss"]) == (both, both, both)
    assert list_options(SHAPE, Machine(fused="off"), card, 0.0)["norm"] == ["torch"]
    assert list_options(SHAPE, Machine(fused="on"), card, 0.0)["gelu"] == ["triton"]
    half = list_options(SHAPE, Machine(), replace(card, precision="fp16"), 0.0)
    assert (half["norm"], half["loss"], half["mixed"]) == (both, ["torch"], ["autocast"])
    assert list_options(SHAPE, Machine(), replace(card, precision="fp32"), 0.0)["attention"] == ["flash"]
    age[0] = 7
    assert list_options(SHAPE, Machine(fused="on"), card, 0.0)["norm"] == ["torch"]
    assert misses_triton(card) == "card is older than Ampere"
    age[0] = 8
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert misses_triton(card) == "Triton is not installed"
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert misses_triton(card) == "they were made for NVIDIA GPUs"


def test_fused_kernels_are_tried_on_models_that_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    card = replace(CPU, place=torch.device("cuda"), name="card", precision="bf16")
    monkeypatch.setattr(choose, "misses_triton", lambda device: "")

    def fused(shape: Shape) -> list[str]:
        options = list_options(shape, Machine(), card, 0.0)
        return [name for name, forms in options.items() if "triton" in forms]

    assert fused(SHAPE) == ["norm", "gelu", "loss"]
    assert fused(LLAMA) == ["loss"]
    assert fused(replace(SHAPE, bias=False)) == ["loss"]
    assert fused(replace(SHAPE, norm="rmsnorm")) == ["gelu", "loss"]
    assert list_options(LLAMA, Machine(fused="on"), card, 0.0)["norm"] == ["torch"]
    wishes = Machine(fused="on", linear="torch", attention="flash", mixed="autocast")
    choice = choose_forms(LLAMA, wishes, card, micro_batch=1, dropout=0.0)
    assert choice.kernels == Kernels(loss="triton")
    assert choice.note == "fused kernels are left out for norm and gelu: there are none for this model"
    assert choose_forms(SHAPE, wishes, card, micro_batch=1, dropout=0.0).note == ""


def test_forms_of_every_family_are_tried_and_remembered_apart() -> None:
    for family in (SHAPE, LLAMA):
        choice = choose_forms(family, Machine(), replace(CPU, precision="bf16"), micro_batch=2, dropout=0.0)
        assert set(choice.seconds) == {"attention", "mixed"}
        assert all(len(forms) == 2 for forms in choice.seconds.values())
    assert len(recall(CHOICES)) == 2


def test_trials_fit_a_vocabulary_smaller_than_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSS, "other", LOSS["torch"])
    options = {"loss": ["torch", "other"], "mixed": ["autocast", "masters"], "attention": ["flash", "explicit"]}
    shape = replace(SHAPE, vocab_size=20)
    seconds = choose._try_forms(shape, BF16, 8, options, 0.1, False)
    assert {name: set(forms) for name, forms in seconds.items()} == {
        name: set(forms) for name, forms in options.items()
    }


@pytest.mark.parametrize("form", CUDA_ONLY)
def test_a_backend_that_is_not_here_is_refused_before_anything_runs(form: str) -> None:
    with pytest.raises(Fault, match=f"no {form} attention for heads of 16 in fp32 on cpu — machine.attention"):
        choose_forms(SHAPE, Machine(attention=form), CPU, micro_batch=1, dropout=0.0)  # type: ignore[arg-type]


def test_a_form_that_fails_here_is_left_out_and_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*parts: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such backend")

    monkeypatch.setitem(ATTENTION, "blocked", fail)
    first = choose_forms(SHAPE, Machine(), CPU, micro_batch=2, dropout=0.0)
    assert set(first.seconds["attention"]) == {"flash"}
    assert first.kernels.attention == "flash"
    kept = recall(CHOICES)
    assert choose_forms(SHAPE, Machine(), CPU, micro_batch=2, dropout=0.0) == first
    assert recall(CHOICES) == kept


def test_a_choice_is_measured_once_and_explained() -> None:
    first = choose_forms(SHAPE, Machine(), CPU, micro_batch=2, dropout=0.0)
    assert set(first.seconds["attention"]) == {"flash", "blocked"}
    assert all(seconds > 0 for forms in first.seconds.values() for seconds in forms.values())
    assert choose_forms(SHAPE, Machine(), CPU, micro_batch=2, dropout=0.0) == first
    assert len(recall(CHOICES)) == 1
    choose_forms(replace(SHAPE, d_model=64), Machine(), CPU, micro_batch=2, dropout=0.0)
    assert len(recall(CHOICES)) == 2
    said = dict(first.explain())["attention"]
    assert said.startswith(first.kernels.attention)
    assert "flash" in said
    assert " ms" in said


def test_the_memory_decides_when_it_is_there(tmp_path: Path) -> None:
    choose_forms(SHAPE, Machine(), CPU, micro_batch=2, dropout=0.0)
    kept = json.loads((tmp_path / CHOICES).read_text())
    for seconds in kept.values():
        seconds["attention"] = {"flash": 2.0, "blocked": 1.0}
    (tmp_path / CHOICES).write_text(json.dumps(kept))
    assert choose_forms(SHAPE, Machine(), CPU, micro_batch=2, dropout=0.0).kernels.attention == "blocked"


@pytest.mark.parametrize("entry", [1, {}, {"linear": "fast"}, {"bogus": {"nope": 1.0}}, "attention"])
def test_a_damaged_entry_is_measured_again(tmp_path: Path, entry: object) -> None:
    whole = choose_forms(SHAPE, Machine(), CPU, micro_batch=2, dropout=0.0)
    kept = json.loads((tmp_path / CHOICES).read_text())
    broken = {
        key: value | {"attention": {"flash": -1.0}} if entry == "attention" else entry for key, value in kept.items()
    }
    (tmp_path / CHOICES).write_text(json.dumps(broken))
    again = choose_forms(SHAPE, Machine(), CPU, micro_batch=2, dropout=0.0)
    assert {name: set(forms) for name, forms in again.seconds.items()} == {
        name: set(forms) for name, forms in whole.seconds.items()
    }
    assert set(again.seconds["attention"]) == {"flash", "blocked"}


@pytest.mark.parametrize("damage", ["{", "[]", '{"x": 1}'])
def test_a_damaged_memory_is_measured_again(tmp_path: Path, damage: str) -> None:
    (tmp_path / CHOICES).write_text(damage)
    assert choose_forms(SHAPE, Machine(), CPU, micro_batch=2, dropout=0.0).seconds


def test_twenty_steps_of_every_form_end_at_the_plain_loss() -> None:
    """Explicit attention, an AdamW that goes tensor by tensor and whole logits are the reference."""
    losses = {}
    for kernels in (Kernels(attention="explicit"), Kernels(attention="blocked", linear="numpy"), Kernels()):
        state = tiny_state(form="loop" if kernels.attention == "explicit" else "auto")
        choose.use_choice(state, choose.Choice(kernels=kernels, masters=False), CPU)
        plan = tiny_plan(8, machine__loss_chunk=0 if kernels.attention == "explicit" else 5)
        losses[str(kernels)] = [train_step(state, plan, CPU, *tiny_batch()).loss for _ in range(20)]
    reference, *others = losses.values()
    assert reference[-1] < reference[0]
    for other in others:
        assert other == pytest.approx(reference, rel=1e-4)


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["gpt", "llama"])
def test_bf16_weights_follow_their_masters(shape: Shape) -> None:
    states = tiny_state(shape=shape), tiny_state(shape=shape)
    choose.use_choice(states[1], choose.Choice(kernels=Kernels(), masters=True), BF16)
    assert states[1].working.unembedding.dtype == torch.bfloat16
    plan = tiny_plan(2)
    for _ in range(20):
        plain = train_step(states[0], plan, CPU, *tiny_batch())
        low = train_step(states[1], plan, BF16, *tiny_batch())
        assert low.loss == pytest.approx(plain.loss, rel=5e-3)
        assert low.grad_norm == pytest.approx(plain.grad_norm, rel=5e-2)
    for master, worker in zip(states[1].model.parameters(), states[1].working.parameters(), strict=True):
        assert master.dtype == torch.float32
        torch.testing.assert_close(worker, master.to(torch.bfloat16), rtol=0, atol=0)
        assert worker.grad is None


def test_masters_gather_gradients_of_micro_batches_in_fp32() -> None:
    gradients = []
    for micro_batch in (8, 1):
        state = tiny_state()
        state.hold_masters(torch.bfloat16)
        accumulate_gradients(state, tiny_plan(micro_batch), BF16, *tiny_batch())
        gradients.append([p.grad.clone() for p in state.model.parameters() if p.grad is not None])
    for whole, split in zip(*gradients, strict=True):
        assert split.dtype == torch.float32
        assert float((split - whole).norm() / whole.norm()) < 2e-2
