"""Native attention equals the formula in fp64, for every instruction set of this processor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatoken.model.kernels.attention import explicit_attention
from megatoken.model.native import attention as native
from megatoken.model.native.attention import native_attention
from tests.tiny_model import draw, relative_error

# B, T, H, K, D: blocks that are full and that are not, one token, groups of heads, widths of every kind.
SHAPES = """\
1 1 1 1 16
2 37 3 3 64
1 129 4 2 80
1 257 2 1 128
2 300 2 2 16
1 100 6 2 64
1 191 1 1 34
1 65 2 2 256
"""
pytestmark = pytest.mark.usefixtures("library")
BF16 = 2.0**-8  # the distance of neighbours around 1, halved
TYPICAL = {torch.float32: 1e-6, torch.bfloat16: BF16}
# In bf16, results, weights and gradients are each rounded.
LARGEST = {torch.float32: 3e-6, torch.bfloat16: 4 * BF16}


def draw_heads(shape: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[int]]:
    """Draw queries, keys and values packed as by a projection, (B, T, H + 2K, D), the gradient
    of an output, and return the numbers of heads."""
    B, T, H, K, D = map(int, shape.split())
    dy = draw(B, T, H, D, dtype=dtype, seed=1).transpose(1, 2)
    return draw(B, T, H + 2 * K, D, dtype=dtype), dy, [H, K, K]


def attend(fn: Callable[..., Tensor], packed: Tensor, heads: list[int]) -> Tensor:
    q, k, v = packed.transpose(1, 2).split_with_sizes(heads, dim=1)
    return fn(q, k, v, mask=None, causal=True, dropout=None)


def compute(
    fn: Callable[..., Tensor], packed: Tensor, dy: Tensor, heads: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the output and the packed gradient."""
    packed = packed.detach().requires_grad_()
    y = attend(fn, packed, heads)
    return y.detach(), *torch.autograd.grad(y, packed, dy)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES.splitlines())
def test_values_and_gradients_are_the_formulas(shape: str, dtype: torch.dtype):
    packed, dy, heads = draw_heads(shape, dtype)
    if heads[0] == 2:  # any strides: the head width is not contiguous
        packed = packed.transpose(1, 3).contiguous().transpose(1, 3)
        dy = dy[..., :1].expand(dy.shape)
    results = compute(native_attention, packed, dy, heads)
    formulas = compute(explicit_attention, packed.double(), dy.double(), heads)
    assert results[0].transpose(1, 2).is_contiguous()
    for found, formula in zip(results, formulas, strict=True):
        assert found.dtype == dtype
        assert relative_error(found, formula) < TYPICAL[dtype]
        assert (found - formula).abs().max() < LARGEST[dtype] * formula.abs().max()


def test_a_query_sees_its_own_key_and_earlier_ones(dtype: torch.dtype):
    packed, _, heads = draw_heads("1 200 2 2 32", dtype)
    y = attend(native_attention, packed, heads)
    # The first query gives its own key a weight of 1.
    torch.testing.assert_close(y[0, :, 0].float(), packed[0, 0, 4:].float(), rtol=1e-6, atol=0)
    for n in (1, 31, 64, 150):
        changed = packed.clone()
        changed[:, n:] = 7
        assert torch.equal(attend(native_attention, changed, heads)[:, :, :n], y[:, :, :n])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_is_not_finite_reaches_outputs_and_gradients(value: float, part: int):
    packed, dy, heads = draw_heads("1 200 1 1 32", torch.bfloat16)
    packed[0, 70, part, 3] = value
    y, grad = compute(native_attention, packed, dy.abs(), heads)
    assert not y[0, 0, 70].isfinite().all()
    assert not grad[0, 70].isfinite().all()


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 333), (5, 40)])
def test_queries_that_see_all_keys(T: int, S: int, dtype: torch.dtype):
    q = draw(2, 4, T, 80, dtype=dtype)
    k, v = draw(2, 2, 2, 400, 80, dtype=dtype, seed=1)[:, :, :, :S]  # of a longer cache
    y = native.attention(q, k, v, causal=False)
    exact = q.double(), k.double(), v.double()
    formula = explicit_attention(*exact, mask=None, causal=False, dropout=None)
    assert (y - formula).abs().max() < LARGEST[dtype] * formula.abs().max()
