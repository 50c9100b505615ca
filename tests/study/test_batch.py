"""batch: micro-batches double until memory runs out, and rows hold consistent numbers."""

from dataclasses import replace

import pytest
import torch

from benchmarks import batch
from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console
from megatoken.study.bench.workload import Workload, build_workload
from tests.study.test_parts import TORCH
from tests.tiny_model import CPU, TINY_GPT

# Kernels are fixed, because each size is measured by itself and may choose others.
MACHINE = MachineConfig(device="cpu", precision="fp32", **TORCH)
QUIET = Console(quiet=True)


def build(micro_batch: int = 1) -> Workload:
    return build_workload(TINY_GPT, MACHINE, batch_seqs=micro_batch, micro_batch=micro_batch)


def test_resized_workload_takes_the_same_step():
    assert batch.resize(build(1), 4).step() == build(4).step()


@pytest.mark.parametrize("runs_out", [False, True])
def test_sizes_that_do_not_fit_end_the_benchmark(runs_out: bool, monkeypatch: pytest.MonkeyPatch):
    """The estimate ends it, so that nothing swaps, or an error, which leaves no gradients."""
    workload = build()
    forward, parameters = workload.state.compute.forward, [*workload.state.model.parameters()]

    def run_out(ids):
        if ids.numel() < 4 * TINY_GPT.seq_len:
            return forward(ids)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        raise torch.OutOfMemoryError("too much")

    if runs_out:
        workload.state.compute = replace(workload.state.compute, forward=run_out)
    else:
        allowed = batch.estimate_step_bytes(TINY_GPT, 2 * TINY_GPT.seq_len)
        monkeypatch.setattr(batch, "find_allowed_bytes", lambda device: allowed)
    rows, ended = batch.measure(workload, CPU, 8, 2, QUIET)
    assert [row["micro_batch"] for row in rows] == [1, 2]
    assert "micro-batch 4" in ended
    assert not runs_out or {parameter.grad for parameter in parameters} == {None}
