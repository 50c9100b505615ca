"""A training step on CUDA: no waits of the host, gradients that arrive during the backward."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import MachineConfig
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm
from megatoken.study.bench.workload import ONE_PROCESS, Workload, build_workload, draw_batch
from megatoken.train.step import train_step_async
from tests.nullgpu import counters
from tests.nullgpu.models import shrink

LAYERS = 4


def build(
    config: ModelConfig, mode: str, comm: Comm = ONE_PROCESS,
    *, batch_seqs: int, micro_batch: int, **settings: Any,
) -> Workload:  # fmt: skip
    machine = MachineConfig(device="cuda", attention="flash", fused="on", master_weights="on")
    machine = replace(machine, compile=mode, **settings)
    sizes = {"batch_seqs": batch_seqs, "micro_batch": micro_batch}
    workload = build_workload(config, machine, comm=comm, **sizes)
    assert workload.tuning.note == ""
    return workload


def take_step(workload: Workload) -> None:
    state = workload.state
    seqs = workload.step_config.batch_tokens // workload.state.model.config.seq_len
    batch = draw_batch(workload.state.model.config, seqs, state.step, workload.device)
    train_step_async(state, workload.step_config, workload.device, batch)


@pytest.mark.parametrize("mode", ["off", "blocks", "on"])
@pytest.mark.parametrize("preset", ["gpt2-124m", "modern-124m"])
def test_the_host_never_waits(preset: str, mode: str):
    workload = build(shrink(preset, LAYERS), mode, batch_seqs=8, micro_batch=2)
    for _ in range(2):
        take_step(workload)
    ids = torch.zeros(8, workload.state.model.config.seq_len, dtype=torch.int64, device="cuda")
    arguments = workload.state, workload.step_config, workload.device, Batch(ids, ids)
    counts = counters.count_step(lambda: train_step_async(*arguments))
    assert (counts.syncs, counts.allocations) == (0, 0)
    assert counts.find("[copy, host waits", "[copy: D2H", "[copy: H2D pageable") == 0
    assert counts.find("triton _cross_entropy") == 4
    assert counts.find("[cudnn plan]", "cublasSgemm") == 0


def test_cublaslt_computes_gelu_in_matmuls():
    counts = {}
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    for backend in ("torch", "cublaslt"):
        torch.compiler.reset()
        config = shrink("gpt2-124m", LAYERS)
        workload = build(config, "blocks", batch_seqs=2, micro_batch=2, gemm_backend=backend)
        take_step(workload)
        counters.reset()
        take_step(workload)
        counts[backend] = counters.read()
    torchs, ours = counts["torch"], counts["cublaslt"]
    assert not breaks
    # `up` has an epilogue with either backend; ours has another in the backward.
    assert ours.find("[cublasLtMatmul]") == torchs.find("[cublasLtMatmul]") + LAYERS
    assert ours.find("[cublas") == torchs.find("[cublas")
    pointwise = "triton_poi_fused_gelu"
    assert (torchs.find(pointwise), ours.find(pointwise)) == (2 * LAYERS, 0)
    assert torchs.total - ours.total == 2 * LAYERS


@pytest.mark.parametrize("mode", ["off", "blocks"])
def test_gradients_arrive_during_the_backward(mode: str, monkeypatch: pytest.MonkeyPatch):
    workload = build(shrink("gpt2-124m", LAYERS), mode, batch_seqs=2, micro_batch=2)
    take_step(workload)
    arrivals = []

    def note(_):
        arrivals.append(counters.read().total)

    for parameter in workload.state.sharded.trained.values():
        parameter.register_post_accumulate_grad_hook(note)
    backward = Tensor.backward

    def count_backward(tensor):
        counters.reset()
        backward(tensor)

    monkeypatch.setattr(Tensor, "backward", count_backward)
    take_step(workload)
    shares = [count / arrivals[-1] for count in arrivals]
    assert shares == sorted(shares)
    for layer in range(1, LAYERS):
        share = layer / LAYERS
        nearest = min(shares, key=lambda value: abs(value - share))
        assert abs(nearest - share) < 0.15
