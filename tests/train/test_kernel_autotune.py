"""Forms are chosen by what was measured, remembered by circumstance, and never where the recipe decided."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.errors import ConfigError
from megatoken.model.gpt import set_block_kernels
from megatoken.model.kernels import ATTENTION, Kernels
from megatoken.native.selection import find_library
from megatoken.system import device
from megatoken.system.device import Device, misses_triton
from megatoken.system.measurement_cache import read_measurements
from megatoken.train import kernel_autotune as autotune_module
from megatoken.train import tuning
from megatoken.train.kernel_autotune import (
    CACHE_FILE,
    KernelChoice,
    apply_choice,
    autotune,
    list_options,
    pick,
)
from megatoken.train.step import forward_backward, train_step
from tests.tiny_model import CPU, TINY_GPT, TINY_LLAMA, tiny_batch, tiny_state, tiny_step_config
from tests.tiny_run import train

BF16 = replace(CPU, precision="bf16")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, and no native kernels unless it brings them."""
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune_module, "find_library", lambda: None)


def tune(micro_batch: int, model_config: ModelConfig = TINY_GPT) -> KernelChoice:
    key = str(model_config)
    return autotune(model_config, MachineConfig(), CPU, micro_batch=micro_batch, key=key)


def test_pick_needs_a_clear_margin():
    assert pick({"torch": 1.0, "other": 0.93}, 1.1) == "torch"
    assert pick({"torch": 1.0, "other": 0.9, "third": 0.8}, 1.1) == "third"
    assert pick({"flash": 1.0, "blocked": 2.0}, 1.01) == "flash"


def test_options_follow_precision_and_dropout():
    options = list_options(TINY_GPT, MachineConfig(), CPU, 0.0)
    plain = {"loss": ["torch"], "block": ["torch"], "adamw": ["torch"], "mixed": ["autocast"]}
    plain["fp8"] = ["off"]
    assert options == {"attention": ["flash", "blocked"], **plain}
    assert list_options(TINY_GPT, MachineConfig(), CPU, 0.1)["attention"] == ["flash"]
    compiled = list_options(TINY_GPT, MachineConfig(compile="on"), CPU, 0.0)
    assert compiled == {"attention": ["flash"], **plain}
    assert list_options(TINY_GPT, MachineConfig(), BF16, 0.0)["mixed"] == ["autocast", "masters"]


def test_native_kernels_are_options_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(autotune_module, "find_library", object)
    options = list_options(TINY_GPT, MachineConfig(), CPU, 0.0)
    assert options["attention"] == ["flash", "native"]
    assert options["block"] == ["torch", "torch+native", "native"]
    assert list_options(TINY_GPT, MachineConfig(), BF16, 0.0)["block"] == ["torch", "native"]
    assert list_options(TINY_GPT, MachineConfig(master_weights="off"), BF16, 0.0)["block"] == [
        "torch"
    ]
    assert list_options(replace(TINY_GPT, window=8), MachineConfig(), CPU, 0.0)["attention"] == [
        "flash",
        "blocked",
    ]
    machine = MachineConfig(gemm_backend="native", master_weights="off")
    with pytest.raises(ConfigError, match="need master weights"):
        autotune(TINY_GPT, machine, BF16, micro_batch=1, key="")


@pytest.mark.skipif(find_library() is None, reason="the native kernels are not compiled")
@pytest.mark.parametrize("family", [TINY_GPT, TINY_LLAMA])
def test_torchs_products_with_native_norms_train_as_torch_does(family: ModelConfig):
    losses, hidden = {}, {}
    for block in ("torch", "torch+native"):
        state, batch = tiny_state(model_config=family), tiny_batch()
        set_block_kernels(state.model, block)
        hidden[block] = state.model(batch.inputs_BT).detach()
        losses[block] = [train_step(state, tiny_step_config(2), CPU, batch).loss for _ in range(3)]
    assert losses["torch+native"] == pytest.approx(losses["torch"], rel=1e-5)
    assert 0 < (hidden["torch+native"] - hidden["torch"]).abs().max() < 1e-5


def test_options_on_cuda_follow_compute_capability_and_triton(monkeypatch: pytest.MonkeyPatch):
    card = replace(CPU, torch_device=torch.device("cuda"), name="card", precision="bf16")
    age = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: tuple(age))
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    options = list_options(TINY_GPT, MachineConfig(), card, 0.0)
    assert options["attention"] == ["flash", "cudnn", "fa2"]
    assert options["loss"] == ["torch", "triton"]
    assert list_options(TINY_GPT, MachineConfig(fused="off"), card, 0.0)["loss"] == ["torch"]
    assert list_options(TINY_GPT, MachineConfig(fused="on"), card, 0.0)["loss"] == ["triton"]
    half = list_options(TINY_GPT, MachineConfig(), replace(card, precision="fp16"), 0.0)
    assert (half["loss"], half["mixed"]) == (["torch"], ["autocast"])
    assert list_options(TINY_GPT, MachineConfig(), replace(card, precision="fp32"), 0.0)[
        "attention"
    ] == ["flash"]
    fixed = MachineConfig(fused="on", gemm_backend="torch", attention="flash", master_weights="off")
    choice = autotune(TINY_LLAMA, fixed, card, micro_batch=1, key="")
    assert choice.kernels == Kernels(loss="triton")
    age[0] = 7
    assert list_options(TINY_GPT, MachineConfig(fused="on"), card, 0.0)["loss"] == ["torch"]
    assert misses_triton(card)
    age[0] = 8
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert misses_triton(card)
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert misses_triton(card)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: no room")]
)
def test_trials_shrink_until_they_fit_in_memory(error: Exception, monkeypatch: pytest.MonkeyPatch):
    sizes, largest = [], 2

    def time_options(
        config: ModelConfig, device: Device, seqs: int, *_: object
    ) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        sizes.append(seqs)
        if seqs > largest:
            raise error
        return {"attention": {"flash": 2.0, "blocked": 1.0}}, {}

    monkeypatch.setattr(autotune_module, "_time_options", time_options)
    assert tune(9).kernels.attention == "blocked"
    assert sizes == [9, 4, 2]
    largest = 0
    with pytest.raises(type(error), match="no room"):
        tune(2, TINY_LLAMA)


def test_failing_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: torch.Tensor, **__: object) -> torch.Tensor:
        raise RuntimeError("no such backend")

    monkeypatch.setitem(ATTENTION, "blocked", fail)
    first = tune(2)
    assert set(first.seconds["attention"]) == {"flash"}
    assert first.kernels.attention == "flash"
    assert first.errors == {"attention blocked": "no such backend"}
    assert ("failed", "attention blocked: no such backend") in first.explain()
    kept = read_measurements(CACHE_FILE)
    assert tune(2) == first
    assert read_measurements(CACHE_FILE) == kept


@pytest.mark.parametrize(
    ("model_config", "precision", "settings", "fits"),
    [
        (TINY_GPT, "bf16", {}, True),
        (TINY_GPT, "bf16", {"master_weights": "off"}, False),
        (TINY_GPT, "bf16", {"fp8": "all"}, False),
        (TINY_GPT, "bf16", {"activation_checkpointing": "gelu"}, False),
        (TINY_GPT, "fp32", {}, False),
        (TINY_LLAMA, "bf16", {}, False),
    ],
)
def test_cublaslt_needs_a_saved_gelu_biases_and_low_precision_weights(
    model_config: ModelConfig,
    precision: str,
    settings: Any,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(autotune_module, "misses_triton", lambda _: True)
    card = replace(CPU, torch_device=torch.device("cuda"), precision=precision)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    machine = MachineConfig(**settings)
    forms = list_options(model_config, machine, card, 0.0)["block"]
    assert forms == (["torch", "cublaslt"] if fits else ["torch"])
    machine = replace(machine, gemm_backend="cublaslt")
    if fits:
        assert list_options(model_config, machine, card, 0.0)["block"] == ["cublaslt"]
    else:
        with pytest.raises(ConfigError, match="cublaslt needs"):
            list_options(model_config, machine, card, 0.0)


def test_cached_timings_decide(tmp_path: Path):
    tune(2)
    kept = json.loads((tmp_path / CACHE_FILE).read_text())
    for seconds, _ in kept.values():
        seconds["attention"] = {"flash": 2.0, "blocked": 1.0}
    (tmp_path / CACHE_FILE).write_text(json.dumps(kept))
    assert tune(2).kernels.attention == "blocked"


@pytest.mark.parametrize("model_config", [TINY_GPT, TINY_LLAMA], ids=["gpt", "llama"])
def test_bf16_copies_follow_the_master_weights(model_config: ModelConfig):
    states = tiny_state(model_config=model_config), tiny_state(model_config=model_config)
    apply_choice(states[1], KernelChoice(kernels=Kernels(mixed="masters")), BF16)
    assert states[1].compute_model.lm_head_weight.dtype == torch.bfloat16
    step_config = tiny_step_config(2)
    for _ in range(20):
        plain = train_step(states[0], step_config, CPU, tiny_batch())
        low = train_step(states[1], step_config, BF16, tiny_batch())
        assert low.loss == pytest.approx(plain.loss, rel=5e-3)
        assert low.grad_norm == pytest.approx(plain.grad_norm, rel=5e-2)
    for master, worker in zip(
        states[1].model.parameters(), states[1].compute_model.parameters(), strict=True
    ):
        assert master.dtype == torch.float32
        torch.testing.assert_close(worker, master.to(torch.bfloat16), rtol=0, atol=0)
        assert worker.grad is None


def test_master_weights_accumulate_gradients_in_fp32():
    gradients = []
    for micro_batch in (8, 1):
        state = tiny_state()
        state.enable_master_weights(torch.bfloat16)
        forward_backward(state, tiny_step_config(micro_batch), BF16, tiny_batch())
        gradients.append([p.grad.clone() for p in state.model.parameters() if p.grad is not None])
    for whole, split in zip(*gradients, strict=True):
        assert split.dtype == torch.float32
        assert float((split - whole).norm() / whole.norm()) < 2e-2


def test_a_failed_self_test_is_a_warning(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(tuning, "find_amx_fault", lambda: "wrong at matmul")
    train(tmp_path / "run", data, console=Console())
    assert capsys.readouterr().out.count("wrong at matmul") == 1


@pytest.mark.skipif(find_library() is None, reason="the native kernels are not compiled")
@pytest.mark.parametrize(
    ("block", "threads"), [("torch", 2), ("torch+native", 2), ("native", 1), ("auto", 0)]
)
def test_a_choice_is_timed_and_trains_with_its_threads(
    data: str, tmp_path: Path, block: str, threads: int, monkeypatch: pytest.MonkeyPatch
):
    """Its first steps, those after a resume, and the trials; then the process has its own back."""
    monkeypatch.setattr(autotune_module, "find_library", find_library)
    counts: dict[str, set[int]] = {"step": set(), "trial": set()}
    for form in ("flash", "native"):  # also in the trials of torch's products

        def count(
            *inputs: Any, form: str = form, kernel: Any = ATTENTION[form], **options: Any
        ) -> Any:
            counts["trial"].add(torch.get_num_threads())
            return kernel(*inputs, **options)

        monkeypatch.setitem(ATTENTION, form, count)
    settings = f"{data} machine.threads=2 machine.attention=auto machine.gemm_backend={block}"

    def note(row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            counts["step"].add(torch.get_num_threads())
            torch.set_num_threads(1)  # as generation does

    torch.set_num_threads(3)
    for stop in (2, 4):
        monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path / f"cache{stop}"))
        train(tmp_path / "run", settings, stop=stop, callbacks=[note])
        assert torch.get_num_threads() == 3
    forms = json.loads((tmp_path / "run" / "machine.json").read_text())["forms"]
    expected = {1 if forms["kernels"]["block"] == "native" else 2}
    assert counts["step"] == expected == {forms["threads"]}
    if threads:
        assert counts["trial"] == expected == {threads}
