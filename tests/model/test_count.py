"""Counts by arithmetic against published figures, real modules and torch's own FLOP counter."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatoken.model.count import (
    count_matmul_parameters,
    count_parameters,
    expected_initial_loss,
    flops_per_token,
    state_bytes,
)
from megatoken.model.gpt import GPT
from megatoken.model.loss import cross_entropy
from megatoken.presets import PRESETS, Shape
from tests.tiny import LLAMA

TINY = Shape(n_layer=2, n_head=2, d_model=32, d_ff=96, vocab_size=256, seq_len=16)
TINY_LLAMA = replace(LLAMA, n_head=4, n_kv_head=2, vocab_size=256, tied=False)

PUBLISHED = {  # the released weights; GPT-3: table 2.1 of the paper, in its rounding
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1558m": 1_557_611_200,
    "llama-15m": 15_191_712,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}
PAPER = {
    "gpt3-125m": 125e6,
    "gpt3-350m": 356e6,
    "gpt3-760m": 760e6,
    "gpt3-1.3b": 1.3e9,
    "gpt3-2.7b": 2.65e9,
    "gpt3-6.7b": 6.66e9,
    "gpt3-13b": 12.85e9,
    "gpt3-175b": 174.6e9,
    "llama-5m": 5e6,
    "llama-42m": 42e6,
    "llama-110m": 110e6,
}


def test_published_counts() -> None:
    assert {name: count_parameters(PRESETS[name]) for name in PUBLISHED} == PUBLISHED
    for name, expected in PAPER.items():
        assert count_parameters(PRESETS[name]) == pytest.approx(expected, rel=0.015), name
    assert set(PUBLISHED) | set(PAPER) == set(PRESETS)
    assert f"{count_parameters(PRESETS['gpt3-175b']) / 1e9:.1f}" == "174.6"


ODD = Shape(n_layer=3, n_head=3, d_model=15, d_ff=7, vocab_size=131, seq_len=5)
OTHERS = {
    "tiny": TINY,
    "odd": ODD,
    "llama": TINY_LLAMA,
    "no biases": replace(ODD, bias=False),
    "biases of a gate": replace(ODD, mlp="swiglu", norm="rmsnorm", tied=False),
}


@pytest.mark.parametrize("name", [*PRESETS, *OTHERS])
def test_counts_are_those_of_the_module(name: str) -> None:
    shape = OTHERS.get(name) or PRESETS[name]
    with torch.device("meta"):  # sizes without memory, up to 405B
        model = GPT(shape)
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.d_model * (1 if shape.tied else 2)
    assert sum(p.numel() for p in model.parameters()) - padding == count_parameters(shape)
    matrices = sum(m.weight.numel() for m in model.blocks.modules() if isinstance(m, torch.nn.Linear))
    assert matrices + shape.vocab_size * shape.d_model == count_matmul_parameters(shape)
    assert state_bytes(shape) == 3 * sum(4 * p.numel() for p in model.parameters())


@pytest.mark.parametrize("shape", [TINY, TINY_LLAMA], ids=["gpt", "llama"])
def test_flops_are_those_that_torch_counts(shape: Shape) -> None:
    model = GPT(shape)
    ids = torch.zeros(3, shape.seq_len + 1, dtype=torch.long)
    # The plain attention: the counter knows its products, and of the fused one on a CPU nothing.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        total, _ = cross_entropy(model(ids[:, :-1]), model.unembedding, ids[:, 1:], vocab_size=256, chunk=0)
        total.backward()
    assert counter.get_total_flops() == 3 * shape.seq_len * flops_per_token(shape, causal=False)


def test_published_flops_of_124m() -> None:
    shape = PRESETS["gpt2-124m"]
    n = 12 * 12 * 768**2 + 50257 * 768
    assert count_matmul_parameters(shape) == n
    assert flops_per_token(shape, causal=False) == 6 * n + 12 * 12 * 768 * 1024
    assert flops_per_token(shape, causal=True) == 6 * n + 6 * 12 * 768 * 1024


def test_published_flops_of_llama2_7b() -> None:
    """Sharing keys would spare parameters; a query meets every key all the same."""
    shape = PRESETS["llama2-7b"]
    n = 6_738_415_616 - 32000 * 4096 - 65 * 4096  # all but look-ups and norms
    assert count_matmul_parameters(shape) == n
    assert flops_per_token(shape, causal=True) == 6 * n + 6 * 32 * 4096 * 4096
    shared = replace(shape, n_kv_head=8)
    assert flops_per_token(shape, causal=True) - flops_per_token(shared, causal=True) == 6 * 32 * 2 * 4096 * 3072


def test_expected_initial_loss() -> None:
    assert expected_initial_loss(PRESETS["gpt2-124m"]) == pytest.approx(10.825, abs=5e-4)
    assert expected_initial_loss(TINY) == math.log(256)
