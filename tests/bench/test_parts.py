"""bench parts: every operation of a training step belongs to one group."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatoken.bench.parts import (
    GROUPS,
    KERNELS,
    describe_kernels,
    find_group,
    measure,
    profile_step,
    sum_groups,
)
from megatoken.bench.workload import Workload, build_workload
from megatoken.cli.main import main
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.errors import ExitCode
from megatoken.model.flops import count_matmul_parameters, flops_per_token
from megatoken.native.selection import find_library
from tests.conftest import Ask
from tests.tiny_model import CPU, TINY_GPT, TINY_LLAMA

TOKENS = 4 * TINY_GPT.seq_len
TORCH = {"attention": "flash", "gemm_backend": "torch", "fused": "off", "adamw": "fused"}


def build(model_config: ModelConfig = TINY_GPT, **machine: Any) -> Workload:
    config = MachineConfig(**{"device": "cpu", "precision": "fp32"} | machine)
    return build_workload(model_config, config, batch_seqs=4, micro_batch=4)


def groups_by_name(workload: Workload) -> dict[str, set[str]]:
    """The groups of every operation of a step, by its name."""
    events = profile_step(workload)
    groups: dict[str, set[str]] = defaultdict(set)
    for event in events:
        groups[event.name].add(find_group(event))
    return groups


@pytest.mark.parametrize(
    ("model_config", "master_weights", "precision"),
    [(TINY_GPT, "off", "fp32"), (TINY_LLAMA, "on", "bf16")],
    ids=["gpt", "llama"],
)
def test_operations_of_a_real_step(model_config: ModelConfig, master_weights: str, precision: str):
    fixed = TORCH | {"master_weights": master_weights}
    workload = build(model_config, precision=precision, **fixed)
    assert workload.state.uses_master_weights == (master_weights == "on")
    groups = groups_by_name(workload)
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    is_gpt = model_config == TINY_GPT
    expected = {
        flash: "attention",
        f"{flash}_backward": "attention",
        "aten::gelu" if is_gpt else "aten::silu": "activation",
        "aten::gelu_backward" if is_gpt else "aten::silu_backward": "activation",
        "aten::_log_softmax": "loss",
        "_ChunkedCrossEntropy": "loss",
        "aten::linear": "matrix products",
        "aten::mm": "matrix products",
        "aten::_fused_adamw_": "optimizer",
        "aten::native_layer_norm" if is_gpt else "aten::rms_norm": "norm",
    }
    assert {name: groups[name] for name in expected} == {
        name: {group} for name, group in expected.items()
    }
    assert set.union(*groups.values()) == {*GROUPS, "other"} - {"blocks in one call"}
    assert "norm" in groups["NativeLayerNormBackward0" if is_gpt else "RsqrtBackward0"]


@pytest.mark.parametrize(
    ("machine", "name", "group"),
    [
        ({"attention": "explicit"}, "aten::bmm", "attention"),
        ({"attention": "explicit"}, "aten::_softmax_backward_data", "attention"),
        ({"attention": "blocked"}, "aten::bmm", "attention"),
        ({"loss_chunk": 0}, "aten::_log_softmax_backward_data", "loss"),
    ],
)
def test_operations_of_other_kernels(machine: dict[str, Any], name: str, group: str):
    assert groups_by_name(build(**TORCH | machine))[name] == {group}


def make_event(name: str, parent: object = None) -> Any:
    """What `sum_groups` reads of torch's FunctionEvent."""
    return SimpleNamespace(
        name=name, cpu_parent=parent, self_cpu_time_total=1e6, self_device_time_total=2e6
    )


def test_operations_count_for_themselves_or_for_what_calls_them():
    names = ("step", "aten::layer_norm", "_ChunkedCrossEntropy", "aten::linear")
    step, norm, loss, linear = map(make_event, names)
    children = (("mul", norm), ("mm", loss), ("exp", loss), ("copy_", linear), ("add_", step))
    events = [step, norm, loss, linear]
    events += [make_event(f"aten::{name}", parent) for name, parent in children]
    seconds = sum_groups(events, on_cuda=False)
    found = {"other": 2, "norm": 2, "loss": 2, "matrix products": 3}
    assert seconds == dict.fromkeys(GROUPS, 0) | found
    assert sum(sum_groups(events, on_cuda=True).values()) == 2 * len(events)


@pytest.mark.skipif(find_library() is None, reason="the native kernels are not compiled")
def test_native_kernels_count_for_what_they_compute():
    machine = {"attention": "native", "gemm_backend": "native", "fused": "on", "adamw": "native"}
    groups = groups_by_name(build(precision="bf16", **machine))
    expected = {
        "matmul": "matrix products",
        "cross_entropy": "loss",
        "block_forward": "blocks in one call",
        "block_backward": "blocks in one call",
        "adamw": "optimizer",
    }
    expected |= {"norm_forward": "norm", "sum_of_squares": "optimizer"}
    assert {name: groups[f"native::{name}"] for name in expected} == {
        name: {group} for name, group in expected.items()
    }


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<cutlass::bfloat16_t>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(cutlass::bfloat16_t)", "attention"),
        ("_cross_entropy", "loss"),
        ("void at::native::cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue>", "loss"),
        ("void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>", "norm"),
        ("triton_per_fused_add_native_layer_norm_native_layer_norm_backward_view_5", "norm"),
        ("triton_red_fused__fused_rms_norm__to_copy__unsafe_view_add_mul_roll_view_1", "norm"),
        ("triton_red_fused_gelu_gelu_backward_sum_view_3", "activation"),
        ("void at::native::vectorized_elementwise_kernel<GeluCUDAKernelImpl>", "activation"),
        ("multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float>>", "optimizer"),
        ("reduce_kernel<512, 1, at::native::NormTwoOps<float, float>>", "optimizer"),
        ("Memcpy HtoD (Pageable -> Device)", "copies"),
        ("triton_poi_fused_cat_transpose_6", "copies"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copies"),
        ("triton_red_fused_sum_view_0", "other"),
        ("void at::native::sum_and_scatter<c10::BFloat16, long>", "other"),
    ],
)
def test_kernels_of_cuda(name: str, group: str):
    assert find_group(make_event(name), KERNELS) == group


def test_longest_kernels_come_first():
    names = [f"kernel {number}" for number in range(14)] + ["nvjet", "nvjet"]
    answer = describe_kernels([make_event(name) for name in names])
    assert (answer["launches"], len(answer["kernels"])) == (16, 12)
    assert answer["kernels"][0] == {"name": "nvjet", "calls": 2, "seconds": 4.0}


def test_sums_are_sums():
    config, peaked = TINY_GPT, replace(CPU, peak_flops=1e15, peak_source="data sheet")
    answer = measure(build(), peaked, 3, Console())
    parts = {part["name"]: part for part in answer["parts"]}
    step = answer["step_seconds"]["median"]
    assert list(parts) == [*GROUPS, "other"]
    total = sum(part["seconds"]["median"] for part in parts.values())
    assert answer["parts_seconds"] == pytest.approx(total)
    assert answer["overhead_seconds"] == pytest.approx(step - total)
    assert answer["tokens_per_second"]["median"] == pytest.approx(TOKENS / step)
    assert answer["floor_seconds"] == flops_per_token(config, causal=True) * TOKENS / 1e15
    products = 6 * count_matmul_parameters(config) * TOKENS
    attention = 6 * config.n_layer * config.d_model * config.seq_len * TOKENS
    for name, part in parts.items():
        flops = {"matrix products": products, "attention": attention}.get(name)
        assert part["flops"] == flops
        seconds = part["seconds"]["median"]  # 0 where the profiler's clock saw nothing
        assert part["share_of_peak"] == ((flops and seconds and flops / seconds / 1e15) or None)
    unknown = measure(build(), CPU, 1, Console())["parts"]
    assert {part["share_of_peak"] for part in unknown} == {None}


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask):
    monkeypatch.setitem(PRESETS, "tiny", TINY_GPT)
    sizes = "--preset tiny --repeats 1 --seq-len 8 --device cpu"
    words = f"bench parts {sizes} --trace --out {tmp_path} --batch-tokens"
    answer = ask(f"{words} 32 machine.micro_batch=2 machine.attention=blocked")
    assert (answer["micro_batch"], "blocked" in answer["forms"]) == (2, True)
    assert json.loads((tmp_path / "parts.json").read_text())["answer"] == answer
    assert (tmp_path / "trace.json").stat().st_size > 1000
    assert main([*words.split(), "30"]) == ExitCode.CONFIG
