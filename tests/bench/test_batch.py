"""bench batch: which sizes are tried, where it ends, what a row says."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatoken.bench.batch import describe_speed, measure, resize, try_sizes
from megatoken.bench.memory import estimate_step_bytes
from megatoken.bench.workload import Workload, build_workload
from megatoken.cli import main
from megatoken.config import Machine
from megatoken.console import Console
from megatoken.device import open_device, remember_peak
from megatoken.errors import Exit, Fault
from megatoken.model.count import flops_per_token
from megatoken.presets import PRESETS
from megatoken.timing import Timing
from tests.tiny import CPU, LLAMA, SHAPE

QUIET = Console(to_stderr=True)
PEAKED = replace(CPU, peak_flops=1e12, peak_source="data sheet")


@pytest.fixture
def workload() -> Workload:
    return build_workload(SHAPE, Machine(device="cpu", precision="fp32"), batch_seqs=1, micro_batch=1)


def test_sizes_double_up_to_the_largest(workload: Workload) -> None:
    peaks, ended = try_sizes(workload, CPU, 5, math.inf, QUIET)
    assert list(peaks) == [1, 2, 4]
    assert ended == "--largest 5"
    assert sorted(peaks.values()) == list(peaks.values())
    assert workload.state.step == 3  # each of them really trained


def test_a_size_is_one_micro_batch_of_a_real_step(workload: Workload) -> None:
    larger = resize(workload, 4)
    inputs, targets = larger.batch(0)
    assert inputs.shape == targets.shape == (4, SHAPE.seq_len)
    assert larger.plan.micro_batch == 4
    expected = build_workload(SHAPE, Machine(device="cpu", precision="fp32"), batch_seqs=4, micro_batch=4).step()
    assert larger.step() == expected


def test_a_llama_is_measured_without_the_padding_of_its_two_embeddings() -> None:
    shape = replace(LLAMA, tied=False, vocab_multiple=1)
    work = build_workload(shape, Machine(device="cpu", precision="fp32"), batch_seqs=2, micro_batch=2)
    model = work.state.model
    assert len(model.tokens.weight) == len(model.unembedding) == 97
    assert work.step().loss == pytest.approx(math.log(97), abs=0.1)


def test_ends_before_the_system_would_swap(workload: Workload) -> None:
    allowed = estimate_step_bytes(SHAPE, 2 * SHAPE.seq_len, chunk=workload.plan.loss_chunk)
    peaks, ended = try_sizes(workload, CPU, None, allowed, QUIET)
    assert list(peaks) == [1, 2]
    assert ended.startswith("micro-batch 4 would hold about ")
    assert "more than 80% of the " in ended
    with pytest.raises(Fault, match="one sequence does not fit: micro-batch 1 would hold about") as caught:
        measure(workload, CPU, 4, 1000.0, 1, QUIET)
    assert caught.value.code == Exit.CONFIG


def test_the_end_of_memory_is_named_and_leaves_nothing(workload: Workload) -> None:
    forward = workload.state.forward

    def run_out(ids: Tensor) -> Tensor:
        if len(ids) < 4:
            return forward(ids)
        for parameter in workload.state.model.parameters():  # as a backward that got half way
            parameter.grad = torch.zeros_like(parameter)
        raise torch.OutOfMemoryError("too much")

    workload.state.forward = run_out
    rows, ended = measure(workload, PEAKED, None, math.inf, 1, QUIET)
    assert ended == "micro-batch 4 ran out of memory"
    assert [row["micro_batch"] for row in rows] == [1, 2]
    assert all(p.grad is None for p in workload.state.model.parameters())


def test_mfu_has_two_readings() -> None:
    said = describe_speed(Timing((0.5, 1.0, 2.0)), SHAPE, PEAKED, 1000)
    assert said["tokens_per_second"] == {"median": 1000, "low": 500, "high": 2000, "repeats": 3}
    assert said["mfu"] == 1000 * flops_per_token(SHAPE, causal=False) / 1e12
    assert said["mfu_causal"] == 1000 * flops_per_token(SHAPE, causal=True) / 1e12
    assert describe_speed(Timing((1.0,)), SHAPE, CPU, 1)["mfu"] is None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MEGATOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PRESETS, "tiny", SHAPE)
    remember_peak(open_device(Machine(device="cpu")), 1e12)
    words = ["bench", "batch", "--device", "cpu", "--preset", "tiny", "--largest", "2", "--repeats", "2"]
    assert main([*words, "--seq-len", "8", "--out", str(tmp_path)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    answer = json.loads(last)
    assert [(row["micro_batch"], row["batch_tokens"]) for row in answer["rows"]] == [(1, 8), (2, 16)]
    assert (answer["seq_len"], answer["peak_flops"], answer["ended"]) == (8, 1e12, "--largest 2")
    assert all(row["peak_memory_bytes"] > 1e6 for row in answer["rows"])
    assert "end: --largest 2" in lines
    assert any("tried in ascending order" in line for line in lines)
    assert json.loads((tmp_path / "batch.json").read_text())["answer"] == answer
    assert (tmp_path / "batch.png").read_bytes()[1:4] == b"PNG"
