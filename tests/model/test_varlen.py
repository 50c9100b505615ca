"""Attention within documents and windows by FlashAttention-2 equals the formula with a mask.

The comparisons need an NVIDIA GPU; the bounds of documents are tested everywhere.
"""

import pytest
import torch
from torch import Tensor

from megatoken.base.config.schema import MachineConfig
from megatoken.base.system.device import open_device
from megatoken.model.kernels.attention import (
    attend_documents,
    causal_mask,
    document_mask,
    explicit_attention,
    flash_attention,
    supports_varlen,
)
from megatoken.model.masks import find_bounds, separate_conversations
from tests.nullgpu.counters import is_loaded
from tests.tiny_model import differentiate, draw

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch versions that we do not pin
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or is_loaded(), reason="needs an NVIDIA GPU"
)
CPU = torch.device("cpu")
BEGINS = [[0], [0, 1, 2, 130], [0, 299], [0, 17, 18, 19, 20, 100, 256]]  # of each row's documents
B, T = len(BEGINS), 300


def make_starts(begins: list[list[int]], length: int) -> Tensor:
    starts = torch.zeros(len(begins), length, dtype=torch.int64)
    for row, places in zip(starts, begins, strict=True):
        for place in places:
            row[place:] = place
    return starts


STARTS = make_starts(BEGINS, T)


def test_bounds_end_with_the_number_of_tokens():
    assert find_bounds(make_starts([[0, 2], [0]], 4)).tolist() == [0, 2, 4, 8]
    assert find_bounds(make_starts([[0, 2], [0, 3]], 4)).tolist() == [0, 2, 4, 7, 8, 8, 8, 8]
    assert find_bounds(make_starts([[0]], 1)).tolist() == [0, 1]


def test_bounds_and_starts_give_the_same_mask():
    expected = separate_conversations(STARTS, CPU).attn_mask
    assert torch.equal(document_mask(find_bounds(STARTS), B, T, 0), expected)
    near = causal_mask(T, 16, CPU)
    assert torch.equal(document_mask(find_bounds(STARTS), B, T, 16), expected & near)


def test_documents_use_the_mask_where_flash_attention_is_missing():
    q, k, v = draw(3, B, 2, T, 8)
    bounds = find_bounds(STARTS)
    mask = document_mask(bounds, B, T, 16)
    want = explicit_attention(q, k, v, mask=mask, causal=False, dropout=None)
    for fn in (flash_attention, explicit_attention):
        y = attend_documents(fn, q, k, v, bounds=bounds, dropout=None, window=16)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)
        assert (
            attend_documents(fn, q, k, v, bounds=bounds, dropout=torch.zeros_like).count_nonzero()
            == 0
        )


def draw_heads(n_heads: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Draw (B, H, T, D), with the strides of the model's packed projection."""
    generator = torch.Generator("cuda").manual_seed(seed)
    packed = torch.randn(B, T, n_heads + 1, 64, generator=generator, device="cuda", dtype=dtype)
    return packed[:, :, :n_heads].transpose(1, 2)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("window", [1, 16, 129, T, 2 * T, 0])
@pytest.mark.parametrize("documents", [True, False])
def test_it_equals_the_formula(dtype: torch.dtype, kv_heads: int, window: int, *, documents: bool):
    open_device(MachineConfig(device="cuda"))
    tree_mask = separate_conversations(STARTS, torch.device("cuda"))
    assert torch.equal(tree_mask.positions_BT.cpu(), torch.arange(T) - STARTS)
    mask = causal_mask(T, window, CPU)
    if documents:
        mask = (STARTS[:, :, None] == STARTS[:, None, :])[:, None] & mask
    inputs = [draw_heads(heads, seed, dtype) for seed, heads in enumerate((6, kv_heads, kv_heads))]
    assert supports_varlen(inputs[0])
    dy = draw_heads(6, 3, dtype)

    def explicit(q, k, v):
        return explicit_attention(q, k, v, mask=mask.cuda(), causal=False, dropout=None)

    def varlen(q, k, v):
        options = {"dropout": None, "window": window}
        if not documents:
            return flash_attention(q, k, v, mask=None, causal=True, **options)
        return attend_documents(flash_attention, q, k, v, bounds=tree_mask.attn_mask, **options)

    found = differentiate(varlen, inputs, dy)
    for got, want in zip(found, differentiate(explicit, inputs, dy, torch.float64), strict=True):
        assert float((got - want).norm() / want.norm().clamp(min=1.0)) < 1e-2
