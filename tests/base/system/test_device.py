"""Device, precision, peak and compile mode, tested without a GPU."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatoken.base.config.schema import MachineConfig
from megatoken.base.errors import ConfigError
from megatoken.base.system.atomic_write import read_json
from megatoken.base.system.device import fast_precision, memory_errors, open_device
from megatoken.base.system.machine import find_compiler
from megatoken.model.gpt import set_activation_checkpointing
from megatoken.plan.tuning.compilation import compile_forward, wants_compile
from megatoken.plan.tuning.peak import cache_peak, with_peak
from megatoken.train.step import forward_backward, train_step
from tests.tiny_model import CPU, TINY_GPT, TINY_LLAMA, tiny_batch, tiny_state, tiny_step_config

AUTO = """\
cuda 6 0 fp32
cuda 6 1 fp32
cuda 7 0 fp16
cuda 7 5 fp16
cuda 8 0 bf16
cuda 8 9 bf16
cuda 9 0 bf16
cpu 0 0 fp32
cpu 0 0 bf16 avx512_bf16
cpu 0 0 bf16 amx_bf16
mps 0 0 fp32
"""


@pytest.mark.parametrize("row", AUTO.splitlines())
def test_auto_precision_is_the_fast_one(row: str):
    kind, major, minor, precision, *features = row.split()
    assert fast_precision(kind, (int(major), int(minor)), frozenset(features)) == precision


def test_auto_precision_can_be_chosen_for_a_machine(monkeypatch: pytest.MonkeyPatch):
    for preferred in ("fp32", "bf16"):
        monkeypatch.setenv("MEGATOKEN_PRECISION", preferred)
        found = [
            open_device(MachineConfig(device="cpu", precision=precision)).precision
            for precision in ("auto", "fp32")
        ]
        assert found == [preferred, "fp32"]  # a named one stands
    for wrong in ("fp16", "float"):
        monkeypatch.setenv("MEGATOKEN_PRECISION", wrong)
        with pytest.raises(ConfigError):
            open_device(MachineConfig(device="cpu"))


@pytest.fixture
def peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    return tmp_path / "cache/peaks.json"


@pytest.mark.usefixtures("peaks")
def test_a_peak_without_data_sheet_is_measured():
    random_state = torch.get_rng_state()
    measured = with_peak(CPU)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert measured.peak_flops > 1e9
    assert measured.peak_source == "matrix products measured here"
    known = replace(CPU, peak_flops=1.0, peak_source="data sheet")
    assert with_peak(known) is known


def test_the_best_measured_peak_is_cached_per_device_and_precision(peaks: Path):
    assert cache_peak(CPU, 2e15) == 2e15
    assert cache_peak(CPU, 1e15) == 2e15
    assert cache_peak(replace(CPU, precision="bf16"), 3e15) == 3e15
    name, version = f"cpu (cpu, {torch.get_num_threads()} threads)", f"torch {torch.__version__}"
    expected = {
        f"{name}, {each}, {version}": peak for each, peak in (("fp32", 2e15), ("bf16", 3e15))
    }
    assert read_json(peaks) == expected
    assert with_peak(CPU).peak_flops == 2e15  # the best measurement stays
    assert with_peak(replace(CPU, precision="bf16")).peak_flops == 3e15
    assert with_peak(replace(CPU, name="another")).peak_flops < 1e15


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"KEY": -1}', "\0\xff"])
def test_a_damaged_cache_of_peaks_is_measured_again(peaks: Path, damage: str):
    cache_peak(CPU, 1e9)
    (key,) = read_json(peaks)
    peaks.write_text(damage.replace("KEY", key), encoding="latin-1")
    assert cache_peak(CPU, 5e9) == 5e9
    assert read_json(peaks) == {key: 5e9}


def test_compile_mode_depends_on_length_and_compiler(monkeypatch: pytest.MonkeyPatch):
    cuda = replace(CPU, torch_device=torch.device("cuda"))

    def wants(mode, device, steps):
        return wants_compile(MachineConfig(compile=mode), device, steps)  # type: ignore[arg-type]

    assert wants("auto", cuda, 10_000) == ("blocks", "")
    short = [("auto", cuda, 100), ("auto", CPU, 10_000), ("off", cuda, 10_000)]
    assert {wants(*each) for each in short} == {("off", "")}
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    for kind in ("on", "blocks"):
        assert wants(kind, cuda, 10) == (kind, "")
    for kind in ("graphs", "on"):
        mode, note = wants(kind, CPU, 10)
        assert (mode, bool(note)) == ("off", True)


MODELS = {"gpt": TINY_GPT, "llama": TINY_LLAMA, "short": replace(TINY_GPT, n_layer=1)}
# What is compiled, backend, checkpointing, model and dropout; master weights and a copy in bf16.
COMPILED = """\
on aot_eager none gpt 0
on aot_eager none gpt 0 low
blocks aot_eager gelu gpt 0.2
blocks aot_eager none llama 0
blocks inductor none short 0 low
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", COMPILED.splitlines())
def test_compiled_steps_equal_eager_ones(row: str, monkeypatch: pytest.MonkeyPatch):
    """Compiling with inductor takes seconds."""
    kind, backend, checkpointing, model, dropout, *low = row.split()
    if backend == "inductor" and not find_compiler():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    states = [tiny_state(model_config=MODELS[model], dropout=float(dropout)) for _ in range(2)]
    plain, compiled = states
    for state in states:
        if low:
            state.enable_master_weights(deepcopy(state.model).bfloat16())
    set_activation_checkpointing(compiled.compute.model, checkpointing)
    assert compile_forward(compiled, tiny_step_config(), CPU, kind) == ""
    assert (compiled.compute.forward is compiled.compute.model) == (kind == "blocks")
    forward_backward(compiled, tiny_step_config(), CPU, tiny_batch())
    made_elsewhere = [p.grad is None for p in compiled.compute.model.parameters()]
    assert all(made_elsewhere) == bool(low)  # collected from the copy
    compiled.optimizer.zero_grad()
    for step in range(3):
        batch = tiny_batch(step)
        losses = [train_step(state, tiny_step_config(), CPU, batch).loss for state in states]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2 if low else 1e-5)
    assert set(compiled.model.state_dict()) == set(plain.model.state_dict())  # no prefixes


def test_out_of_memory_is_a_config_error():
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. Including x"),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8 GB, max allowed: 9 GB)."),
        MemoryError("Unable to allocate 2 TiB"),
    ):
        with pytest.raises(ConfigError), memory_errors("rank 1", "lower it"):
            raise error
    with pytest.raises(RuntimeError, match="another"), memory_errors("rank 1", "lower it"):
        raise RuntimeError("another")
