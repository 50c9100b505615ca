"""Device, precision, peak and compile mode, as far as a machine without a GPU can test them."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import MachineConfig
from megatoken.errors import ConfigError
from megatoken.model.gpt import set_activation_checkpointing
from megatoken.system.device import (
    cache_peak,
    fast_precision,
    measure_peak,
    memory_errors,
    open_device,
    wants_compile,
    with_peak,
)
from megatoken.train.compilation import compile_forward
from megatoken.train.step import forward_backward, train_step
from tests.tiny_model import CPU, TINY_GPT, TINY_LLAMA, tiny_batch, tiny_state, tiny_step_config

AUTO = """
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


@pytest.mark.parametrize("row", AUTO.strip().splitlines())
def test_auto_precision_is_the_fast_one(row: str):
    kind, major, minor, precision, *features = row.split()
    assert fast_precision(kind, (int(major), int(minor)), frozenset(features)) == precision


def test_auto_precision_can_be_chosen_for_a_machine(monkeypatch: pytest.MonkeyPatch):
    for preferred in ("fp32", "bf16"):
        monkeypatch.setenv("MEGATOKEN_PRECISION", preferred)
        assert open_device(MachineConfig(device="cpu")).precision == preferred
        assert (
            open_device(MachineConfig(device="cpu", precision="fp32")).precision == "fp32"
        )  # a named one stands
    for wrong in ("fp16", "float"):
        monkeypatch.setenv("MEGATOKEN_PRECISION", wrong)
        with pytest.raises(ConfigError):
            open_device(MachineConfig(device="cpu"))


def test_a_peak_without_data_sheet_is_measured():
    measured = with_peak(CPU)
    assert measured.peak_flops > 1e9
    assert measured.peak_source == "matrix products measured here"
    known = replace(CPU, peak_flops=1.0, peak_source="data sheet")
    assert with_peak(known) is known


@pytest.fixture
def peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    return tmp_path / "cache" / "peaks.json"


def test_the_best_measured_peak_is_cached_per_device_and_precision(peaks: Path):
    assert cache_peak(CPU, 2e15) == 2e15
    assert cache_peak(CPU, 1e15) == 2e15
    assert cache_peak(replace(CPU, precision="bf16"), 3e15) == 3e15
    threads = torch.get_num_threads()
    assert json.loads(peaks.read_text()) == {
        f"cpu (cpu, {threads} threads), fp32, torch {torch.__version__}": 2e15,
        f"cpu (cpu, {threads} threads), bf16, torch {torch.__version__}": 3e15,
    }
    assert with_peak(CPU).peak_flops == 2e15  # the best ever stays
    assert with_peak(replace(CPU, precision="bf16")).peak_flops == 3e15
    assert with_peak(replace(CPU, name="another")).peak_flops < 1e15


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"KEY": -1}', "\0\xff"])
def test_a_damaged_cache_of_peaks_is_measured_again(peaks: Path, damage: str):
    cache_peak(CPU, 1e9)
    (key,) = json.loads(peaks.read_text())
    peaks.write_text(damage.replace("KEY", key), encoding="latin-1")
    assert cache_peak(CPU, 5e9) == 5e9
    assert json.loads(peaks.read_text()) == {key: 5e9}


def test_measuring_a_peak_keeps_the_random_state():
    before = torch.get_rng_state()
    assert measure_peak(CPU, seconds=0.0) > 1e6
    assert torch.equal(torch.get_rng_state(), before)


def test_compile_mode_depends_on_length_and_compiler(monkeypatch: pytest.MonkeyPatch):
    cuda = replace(CPU, torch_device=torch.device("cuda"))
    assert wants_compile(MachineConfig(compile="auto"), cuda, 10_000) == ("blocks", "")
    assert wants_compile(MachineConfig(compile="auto"), cuda, 100) == ("off", "")
    assert wants_compile(MachineConfig(compile="auto"), CPU, 10_000) == ("off", "")
    assert wants_compile(MachineConfig(compile="off"), cuda, 10_000) == ("off", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    for kind in ("on", "blocks"):
        assert wants_compile(MachineConfig(compile=kind), cuda, 10) == (kind, "")  # type: ignore[arg-type]
    for kind in ("graphs", "on"):
        mode, note = wants_compile(MachineConfig(compile=kind), CPU, 10)  # type: ignore[arg-type]
        assert mode == "off"
        assert note


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "backend", "checkpointing", "low", "model_config"),
    [
        ("on", "aot_eager", "none", False, TINY_GPT),
        ("on", "aot_eager", "none", True, TINY_GPT),
        ("blocks", "aot_eager", "gelu", False, replace(TINY_GPT, dropout=0.2)),
        ("blocks", "aot_eager", "none", False, TINY_LLAMA),
        ("blocks", "inductor", "none", True, replace(TINY_GPT, n_layer=1)),
    ],
)
def test_compiled_steps_equal_eager_ones(
    kind: str,
    backend: str,
    checkpointing: str,
    low: bool,
    model_config: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
):
    """low: with master weights and a copy in bf16. Compiling with inductor takes seconds."""
    if backend == "inductor" and wants_compile(MachineConfig(compile="on"), CPU, 10)[0] == "off":
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    dropout, losses = model_config.dropout, []
    states = [tiny_state(model_config=model_config, dropout=dropout) for _ in range(2)]
    plain, compiled = states
    for state in states:
        if low:
            state.enable_master_weights(torch.bfloat16)
    set_activation_checkpointing(compiled.compute_model, checkpointing)
    assert compile_forward(compiled, tiny_step_config(), CPU, kind) == ""
    assert (compiled.forward is compiled.compute_model) == (kind == "blocks")
    forward_backward(compiled, tiny_step_config(), CPU, tiny_batch())
    made_elsewhere = [p.grad is None for p in compiled.compute_model.parameters()]
    assert all(made_elsewhere) == low  # collected from the copy
    compiled.optimizer.zero_grad()
    for step in range(3):
        batch = tiny_batch(step)
        losses = [train_step(state, tiny_step_config(), CPU, batch).loss for state in states]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2 if low else 1e-5)
    assert set(compiled.model.state_dict()) == set(plain.model.state_dict())  # no prefixes


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. Including x"),
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"),
        MemoryError("Unable to allocate 2 TiB"),
    ],
)
def test_out_of_memory_is_a_config_error(error: Exception):
    with pytest.raises(ConfigError), memory_errors("rank 1", "lower it"):
        raise error
    with pytest.raises(RuntimeError, match="another"), memory_errors("rank 1", "lower it"):
        raise RuntimeError("another")
