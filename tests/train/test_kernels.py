"""Tuning picks the fastest kernels, caches the choice, and keeps those that the recipe sets."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatoken.base.config.fields import parse_value
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import FIELDS, MachineConfig, build_config
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError
from megatoken.base.rooms import REGISTERED, find_rooms, load_entry
from megatoken.model.gpt import set_block_kernels
from megatoken.model.kernels import fused_loss
from megatoken.model.kernels.attention import find_attention
from megatoken.model.native.selection import find_library
from megatoken.plan.tuning import kernels as autotune_module
from megatoken.plan.tuning import prepare as tuning
from megatoken.plan.tuning.kernels import (
    CACHE_FILE,
    KernelChoice,
    Kernels,
    apply_choice,
    autotune,
    list_options,
    pick,
)
from megatoken.train.step import train_step
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


# Where, settings of the machine, and some of the options. cuBLASLt needs a saved GELU, biases, and
# weights in low precision.
OPTIONS = """\
cpu fp32 | | attention=flash,blocked block=torch loss=torch adamw=torch fp8=off
cpu fp32 dropout | | attention=flash mixed=autocast
cpu fp32 | compile=on | attention=flash block=torch loss=torch
cpu bf16 | | mixed=autocast,masters
cpu fp32 native | | attention=flash,native block=torch,torch+native,native
cpu fp32 native | fused=on | loss=native adamw=native
cpu fp32 native | deterministic=true | attention=flash block=torch adamw=torch
cpu fp32 native window | | attention=flash,blocked
cpu bf16 native | | block=torch,native
cpu bf16 native | master_weights=off | block=torch
cuda bf16 | | attention=flash,cudnn,fa2 block=torch,cublaslt loss=torch,triton
cuda bf16 | fused=off | loss=torch
cuda bf16 | fused=on | loss=triton
cuda bf16 old | fused=on | loss=torch
cuda bf16 hip | fused=on | loss=torch
cuda bf16 no-triton | fused=on | loss=torch
cuda fp16 | | loss=torch mixed=autocast
cuda bf16 | gemm_backend=cublaslt | block=cublaslt
cuda fp32 | | attention=flash block=torch
cuda bf16 | master_weights=off | block=torch
cuda bf16 | fp8=head | block=torch,cublaslt fp8=head
cuda bf16 | activation_checkpointing=gelu | block=torch
cuda bf16 llama | | block=torch
"""


def test_pick_needs_a_clear_margin():
    assert pick({"torch": 1.0, "other": 0.93}, 1.1) == "torch"
    assert pick({"torch": 1.0, "other": 0.9, "third": 0.8}, 1.1) == "third"
    assert pick({"flash": 1.0, "blocked": 2.0}, 1.01) == "flash"


@pytest.mark.parametrize("line", OPTIONS.splitlines())
def test_options_follow_device_model_and_settings(line: str, monkeypatch: pytest.MonkeyPatch):
    where, settings, expected = (part.split() for part in line.split("|"))
    kind, precision, *traits = where
    library = object() if "native" in traits else None
    monkeypatch.setattr(autotune_module, "find_library", lambda: library)
    age = (7, 0) if "old" in traits else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: age)
    monkeypatch.setattr(fused_loss, "HAS_TRITON", "no-triton" not in traits)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", "6.0" if "hip" in traits else None)
    device = replace(CPU, torch_device=torch.device(kind), precision=precision)
    model = TINY_LLAMA if "llama" in traits else TINY_GPT
    model = replace(model, window=8) if "window" in traits else model
    pairs = (f"machine.{setting}".split("=") for setting in settings)
    machine = build_config({key: parse_value(FIELDS[key], text) for key, text in pairs}).machine
    model = replace(model, dropout=0.1 * ("dropout" in traits))
    options = list_options(model, machine, device)
    for setting in expected:
        name, _, implementations = setting.partition("=")
        assert options[name] == implementations.split(",")
    if options["block"] == ["torch"]:
        machine = replace(machine, gemm_backend="native" if "bf16 native" in line else "cublaslt")
        with pytest.raises(ConfigError, match=r"cublaslt needs|need master weights"):
            autotune(model, machine, device, micro_batch=1, key="")


@pytest.mark.skipif(find_library() is None, reason="the native kernels are not compiled")
@pytest.mark.parametrize("family", [TINY_GPT, TINY_LLAMA])
def test_torchs_products_with_native_norms_train_as_torch_does(family: ModelConfig):
    losses, hidden = [], []
    for block in ("torch", "torch+native"):
        state, batch = tiny_state(model_config=family), tiny_batch()
        set_block_kernels(state.model, load_entry("block_kernels", block))
        hidden.append(state.model(batch.inputs_BT).detach())
        losses.append([train_step(state, tiny_step_config(2), CPU, batch).loss for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert 0 < (hidden[1] - hidden[0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: no room")]
)
def test_trials_shrink_until_they_fit_in_memory(error: Exception, monkeypatch: pytest.MonkeyPatch):
    sizes, largest = [], 2

    def time_options(_config, _device, seqs, *_):
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


def test_failing_kernel_is_left_out_and_cached_timings_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_, **__):
        raise RuntimeError("no such backend")

    monkeypatch.setitem(REGISTERED, "attention", {"blocked": fail})
    first = tune(2)
    assert set(first.seconds["attention"]) == {"flash"}
    assert first.kernels.attention == "flash"
    assert first.errors == {"attention blocked": "no such backend"}
    assert ("failed", "attention blocked: no such backend") in first.explain()
    cache = tmp_path / CACHE_FILE
    kept = cache.read_text()
    assert tune(2) == first
    assert cache.read_text() == kept
    measured = json.loads(kept)
    for seconds, _ in measured.values():
        seconds["attention"] = {"flash": 2.0, "blocked": 1.0}
    cache.write_text(json.dumps(measured))
    assert tune(2).kernels.attention == "blocked"


def test_bf16_copies_follow_the_master_weights():
    plain, low = tiny_state(), tiny_state()
    apply_choice(low, KernelChoice(kernels=Kernels(mixed="masters")), BF16)
    for _ in range(8):
        expected = train_step(plain, tiny_step_config(2), CPU, tiny_batch())
        found = train_step(low, tiny_step_config(2), BF16, tiny_batch())
        assert found.loss == pytest.approx(expected.loss, rel=5e-3)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=5e-2)
    copies = low.compute.model.parameters()
    for master, copy in zip(low.model.parameters(), copies, strict=True):
        assert (master.dtype, copy.grad) == (torch.float32, None)
        assert torch.equal(copy, master.to(torch.bfloat16))


@pytest.mark.skipif(find_library() is None, reason="the native kernels are not compiled")
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
    """Check first steps, resumed steps and trials; afterwards the process has its own threads."""
    monkeypatch.setattr(autotune_module, "find_library", find_library)
    in_steps, in_trials = set(), set()

    def count_in(kernel):
        def count(*inputs, **options):
            in_trials.add(torch.get_num_threads())
            return kernel(*inputs, **options)

        return count

    counted = {name: count_in(find_attention(name)) for name in ("flash", "native")}
    monkeypatch.setitem(REGISTERED, "attention", counted)  # also in the trials of torch's products
    settings = f"{data} machine.threads=2 machine.attention=auto machine.gemm_backend={block}"

    def note(row):
        if row["kind"] == "train":
            in_steps.add(torch.get_num_threads())
            torch.set_num_threads(1)  # as generation does

    torch.set_num_threads(3)
    for stop in (2, 4):
        monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path / f"cache{stop}"))
        train(tmp_path / "run", settings, stop=stop, callbacks=[note])
        assert torch.get_num_threads() == 3
    forms = json.loads((tmp_path / "run/machine.json").read_text())["forms"]
    expected = {1 if forms["kernels"]["block"] == "native" else 2}
    assert in_steps == expected == {forms["threads"]}
    if threads:
        assert in_trials == expected == {threads}


def test_without_a_room_that_tunes_nothing_is_compiled(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(find_rooms()["plan"].entries, "tuner")
    with pytest.raises(ConfigError, match=r"machine\.compile"):
        train(tmp_path / "run", data, "machine.micro_batch=2 machine.compile=on")
