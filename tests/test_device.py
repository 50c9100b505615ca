"""What is chosen for a machine, as far as a machine without a GPU can tell."""

import pytest
import torch

from megatoken.config import Machine
from megatoken.device import Device, fast_precision, open_device, wants_compile, with_peak
from megatoken.errors import Exit, Fault
from megatoken.hardware import PEAK_FLOPS
from megatoken.train.probe import try_compile
from megatoken.train.step import train_step
from tests.tiny import CPU, tiny_batch, tiny_plan, tiny_state


@pytest.mark.parametrize(
    ("kind", "capability", "features", "precision"),
    [
        ("cuda", (6, 0), (), "fp32"),  # Pascal
        ("cuda", (6, 1), (), "fp32"),
        ("cuda", (7, 0), (), "fp16"),  # Volta
        ("cuda", (7, 5), (), "fp16"),  # Turing
        ("cuda", (8, 0), (), "bf16"),  # Ampere
        ("cuda", (8, 9), (), "bf16"),  # Ada
        ("cuda", (9, 0), (), "bf16"),  # Hopper
        ("cpu", (0, 0), (), "fp32"),
        ("cpu", (0, 0), ("avx512_bf16",), "bf16"),
        ("cpu", (0, 0), ("amx_bf16",), "bf16"),
        ("mps", (0, 0), (), "fp32"),
    ],
)
def test_precision_follows_what_the_device_is_fast_at(
    kind: str, capability: tuple[int, int], features: tuple[str, ...], precision: str
) -> None:
    assert fast_precision(kind, capability, frozenset(features)) == precision


def test_devices_that_are_not_there() -> None:
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("there is an accelerator here")
    for name in ("cuda", "cuda:3", "mps"):
        with pytest.raises(Fault, match=r"no (CUDA|MPS) device") as fault:
            open_device(Machine(device=name))
        assert fault.value.code == Exit.CONFIG
    assert open_device(Machine(device="auto")).place.type == "cpu"
    with pytest.raises(Fault, match="fp16 is not trained on a CPU"):
        open_device(Machine(device="cpu", precision="fp16"))


def test_peak_is_measured_where_no_data_sheet_is_known_and_says_so() -> None:
    measured = with_peak(CPU)
    assert measured.peak_flops > 1e9
    assert measured.peak_source == "matrix products measured here"
    known = Device(place=CPU.place, name="x", precision="fp32", peak_flops=1.0, peak_source="data sheet")
    assert with_peak(known) is known


def test_data_sheets_are_matched_exactly_and_plausible() -> None:
    assert "NVIDIA L40S" in PEAK_FLOPS
    assert PEAK_FLOPS["NVIDIA H100 80GB HBM3"]["bf16"] == 989.4e12
    assert PEAK_FLOPS["NVIDIA A100-SXM4-80GB"]["bf16"] == 312e12
    for peaks in PEAK_FLOPS.values():
        assert set(peaks) <= {"fp32", "tf32", "fp16", "bf16"}
        assert peaks["fp32"] <= min(peaks.values())


def test_compile_is_chosen_by_length_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Device(place=torch.device("cuda"), name="x", precision="bf16", peak_flops=1.0, peak_source="")
    assert wants_compile(Machine(compile="auto"), cuda, 10_000) == (True, "")
    assert wants_compile(Machine(compile="auto"), cuda, 100) == (False, "")
    assert wants_compile(Machine(compile="auto"), CPU, 10_000) == (False, "")
    assert wants_compile(Machine(compile="off"), cuda, 10_000) == (False, "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    wanted, said = wants_compile(Machine(compile="on"), CPU, 10)
    assert not wanted
    assert said.startswith("no C++ compiler found: the model runs uncompiled")


def test_a_failing_compiler_leaves_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: torch.nn.Module) -> torch.nn.Module:
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr(torch, "compile", fail)
    state = tiny_state()
    said = try_compile(state, tiny_plan(), CPU)
    assert said == "torch.compile failed, the model runs uncompiled: no such instruction"
    assert state.forward is state.model


@pytest.mark.skipif(not wants_compile(Machine(compile="on"), CPU, 10)[0], reason="no C++ compiler here")
@pytest.mark.filterwarnings("ignore")
def test_compiled_steps_are_the_plain_ones() -> None:
    plain, compiled = tiny_state(), tiny_state()
    assert try_compile(compiled, tiny_plan(), CPU) == ""
    assert compiled.forward is not compiled.model
    for step in range(5):
        batch = tiny_batch(step)
        losses = [train_step(state, tiny_plan(), CPU, *batch).loss for state in (plain, compiled)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert set(compiled.model.state_dict()) == set(plain.model.state_dict())  # no prefixes of the compiler's
