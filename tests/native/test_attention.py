"""The compiled attention beside the formula in fp64, for every instruction set that this processor has."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatoken.model.kernels.attention import explicit_attention, native_attention
from megatoken.native import attention as native
from tests.native.twins import assert_same_on_threads

# B, H, K, T, D: blocks that are full and that are not, one token, groups of heads, widths of every kind.
SHAPES = [
    (1, 1, 1, 1, 16),
    (2, 3, 3, 37, 64),
    (1, 4, 2, 129, 80),
    (1, 2, 1, 257, 128),
    (2, 2, 2, 300, 16),
    (1, 6, 2, 100, 64),
    (1, 1, 1, 191, 34),
    (1, 2, 2, 65, 256),
]
pytestmark = pytest.mark.usefixtures("library")
BF16 = 2.0**-8  # the distance of neighbours around 1, halved


def packed_heads(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Queries, keys and values as a projection gives them: (B, T, H + 2K, D)."""
    B, H, K, T, D = shape
    return torch.randn(B, T, H + 2 * K, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def split(packed: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    _, H, K, _, _ = shape
    return packed.transpose(1, 2).split_with_sizes([H, K, K], dim=1)


def compute(
    fn: Callable[..., Tensor], packed: Tensor, shape: tuple[int, ...], dy: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and the packed gradient."""
    packed = packed.detach().requires_grad_()
    y = fn(*split(packed, shape), mask=None, causal=True, dropout=None)
    y.backward(dy)
    assert packed.grad is not None
    return y.detach(), packed.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_the_formulas(shape: tuple[int, ...], dtype: torch.dtype):
    B, H, _, T, D = shape
    packed, dy = (
        packed_heads(shape, dtype),
        packed_heads((B, H, 0, T, D), dtype, seed=1).transpose(1, 2),
    )
    y, grad = compute(native_attention, packed, shape, dy)
    y_formula, grad_formula = compute(explicit_attention, packed.double(), shape, dy.double())
    assert y.dtype == grad.dtype == dtype
    assert y.transpose(1, 2).is_contiguous()
    for computed, formula in ((y, y_formula), (grad, grad_formula)):
        error, size = (computed.double() - formula), formula.square().mean().sqrt()
        # bf16: results, weights and their gradients are rounded, each alone.
        assert error.square().mean().sqrt() < (1e-6 if dtype == torch.float32 else BF16) * size
        assert (
            error.abs().max() < (3e-6 if dtype == torch.float32 else 4 * BF16) * formula.abs().max()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_sees_its_own_key_and_earlier_ones(dtype: torch.dtype):
    shape = (1, 2, 2, 200, 32)
    packed = packed_heads(shape, dtype)
    q, k, v = split(packed, shape)
    y = native_attention(q, k, v, mask=None, causal=True, dropout=None)
    torch.testing.assert_close(
        y[:, :, 0].float(), v[:, :, 0].float(), rtol=1e-6, atol=0
    )  # a weight of 1
    for n in (1, 31, 64, 150):
        changed = packed.clone()
        changed[:, n:] = 7
        assert torch.equal(
            native_attention(*split(changed, shape), mask=None, causal=True, dropout=None)[
                :, :, :n
            ],
            y[:, :, :n],
        )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_is_not_finite_reaches_outputs_and_gradients(value: float, part: int):
    shape = (1, 1, 1, 200, 32)
    packed, dy = (
        packed_heads(shape, torch.bfloat16),
        torch.ones(1, 1, 200, 32, dtype=torch.bfloat16),
    )
    packed[0, 70, part, 3] = value
    y, grad = compute(native_attention, packed, shape, dy)
    assert not y[0, 0, 70].isfinite().all()
    assert not grad[0, 70].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 333), (5, 40)])
def test_queries_that_see_all_keys(T: int, S: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, T, 80, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, 2, 400, 80, generator=generator).to(dtype)[
        :, :, :, :S
    ]  # of a longer cache
    y = native.attention(q, k, v, causal=False)
    formula = explicit_attention(
        q.double(), k.double(), v.double(), mask=None, causal=False, dropout=None
    )
    tolerance = 3e-6 if dtype == torch.float32 else 4 * BF16
    torch.testing.assert_close(
        y.double(), formula, rtol=0, atol=tolerance * float(formula.abs().max())
    )


def test_any_strides():
    shape = (2, 2, 2, 70, 32)
    packed = packed_heads(shape, torch.float32)
    contiguous = compute(native_attention, packed, shape, torch.ones(2, 2, 70, 32))
    transposed = (
        packed.transpose(1, 3).contiguous().transpose(1, 3)
    )  # the head width is not contiguous
    for each in (packed, transposed):
        y, grad = compute(native_attention, each, shape, torch.ones(1).expand(2, 2, 70, 32))
        assert torch.equal(y, contiguous[0])
        assert torch.equal(grad, contiguous[1])


@pytest.mark.parametrize("shape", [(1, 1, 1, 300, 32), (2, 4, 2, 140, 64)])
def test_same_bits_with_any_number_of_threads(shape: tuple[int, ...]):
    B, H, _, T, D = shape
    packed = packed_heads(shape, torch.bfloat16)
    dy = packed_heads((B, H, 0, T, D), torch.bfloat16).transpose(1, 2)
    assert_same_on_threads(lambda: compute(native_attention, packed, shape, dy))
