"""bench gemm, attention, batch, size: the cases, what is skipped and why, what rows hold; never how fast."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatoken.bench import sweep
from megatoken.bench.sweep import Size, list_sizes, measure_steps
from megatoken.bench.workload import build_workload, describe_mfu, estimate_step_bytes
from megatoken.cli.main import main
from megatoken.config.presets import PRESETS
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.errors import ExitCode
from megatoken.model.flops import count_padded_parameters, count_parameters, flops_per_token
from megatoken.model.kernels import ATTENTION, CUDA_ONLY
from megatoken.model.kernels.attention import flash_attention
from megatoken.model.memory import LOSS_CHUNK, count_activation_bytes
from megatoken.native.library import find_library
from megatoken.system.device import MEASURED, cache_peak, open_device, product_calls, with_peak
from megatoken.system.machine import cpu_count
from tests.tiny_model import CPU, TINY_GPT, TINY_LLAMA

QUIET = Console(quiet=True)
MACHINE = MachineConfig(device="cpu", precision="fp32")
PEAKED = replace(CPU, peak_flops=1e15, peak_source="data sheet")
FORMS = [
    form for form in ATTENTION if form not in CUDA_ONLY and (form != "native" or find_library())
]


@pytest.fixture(autouse=True)
def own_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run_command(
    capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[dict[str, Any], list[str]]:
    """The answer of a bench on the CPU, which is also in its record beside a picture, and the lines before it."""
    name, out = words[0], words[-1]
    assert main(["bench", *map(str, words[:-1]), "--device", "cpu", "--out", str(out)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    answer: dict[str, Any] = json.loads(last)
    assert json.loads((Path(str(out)) / f"{name}.json").read_text())["answer"] == answer
    assert (Path(str(out)) / f"{name}.png").read_bytes()[1:4] == b"PNG"
    return answer, lines


# gemm


def gemm(tmp_path: Path, largest: int = 128, console: Console = QUIET) -> dict[str, Any]:
    options = argparse.Namespace(
        bench="gemm", name="gemm", device="cpu", largest=largest, repeats=2, out=tmp_path
    )
    return sweep.run(options, console)


def test_squares_of_every_size_dtype_and_library_and_layers_of_the_first_dtype(
    tmp_path: Path,
) -> None:
    answer = gemm(tmp_path)
    device = open_device(MachineConfig(device="cpu"))
    assert answer["device"] == device.name
    rows = [row for row in answer["rows"] if row["sweep"] == "squares"]
    found = [(row["dtype"], row["library"], row["m"], row["k"], row["n"]) for row in rows]
    libraries = {"bf16": ["torch"], "fp32": list(product_calls(torch.ones(2, 2), torch.ones(2, 2)))}
    dtypes = list(dict.fromkeys([device.precision, "fp32"]))
    assert found == [
        (d, library, s, s, s) for d in dtypes for s in (64, 128) for library in libraries[d]
    ]
    layers = [row for row in answer["rows"] if row["sweep"] == "layers"]
    found = [(row["dtype"], row["tokens"], row["width"]) for row in layers]
    assert found == [(dtypes[0], n, k) for k in (64, 128) for n in (256, 1024, 4096)]
    assert [row["name"] for row in layers][:2] == ["256 x 64 x 64", "1024 x 64 x 64"]
    for row in answer["rows"]:
        rate = row["flops_per_second"]
        assert 0 < rate["low"] <= rate["median"] <= rate["high"] == row["best"]
        assert rate["median"] == pytest.approx(
            2 * row["m"] * row["k"] * row["n"] / row["seconds"]["median"]
        )
        assert rate["repeats"] == 2
    for dtype in dtypes:
        assert answer["peak"][dtype] == max(
            row["best"] for row in answer["rows"] if row["dtype"] == dtype
        )


@pytest.mark.parametrize(
    ("left", "right"), [("plain", "plain"), ("plain", "transposed"), ("transposed", "plain")]
)
def test_libraries_compute_the_same_product(left: str, right: str) -> None:
    a = torch.randn(5, 7) if left == "plain" else torch.randn(7, 5).T
    b = torch.randn(7, 3) if right == "plain" else torch.randn(3, 7).T
    for call in product_calls(a, b).values():
        torch.testing.assert_close(
            torch.as_tensor(call()), a.double() @ b.double(), check_dtype=False
        )


def test_numpy_is_left_out_when_torch_may_not_use_every_core() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = ["torch", "numpy"] if cpu_count() == 1 else ["torch"]
        assert list(product_calls(torch.ones(2, 2), torch.ones(2, 2))) == expected
    finally:
        torch.set_num_threads(threads)
    assert list(product_calls(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16())) == [
        "torch"
    ]


def test_the_better_peak_is_kept_and_used(tmp_path: Path, own_peaks: Path) -> None:
    answer = gemm(tmp_path)
    device = open_device(MACHINE)
    assert set(json.loads((own_peaks / "peaks.json").read_text()).values()) == set(
        answer["peak"].values()
    )
    assert (
        with_peak(device).peak_flops >= answer["peak"]["fp32"]
    )  # larger products may be faster still
    assert with_peak(device).peak_source == MEASURED


def test_the_gemm_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, lines = run_command(capsys, "gemm", "--largest", 64, "--repeats", 1, tmp_path / "out")
    assert {row["width" if row["sweep"] == "layers" else "m"] for row in answer["rows"]} == {64}
    assert any(line.startswith("| square 64 ") for line in lines)
    assert any("; peak: " in line for line in lines)


def test_without_matplotlib_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert gemm(tmp_path, 64, Console())["rows"]
    assert "not drawn: pictures need matplotlib, which is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["gemm", "--largest", "63"], ["attention", "--longest", "63"]])
def test_sizes_begin_at_64(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words, "--device", "cpu", "--out", str(tmp_path)]) == ExitCode.CONFIG
    message = "63 is less than the first size — --largest or --longest — give 64 or more"
    assert capsys.readouterr().err == f"error: {message}\n"


# attention


def measure_attention(longest: int, dtype: str = "fp32", seqs: int = 1) -> list[dict[str, Any]]:
    device = open_device(MachineConfig(device="cpu", precision=dtype))  # type: ignore[arg-type]
    groups = sweep.list_attention(device, dtype, TINY_GPT, seqs, sweep.list_powers(longest))
    return sweep.time_cases(
        groups, device, "flops_per_second", 1, QUIET, (RuntimeError, ImportError)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_implementation_at_every_length(dtype: str) -> None:
    rows = measure_attention(256, dtype, seqs=2)
    assert [(row["seq_len"], row["form"]) for row in rows] == [
        (T, form) for T in (64, 128, 256) for form in FORMS
    ]
    for row in rows:
        assert (row["dtype"], row["skipped"]) == (dtype, None)
        assert row["extra_memory_bytes"] is None  # a CPU does not count what it allocates
        rate, seconds, T = row["flops_per_second"], row["seconds"], row["seq_len"]
        # 2 products forward and 5 backward of 2 sequences, 2 heads, T x T x 16, 2 FLOPs each, half of it
        assert rate["median"] == pytest.approx(7 * 2 * 2 * 2 * T * T * 16 / 2 / seconds["median"])
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]


def test_what_would_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sweep, "find_allowed_bytes", lambda device: 4 * 4 * 2 * 128**2
    )  # explicit attention's
    rows = measure_attention(256)
    skipped = {(row["seq_len"], row["form"]): row["skipped"] for row in rows if row["skipped"]}
    assert skipped == {
        (256, "explicit"): "256 tokens would hold about 2.097 MB, more than the 524.3 kB allowed"
    }
    empty = next(row for row in rows if row["skipped"])
    assert [empty[key] for key in ("seconds", "flops_per_second", "peak_memory_bytes")] == [
        None
    ] * 3
    rest = [row for row in rows if row["seq_len"] == 256 and not row["skipped"]]
    assert [row["form"] for row in rest] == [
        "flash",
        "blocked",
        *(["native"] if find_library() else []),
    ]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("too much"), "out of memory at 128 tokens"),
        (
            RuntimeError("No available kernel. Aborting execution.\nmore"),
            "No available kernel. Aborting execution at ",
        ),
    ],
)
def test_an_implementation_that_fails_is_not_tried_again(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        tried.append(q.shape[-2])
        if q.shape[-2] >= 128:
            raise error
        return flash_attention(q, k, v, **options)

    monkeypatch.setitem(ATTENTION, "failing", fail)
    rows = measure_attention(256)
    first, *others = [row["skipped"] for row in rows if row["form"] == "failing"]
    assert first is None
    assert all(skipped.startswith(reason) for skipped in others)
    assert (tried.count(128), 256 in tried) == (1, False)


def test_the_attention_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, _ = run_command(capsys, "attention", "--longest", 100, "--repeats", 1, tmp_path)
    assert (answer["n_head"], answer["d_head"], answer["seqs"]) == (12, 64, 1)
    assert {row["seq_len"] for row in answer["rows"]} == {64}


# batch and size: training steps


def batches(*seqs: int) -> list[Size]:
    return [
        Size(name=f"micro-batch {n}", sweep="batch", model_config=TINY_GPT, seqs=n) for n in seqs
    ]


def measure(sizes: list[Size], repeats: int = 1) -> list[dict[str, Any]]:
    return measure_steps([sizes], PEAKED, repeats, QUIET)


SIZES = [
    Size(name="a", sweep="models", model_config=TINY_GPT, seqs=2),
    Size(name="b", sweep="contexts", model_config=replace(TINY_GPT, seq_len=8), seqs=4),
    Size(name="c", sweep="models", model_config=replace(TINY_GPT, n_layer=4), seqs=2),
]


def test_rows_of_training_steps() -> None:
    rows = measure(SIZES, repeats=2)
    for size, row in zip(SIZES, rows, strict=True):
        config = size.model_config
        assert (row["name"], row["sweep"], row["batch_tokens"], row["skipped"]) == (
            size.name,
            size.sweep,
            32,
            None,
        )
        assert (row["micro_batch"], row["seq_len"]) == (size.seqs, config.seq_len)
        assert row["parameters"] == count_parameters(config)
        rate = row["tokens_per_second"]
        assert rate["repeats"] == 2
        assert row["mfu"] == rate["median"] * flops_per_token(config, causal=False) / 1e15
        assert row["mfu_causal"] == rate["median"] * flops_per_token(config, causal=True) / 1e15
        assert row["seconds_per_token"] == pytest.approx(1 / rate["median"])
        assert row["peak_memory_bytes"] > 1e6
    assert describe_mfu(1.0, TINY_GPT, CPU) == {"mfu": None, "mfu_causal": None}
    assert (
        describe_mfu(1.0, TINY_GPT, PEAKED, peaks=2)["mfu"]
        == flops_per_token(TINY_GPT, causal=False) / 2e15
    )


def test_a_batch_is_one_micro_batch_of_a_real_step() -> None:
    workload = build_workload(TINY_GPT, MACHINE, batch_seqs=1, micro_batch=1).resize(4)
    assert workload.step_config.micro_batch == 4
    assert workload.step() == build_workload(TINY_GPT, MACHINE, batch_seqs=4, micro_batch=4).step()


def test_a_llama_is_measured_without_the_padding_of_its_two_embeddings() -> None:
    model_config = replace(TINY_LLAMA, tie_embeddings=False, vocab_multiple=1)
    workload = build_workload(model_config, MACHINE, batch_seqs=2, micro_batch=2)
    model = workload.state.model
    assert len(model.tokens.weight) == len(model.lm_head_weight) == 97
    assert workload.step().loss == pytest.approx(math.log(97), abs=0.1)


def test_steps_that_would_swap_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = estimate_step_bytes(TINY_GPT, 2 * TINY_GPT.seq_len)
    monkeypatch.setattr(sweep, "find_allowed_bytes", lambda device: allowed)
    rows = measure(batches(1, 2, 4))
    assert [bool(row["skipped"]) for row in rows] == [False, False, True]
    assert rows[2]["skipped"].startswith("micro-batch 4 would hold about ")
    assert (rows[2]["tokens_per_second"], rows[2]["mfu"]) == (None, None)
    assert rows[2]["parameters"] == count_parameters(TINY_GPT)


def test_after_out_of_memory_the_sweep_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that got half way through its backward leaves no gradients, and the other sweep goes on."""
    workloads = []

    def build(*args: Any, **options: Any) -> Any:
        workload = build_workload(*args, **options)
        forward = workload.state.forward

        def run_out(ids: Tensor) -> Tensor:
            if ids.numel() < 64:
                return forward(ids)
            for parameter in workload.state.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            raise torch.OutOfMemoryError("too much")

        workload.state.forward = run_out
        workloads.append(workload)
        return workload

    monkeypatch.setattr(sweep, "build_workload", build)
    rows = measure([*batches(1, 2, 4, 8), SIZES[0]])
    reason = "out of memory at micro-batch 4"
    assert [row["skipped"] for row in rows] == [None, None, reason, reason, None]
    assert all(p.grad is None for workload in workloads for p in workload.state.model.parameters())


def test_the_batch_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", TINY_GPT)
    cache_peak(open_device(MachineConfig(device="cpu")), 1e15)
    words = ("--preset", "tiny", "--largest", 2, "--repeats", 2, "--seq-len", 8)
    answer, lines = run_command(capsys, "batch", *words, tmp_path)
    assert [(row["micro_batch"], row["batch_tokens"]) for row in answer["rows"]] == [
        (1, 8),
        (2, 16),
    ]
    assert (answer["seq_len"], answer["peak_flops"], answer["ended"]) == (8, 1e15, "--largest 2")
    assert any(line.endswith("; ended at --largest 2") for line in lines)
    monkeypatch.setattr(sweep, "find_allowed_bytes", lambda device: 800.0)
    assert (
        main(["bench", "batch", *map(str, words), "--device", "cpu", "--out", str(tmp_path)])
        == ExitCode.CONFIG
    )
    assert "one sequence does not fit: micro-batch 1 would hold about" in capsys.readouterr().err


def test_the_size_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_peak(open_device(MachineConfig(device="cpu")), 1e15)
    sizes = list_sizes("cpu", 16)
    monkeypatch.setattr(
        sweep, "list_sizes", lambda *given: [size for size in sizes if size.name == "128x4"]
    )
    words = ("--batch-tokens", 16, "--repeats", 1)
    answer, lines = run_command(capsys, "size", *words, tmp_path)
    assert [(row["name"], row["seq_len"], row["batch_tokens"]) for row in answer["rows"]] == [
        ("128x4", 16, 16)
    ]
    assert (
        answer["rows"][0]["parameters"]
        == 50257 * 128 + 16 * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128
    )
    assert any(line.startswith("| step ") for line in lines)


def test_sizes_of_a_cpu_end_with_gpt2() -> None:
    sizes = list_sizes("cpu")
    models = [size for size in sizes if size.sweep == "models"]
    assert [size.name for size in models] == ["128x4", "256x6", "384x6", "512x8", "gpt2-124m"]
    assert {
        (size.tokens, size.model_config.seq_len, size.model_config.d_head) for size in models
    } == {(1024, 256, 64)}
    assert models[-1].model_config == replace(PRESETS["gpt2-124m"], seq_len=256)
    contexts = [(size.name, size.seqs) for size in sizes if size.sweep == "contexts"]
    assert contexts == [("128x4@256", 8), ("128x4@512", 4), ("128x4@1024", 2), ("128x4@2048", 1)]
    held = [estimate_step_bytes(size.model_config, size.tokens) for size in sizes]
    assert held == sorted(held)


def test_sizes_of_a_gpu_are_the_presets() -> None:
    sizes = list_sizes("cuda")
    assert [size.name for size in sizes if size.sweep == "models"] == [
        n for n in PRESETS if n.startswith("gpt2-")
    ]
    assert {size.tokens for size in sizes} == {8192}
    assert {size.model_config.n_layer for size in sizes if size.sweep == "contexts"} == {12}


def test_steps_are_whole_sequences() -> None:
    sizes = list_sizes("cpu", 1000)
    assert {size.tokens for size in sizes if size.sweep == "models"} == {768}
    assert {size.tokens for size in sizes if size.sweep == "contexts"} == {2048}
    assert (list_sizes("cpu", 10)[0].tokens, list_sizes("cpu", 10)[0].model_config.seq_len) == (
        10,
        10,
    )
    assert {size.tokens for size in list_sizes("cpu", 5000) if size.sweep == "contexts"} == {4096}


def test_an_estimate_holds_state_activations_and_attention() -> None:
    model_config = replace(TINY_GPT, vocab_size=128)
    state, tokens = (
        4 * 4 * count_padded_parameters(model_config),
        4 * model_config.seq_len,
    )  # with gradient and moments
    work = count_activation_bytes(
        model_config,
        tokens,
        precision="fp32",
        checkpointing="none",
        loss_chunk=LOSS_CHUNK["cpu"],
        sharded=False,
    )
    attention = 4 * 2 * tokens * 2 * model_config.seq_len / 2
    assert estimate_step_bytes(model_config, tokens) == state + work.blocks + work.loss + attention
