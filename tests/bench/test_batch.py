"""batch: micro-batches double until memory runs out, and rows hold consistent numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import batch
from benchmarks.__main__ import build_parser
from megatoken.bench.main import run_bench
from megatoken.bench.workload import Workload, build_workload
from megatoken.config.presets import PRESETS
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.errors import ConfigError
from megatoken.model.flops import count_parameters, describe_mfu, flops_per_token
from tests.tiny_model import CPU, TINY_GPT, TINY_LLAMA

# With fixed kernels: each size is measured by itself, and may be fastest with others.
FIXED = {"attention": "flash", "gemm_backend": "torch", "fused": "off", "adamw": "fused"}
MACHINE = MachineConfig(device="cpu", precision="fp32", **FIXED)
PEAKED = replace(CPU, peak_flops=1e15, peak_source="data sheet")


def build(micro_batch: int = 1) -> Workload:
    return build_workload(TINY_GPT, MACHINE, batch_seqs=micro_batch, micro_batch=micro_batch)


def measure(workload: Workload, largest: int) -> tuple[list[dict[str, Any]], str]:
    return batch.measure(workload, PEAKED, largest, 2, Console(quiet=True))


def test_rows_of_training_steps():
    rows, ended = measure(build(), 5)
    assert [row["micro_batch"] for row in rows] == [1, 2, 4]
    assert "5" in ended
    for row in rows:
        rate = row["tokens_per_second"]
        assert row["batch_tokens"] == row["micro_batch"] * TINY_GPT.seq_len
        assert row["parameters"] == count_parameters(TINY_GPT)
        assert rate["repeats"] == 2
        assert 0 < rate["low"] <= rate["median"] <= rate["high"] <= row["best"]
        share = rate["median"] / 1e15
        assert row["mfu"] == pytest.approx(share * flops_per_token(TINY_GPT, causal=False))
        assert row["mfu_causal"] == pytest.approx(share * flops_per_token(TINY_GPT, causal=True))
        assert row["seconds_per_token"] == pytest.approx(1 / rate["median"])
        assert row["peak_memory_bytes"] > 1e6


def test_mfu_needs_a_peak_and_counts_devices():
    assert describe_mfu(1.0, TINY_GPT, 0.0) == {"mfu": None, "mfu_causal": None}
    mfu = describe_mfu(1.0, TINY_GPT, 2e15)["mfu"]
    assert mfu == pytest.approx(flops_per_token(TINY_GPT, causal=False) / 2e15)


def test_resized_workload_takes_the_same_step():
    workload = batch.resize(build(1), 4)
    assert workload.step_config.micro_batch == 4
    assert workload.step() == build(4).step()


def test_initial_loss_is_uniform_without_vocabulary_padding():
    config = replace(TINY_LLAMA, tie_embeddings=False, vocab_multiple=1)
    workload = build_workload(config, MACHINE, batch_seqs=2, micro_batch=2)
    model = workload.state.model
    assert len(model.tokens.weight) == len(model.lm_head_weight) == 97
    assert workload.step().loss == pytest.approx(math.log(97), abs=0.1)


def test_sizes_that_would_swap_are_not_run(monkeypatch: pytest.MonkeyPatch):
    allowed = batch.estimate_step_bytes(TINY_GPT, 2 * TINY_GPT.seq_len)
    monkeypatch.setattr(batch, "find_allowed_bytes", lambda device: allowed)
    rows, ended = measure(build(), 8)
    assert [row["micro_batch"] for row in rows] == [1, 2]
    assert "micro-batch 4" in ended


def test_out_of_memory_ends_the_benchmark_without_gradients():
    workload = build()
    forward = workload.state.forward

    def run_out(ids: Tensor) -> Tensor:
        if ids.numel() < 4 * TINY_GPT.seq_len:
            return forward(ids)
        for parameter in workload.state.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        raise torch.OutOfMemoryError("too much")

    workload.state.forward = run_out
    rows, ended = measure(workload, 8)
    assert [row["micro_batch"] for row in rows] == [1, 2]
    assert "micro-batch 4" in ended
    assert all(parameter.grad is None for parameter in workload.state.model.parameters())


def test_command_writes_its_answer_as_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY_GPT)
    words = "batch --preset tiny --largest 2 --repeats 2 --seq-len 8 --device cpu --out"
    options = build_parser().parse_args([*words.split(), str(tmp_path)])
    answer = run_bench(batch.run_batch, options, Console(quiet=True), [])
    assert json.loads((tmp_path / "batch.json").read_text())["answer"] == answer
    assert [row["batch_tokens"] for row in answer["rows"]] == [8, 16]
    assert (answer["preset"], answer["seq_len"]) == ("tiny", 8)
    monkeypatch.setattr(batch, "find_allowed_bytes", lambda device: 800.0)
    with pytest.raises(ConfigError):
        run_bench(batch.run_batch, options, Console(quiet=True), [])
