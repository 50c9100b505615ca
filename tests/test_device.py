"""What is chosen for a machine, as far as a machine without a GPU can tell."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatoken.config import Machine
from megatoken.device import (
    Device,
    fast_precision,
    measure_peak,
    misses_triton,
    open_device,
    remember_peak,
    wants_compile,
    with_peak,
)
from megatoken.errors import Exit, Fault
from megatoken.model.gpt import use_recompute
from megatoken.presets import Shape
from megatoken.train.choose import choose_forms
from megatoken.train.probe import try_compile
from megatoken.train.step import accumulate_gradients, train_step
from tests.tiny import CPU, LLAMA, SHAPE, tiny_batch, tiny_plan, tiny_state


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


@pytest.fixture
def peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "peaks.json"


def test_the_best_measured_peak_is_kept_per_machine_and_precision(peaks: Path) -> None:
    assert remember_peak(CPU, 2e15) == 2e15
    assert remember_peak(CPU, 1e15) == 2e15
    assert remember_peak(replace(CPU, precision="bf16"), 3e15) == 3e15
    threads = torch.get_num_threads()
    assert json.loads(peaks.read_text()) == {
        f"cpu (cpu, {threads} threads), fp32, torch {torch.__version__}": 2e15,
        f"cpu (cpu, {threads} threads), bf16, torch {torch.__version__}": 3e15,
    }
    assert [path.name for path in peaks.parent.iterdir()] == ["peaks.json"]
    assert with_peak(CPU).peak_flops == 2e15  # the best ever stays
    assert with_peak(replace(CPU, precision="bf16")).peak_flops == 3e15
    assert with_peak(replace(CPU, name="another")).peak_flops < 1e15


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"KEY": "fast"}', '{"KEY": -1}', '{"KEY": Infinity}', "\0\xff"])
def test_a_damaged_cache_of_peaks_is_measured_again(peaks: Path, damage: str) -> None:
    remember_peak(CPU, 1e9)
    (key,) = json.loads(peaks.read_text())
    peaks.write_text(damage.replace("KEY", key), encoding="latin-1")
    assert remember_peak(CPU, 5e9) == 5e9
    assert json.loads(peaks.read_text()) == {key: 5e9}


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path / "file"))
    assert remember_peak(CPU, 1e12) == 1e12
    assert (tmp_path / "file").read_text() == ""


def test_measuring_a_peak_draws_no_random_numbers_and_keeps_its_time() -> None:
    before = torch.get_rng_state()
    assert measure_peak(CPU, sizes=(64, 128), seconds=1.0) > 1e6
    assert torch.equal(torch.get_rng_state(), before)
    began = time.perf_counter()
    assert measure_peak(CPU, sizes=(64, 8192), seconds=0.0) > 0  # ten of the larger would take longer
    assert time.perf_counter() - began < 5


def test_compile_is_chosen_by_length_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Device(place=torch.device("cuda"), name="x", precision="bf16", peak_flops=1.0, peak_source="")
    assert wants_compile(Machine(compile="auto"), cuda, 10_000) == ("on", "")
    assert wants_compile(Machine(compile="auto"), cuda, 100) == ("off", "")
    assert wants_compile(Machine(compile="auto"), CPU, 10_000) == ("off", "")
    assert wants_compile(Machine(compile="off"), cuda, 10_000) == ("off", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    for kind in ("on", "blocks"):
        assert wants_compile(Machine(compile=kind), cuda, 10) == (kind, "")  # type: ignore[arg-type]
    wanted, said = wants_compile(Machine(compile="graphs"), CPU, 10)
    assert (wanted, said) == ("off", "CUDA graphs are for CUDA: the model runs uncompiled (machine.compile=on)")
    wanted, said = wants_compile(Machine(compile="on"), CPU, 10)
    assert wanted == "off"
    assert said.startswith("no C++ compiler found: the model runs uncompiled")


def test_a_failing_compiler_leaves_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: torch.nn.Module, mode: str | None = None) -> torch.nn.Module:
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr(torch, "compile", fail)
    state = tiny_state()
    said = try_compile(state, tiny_plan(), CPU)
    assert said == "torch.compile failed, the model runs uncompiled: no such instruction"
    assert state.forward is state.working


def test_why_there_are_no_fused_kernels_is_said() -> None:
    assert misses_triton(CPU) == "there is no GPU to run them (cpu)"
    machine = Machine(fused="on", linear="torch", attention="flash")
    choice = choose_forms(SHAPE, machine, CPU, micro_batch=1, dropout=0.0)
    assert choice.note == "fused kernels are left out: there is no GPU to run them (cpu)"
    assert (choice.kernels.norm, choice.kernels.gelu, choice.kernels.loss) == ("torch", "torch", "torch")
    assert choose_forms(SHAPE, replace(machine, fused="auto"), CPU, micro_batch=1, dropout=0.0).note == ""


@pytest.mark.skipif(wants_compile(Machine(compile="on"), CPU, 10)[0] == "off", reason="no C++ compiler here")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "recompute", "shape"),
    [("on", "none", SHAPE), ("blocks", "none", SHAPE), ("blocks", "gelu", SHAPE), ("blocks", "none", LLAMA)],
    ids=["on", "blocks", "blocks, gelu", "blocks of a llama"],
)
def test_compiled_steps_are_the_plain_ones(kind: str, recompute: str, shape: Shape) -> None:
    plain, compiled = tiny_state(shape=shape), tiny_state(shape=shape)
    use_recompute(compiled.model, recompute)
    assert try_compile(compiled, tiny_plan(), CPU, kind) == ""
    assert (compiled.forward is compiled.model) == (kind == "blocks")
    for step in range(5):
        batch = tiny_batch(step)
        losses = [train_step(state, tiny_plan(), CPU, *batch).loss for state in (plain, compiled)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert set(compiled.model.state_dict()) == set(plain.model.state_dict())  # no prefixes of the compiler's


@pytest.mark.skipif(wants_compile(Machine(compile="on"), CPU, 10)[0] == "off", reason="no C++ compiler here")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["on", "blocks"])
def test_what_is_compiled_is_the_copy_that_trains(kind: str) -> None:
    plain, compiled = tiny_state(), tiny_state()
    for state in (plain, compiled):
        state.hold_masters(torch.bfloat16)
    assert try_compile(compiled, tiny_plan(), CPU, kind) == ""
    accumulate_gradients(compiled, tiny_plan(), CPU, *tiny_batch())
    assert all(p.grad is None for p in compiled.working.parameters())  # collected, hence made there
    compiled.optimizer.zero_grad()
    losses = [train_step(state, tiny_plan(), CPU, *tiny_batch()).loss for state in (plain, compiled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
