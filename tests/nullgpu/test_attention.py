"""Attention on CUDA never falls back to torch's math kernel, which holds all scores.

Decoding builds no cuDNN plan per token.
"""

import pytest
import torch

from megatoken.base.config.schema import MachineConfig
from megatoken.base.system.device import open_device
from megatoken.inference.batch import BatchDecoder, Request
from megatoken.inference.generate import prepare_decoding
from megatoken.inference.sampling import Sampling
from megatoken.model.gpt import GPT
from megatoken.model.kernels.attention import attend_documents, flash_attention
from tests.nullgpu import counters
from tests.nullgpu.models import shrink

B, T, H, D = 8, 1024, 12, 64
MATH = ("cublas", "softmax", "Softmax")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_heads", [12, 4, 1])
@pytest.mark.parametrize("kind", ["causal", "window", "documents", "decode", "cached prompt"])
def test_a_fused_kernel_computes_it(dtype: torch.dtype, kv_heads: int, kind: str):
    open_device(MachineConfig(device="cuda"))
    n_queries = {"decode": 1, "cached prompt": 16}.get(kind, T)
    trains = n_queries == T
    q = torch.zeros(B, H, n_queries, D, dtype=dtype, device="cuda", requires_grad=trains)
    k = torch.zeros(B, kv_heads, T, D, dtype=dtype, device="cuda", requires_grad=trains)
    mask = None
    bounds = torch.arange(0, B * T + 1, 64, dtype=torch.int32, device="cuda")
    if kind == "cached prompt":
        mask = torch.ones(1, 1, n_queries, T, dtype=torch.bool, device="cuda")
    counters.reset()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    window = 256 if kind == "window" else 0
    if kind == "documents":
        y = attend_documents(flash_attention, q, k, k, bounds=bounds, dropout=None)
    else:
        causal = kind in ("causal", "window")
        y = flash_attention(q, k, k, mask=mask, causal=causal, dropout=None, window=window)
    if trains:
        y.sum().backward()
    counts = counters.read()
    by_flash = dtype == torch.bfloat16 and mask is None
    assert (counts.find("flash_fwd") > 0) == by_flash
    assert (counts.find("fmha_cutlassF") > 0) != by_flash
    assert counts.find(*MATH) == 0
    assert counts.find("[cudnn plan]") == 0
    scores = B * H * T * T * 4
    assert torch.cuda.max_memory_allocated() - before < scores


def test_graphs_decode_and_the_host_waits_once_per_token():
    device = open_device(MachineConfig(device="cuda"))
    model = GPT(shrink("gpt2-124m", 2), seed=None).to("cuda")
    prepare_decoding(model, device)
    with BatchDecoder(model, rows=3, device=device) as decoder:
        for key in range(3):
            decoder.add(key, Request([1] * (16 + key), Sampling(99, key / 2), logprobs=key == 2))
        decoder.step()
        counters.reset()
        before = counters.read().allocated_bytes
        for _ in range(90):
            decoder.step()
        counts = counters.read()
    resized = 3  # at 19, 37 and 75 tokens; the next step is in eager mode
    assert counts.find("[graph capture]") == resized
    assert counts.peak_bytes - before < 100 << 20  # cuBLAS has one workspace for all captures
    assert counts.find("[graph launch]") == 90 - resized
    assert counts.syncs == counts.find("[copy: D2H") == 90
    assert counts.find("[cudnn plan]", "cublasSgemm", "fmha_cutlassF", *MATH[1:]) == 0
