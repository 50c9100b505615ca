"""bench parts: every operation of a training step belongs to one group."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console
from megatoken.base.errors import ExitCode
from megatoken.cli.main import main
from megatoken.model.flops import count_matmul_parameters, flops_per_token
from megatoken.model.native.selection import find_library
from megatoken.study.bench.parts import (
    GROUPS,
    KERNELS,
    find_group,
    measure,
    profile_step,
    sum_groups,
)
from megatoken.study.bench.workload import Workload, build_workload
from tests.conftest import Ask
from tests.tiny_model import CPU, TINY_GPT, TINY_LLAMA

TOKENS = 4 * TINY_GPT.seq_len
TORCH = {"attention": "flash", "gemm_backend": "torch", "fused": "off", "adamw": "fused"}
MASTER_WEIGHTS = {"precision": "bf16", "master_weights": "on"}


def build(model_config: ModelConfig = TINY_GPT, **machine: Any) -> Workload:
    config = MachineConfig(device="cpu", **{"precision": "fp32"} | machine)
    return build_workload(model_config, config, batch_seqs=4, micro_batch=4)


def groups_by_name(workload: Workload) -> dict[str, set[str]]:
    """Return the groups of every operation of a step, by its name."""
    groups = defaultdict(set)
    for event in profile_step(workload):
        groups[event.name].add(find_group(event))
    return groups


def assert_groups(groups: dict[str, set[str]], expected: dict[str, str]) -> None:
    """Compare the groups of some operations. expected: groups, and their operations, separated by
    spaces.
    """
    wanted = {name: {group} for group, names in expected.items() for name in names.split()}
    assert {name: groups[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("model_config", "fixed", "activation", "norm", "backward"),
    [
        (TINY_GPT, {}, "gelu", "native_layer_norm", "NativeLayerNormBackward0"),
        (TINY_LLAMA, MASTER_WEIGHTS, "silu", "rms_norm", "RsqrtBackward0"),
    ],
    ids=["gpt", "llama"],
)
def test_operations_of_a_real_step(
    model_config: ModelConfig, fixed: dict[str, str], activation: str, norm: str, backward: str
):
    workload = build(model_config, **TORCH | fixed)
    assert workload.state.uses_master_weights == bool(fixed)
    groups = groups_by_name(workload)
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    expected = {
        "attention": f"{flash} {flash}_backward",
        "activation": f"aten::{activation} aten::{activation}_backward",
        "loss": "aten::_log_softmax _ChunkedCrossEntropy",
        "matrix products": "aten::linear aten::mm",
        "optimizer": "aten::_fused_adamw_",
        "norm": f"aten::{norm}",
    }
    assert_groups(groups, expected)
    assert set.union(*groups.values()) == {*GROUPS, "other"} - {"blocks in one call"}
    assert "norm" in groups[backward]


def test_operations_of_other_kernels():
    explicit = {"attention": "aten::bmm aten::_softmax_backward_data"}
    assert_groups(groups_by_name(build(**TORCH | {"attention": "explicit"})), explicit)
    unchunked = groups_by_name(build(**TORCH | {"attention": "blocked", "loss_chunk": 0}))
    assert_groups(unchunked, {"attention": "aten::bmm", "loss": "aten::_log_softmax_backward_data"})


def make_event(name: str, parent: object = None) -> Any:
    """Return the attributes of torch's FunctionEvent that `sum_groups` reads."""
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
    expected = {
        "matrix products": "native::matmul",
        "loss": "native::cross_entropy",
        "blocks in one call": "native::block_forward native::block_backward",
        "optimizer": "native::adamw native::sum_of_squares",
        "norm": "native::norm_forward",
    }
    assert_groups(groups_by_name(build(precision="bf16", **machine)), expected)


CUDA_KERNELS = """\
matrix products: nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT
matrix products: sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64
matrix products: void cublasLt::splitKreduce_kernel<32, 16, int, float>
attention: cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16
attention: void pytorch_flash::flash_fwd_splitkv_kernel<cutlass::bfloat16_t>
attention: fmha_cutlassF_bf16_aligned_64x64_rf_sm80(cutlass::bfloat16_t)
loss: _cross_entropy
loss: void at::native::cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue>
norm: void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>
norm: triton_per_fused_add_native_layer_norm_native_layer_norm_backward_view_5
norm: triton_red_fused__fused_rms_norm__to_copy__unsafe_view_add_mul_roll_view_1
activation: triton_red_fused_gelu_gelu_backward_sum_view_3
activation: void at::native::vectorized_elementwise_kernel<GeluCUDAKernelImpl>
optimizer: multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float>>
optimizer: reduce_kernel<512, 1, at::native::NormTwoOps<float, float>>
copies: Memcpy HtoD (Pageable -> Device)
copies: triton_poi_fused_cat_transpose_6
copies: void at::native::elementwise_kernel<direct_copy_kernel_cuda>
other: triton_red_fused_sum_view_0
other: void at::native::sum_and_scatter<c10::BFloat16, long>
"""


@pytest.mark.parametrize("row", CUDA_KERNELS.splitlines())
def test_kernels_of_cuda(row: str):
    group, name = row.split(": ", 1)
    assert find_group(make_event(name), KERNELS) == group


def test_sums_are_sums():
    peaked = replace(CPU, peak_flops=1e15, peak_source="data sheet")
    result = measure(build(), peaked, 3, Console())
    parts = {part["name"]: part for part in result["parts"]}
    step = result["step_seconds"]["median"]
    assert list(parts) == [*GROUPS, "other"]
    total = sum(part["seconds"]["median"] for part in parts.values())
    sums = (result["parts_seconds"], result["overhead_seconds"])
    assert sums == pytest.approx((total, step - total))
    assert result["tokens_per_second"]["median"] == pytest.approx(TOKENS / step)
    assert result["floor_seconds"] == flops_per_token(TINY_GPT, causal=True) * TOKENS / 1e15
    known = {
        "matrix products": 6 * count_matmul_parameters(TINY_GPT) * TOKENS,
        "attention": 6 * TINY_GPT.n_layer * TINY_GPT.d_model * TINY_GPT.seq_len * TOKENS,
    }
    for name, part in parts.items():
        flops = known.get(name)
        seconds = part["seconds"]["median"]  # 0 if the profiler's clock did not advance
        share = (flops and seconds and flops / seconds / 1e15) or None
        assert (part["flops"], part["share_of_peak"]) == (flops, share)
    unknown = measure(build(), CPU, 1, Console())["parts"]
    assert {part["share_of_peak"] for part in unknown} == {None}


def test_command(tmp_path: Path, ask: Ask):
    arguments = "bench parts --preset tiny --repeats 1 --seq-len 8 --device cpu"
    arguments = f"{arguments} --trace --out {tmp_path} --batch-tokens"
    result = ask(f"{arguments} 32 machine.micro_batch=2 machine.attention=blocked")
    assert (result["micro_batch"], "blocked" in result["forms"]) == (2, True)
    assert json.loads((tmp_path / "parts.json").read_text())["answer"] == result
    assert (tmp_path / "trace.json").stat().st_size > 1000
    assert main([*arguments.split(), "30"]) == ExitCode.CONFIG
