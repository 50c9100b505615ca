"""Windows and documents in training: FlashAttention-2 without masks, waits or recompilations."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatoken.data.dataloader import Batch, separate_documents
from megatoken.model.kernels import attention
from megatoken.study.bench.workload import Workload
from megatoken.train.step import train_step_async
from tests.nullgpu import counters
from tests.nullgpu.models import shrink
from tests.nullgpu.test_step import build

LAYERS = 4
MODEL = replace(shrink("modern-124m", LAYERS), window=256, window_pattern="SL")
SHARES = (0.0, 1 / 1000, 1 / 100, 1 / 10)  # of the tokens that begin a document
MICRO_BATCHES = 4


def take_step(workload: Workload, share: float) -> None:
    """Train on rows in which documents begin at random tokens."""
    shape = 8, workload.state.model.config.seq_len
    is_start = np.random.default_rng(0).random(shape) < share
    ids = torch.from_numpy(is_start.astype(np.int64))
    batch = separate_documents(Batch(ids, ids), document_start=1).pin()
    batch = batch.to(workload.device.torch_device)
    train_step_async(workload.state, workload.step_config, workload.device, batch)


@pytest.mark.parametrize("mode", ["off", "blocks", "on"])
def test_no_step_waits_or_compiles_again(mode: str):
    workload = build(MODEL, mode, batch_seqs=8, micro_batch=8 // MICRO_BATCHES)
    for _ in range(2):
        take_step(workload, 1 / 100)

    def take_steps():
        for share in SHARES:
            take_step(workload, share)

    counts = counters.count_step(take_steps)
    assert counts.syncs == 0
    assert counts.find("[copy, host waits", "[copy: D2H", "[copy: H2D pageable") == 0
    calls = len(SHARES) * MICRO_BATCHES * LAYERS
    assert counts.find("flash_fwd_kernel", "flash_fwd_splitkv_kernel") == calls
    assert counts.find("flash_bwd_dq_dk_dv") == calls
    assert counts.find("fmha_cutlass", "softmax", "Softmax", "[cudnn plan]") == 0


def test_it_needs_less_memory_than_a_mask(monkeypatch: pytest.MonkeyPatch):
    workload = build(MODEL, "off", batch_seqs=8, micro_batch=8)
    take_step(workload, 1 / 100)
    peaks = []
    for has_varlen in (True, False):
        if not has_varlen:
            monkeypatch.setattr(attention, "supports_varlen", lambda _: False)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        take_step(workload, 1 / 100)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    squares = LAYERS * 8 * MODEL.seq_len**2 * torch.bfloat16.itemsize
    assert peaks[1] - peaks[0] > 0.99 * squares
