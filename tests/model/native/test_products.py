"""Native matmuls equal fp64, for every instruction set of this processor; AMX may be emulated."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.model.native import products
from megatoken.model.native.library import Library
from tests.model.native.twins import assert_same
from tests.tiny_model import draw

# Errors of sums that cancel, relative to typical ones.
LARGEST = {torch.float32: 2e-5, torch.bfloat16: 0.04}
TYPICAL = {torch.float32: 2e-6, torch.bfloat16: 0.004}
SIZES = [1, 2, 3, 5, 13, 16, 31, 33, 47, 64, 97, 130]


def draw_part(rows: int, cols: int, dtype: torch.dtype, rng: random.Random) -> Tensor:
    """Draw a matrix that is a slice of a larger one, by rows or by columns."""
    top, left, spare = rng.randrange(3), rng.randrange(3), rng.randrange(9)
    transposed = rng.random() < 0.5
    height, width = (cols, rows) if transposed else (rows, cols)
    whole = draw(top + height, left + width + spare, dtype=dtype, seed=rng.randrange(99999))
    part = whole[top:, left : left + width]
    return part.t() if transposed else part


def draw_factors(
    sizes: tuple[int, int, int], dtype: torch.dtype, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Draw the factors of a product with sizes M, N and K."""
    M, N, K = sizes
    return draw_part(M, K, dtype, rng), draw_part(K, N, dtype, rng)


def assert_product(got: Tensor, a: Tensor, b: Tensor, added: Tensor | float = 0.0) -> None:
    """`got` is a b + added: sums of fp32, rounded once where it is bf16."""
    a, b = a.double(), b.double()
    exact = a @ b + added
    bound = 1e-6 * (a.abs() @ b.abs() + torch.as_tensor(added).abs()) + 1e-30
    if got.dtype == torch.bfloat16:
        bound = bound * 2 + 2.0**-8 * exact.abs()
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.long
def test_products_of_any_size_and_layout(library: Library, dtype: torch.dtype):
    rng = random.Random(0)
    cases = [(*rng.choices(SIZES, k=3),) for _ in range(40)]
    cases += [(70, 50, 6500), (30, 61, 3073)]  # long sums, in chunks
    for M, N, K in cases:
        a, b = draw_factors((M, N, K), dtype, rng)
        bias = draw(N, seed=K, dtype=dtype)
        whole = torch.full((M + 2, N + 2), 7.0, dtype=dtype)
        part = products.matmul(a, b, whole[1:-1, 1:-1])
        assert_product(part, a, b)
        part[:] = 7
        assert (whole == 7).all()  # nothing beyond the result was written
        out, sums = torch.empty(M, N + 3)[:, 1:-2], torch.empty(M)
        assert products.matmul(a, b, out, bias_N=bias, row_sums_M=sums) is out
        assert_product(out, a, b, bias.double())
        torch.testing.assert_close(sums.double(), a.double().sum(1), rtol=1e-5, atol=1e-5 * K**0.5)
        before = out.double()
        products.matmul(a, b, out, accumulate=True)
        assert_product(out, a, b, before)


@pytest.mark.usefixtures("fastest")
def test_long_sums_of_a_large_result_in_strips():
    a, b = (draw(2100, 3100, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    got = products.matmul(a, b.t(), torch.empty(2100, 2100))
    torch.testing.assert_close(got, a.float() @ b.float().t(), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("biased", [True, False])
def test_linear_with_gradients(library: Library, dtype: torch.dtype, biased: bool):
    rng = random.Random(4)
    for N, width, hidden in [(1, 16, 40), (3, 37, 65), (70, 64, 96), (129, 130, 33)]:
        x = draw_part(N, width, dtype, rng).unsqueeze(0)
        weight = draw_part(hidden, width, dtype, rng) / 8
        bias = torch.linspace(-1, 1, hidden).to(dtype) if biased else None
        inputs = [x, weight, bias]
        assert_same(products.linear, F.linear, inputs, largest=LARGEST, typical=TYPICAL)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_its_row_and_column_only(
    library: Library, dtype: torch.dtype, value: float
):
    a, b = torch.ones(50, 40, dtype=dtype), torch.ones(40, 45, dtype=dtype)
    a[17, 9] = b[3, 21] = value
    finite = products.matmul(a, b).isfinite()
    expected = torch.ones(50, 45, dtype=torch.bool)
    expected[17, :] = expected[:, 21] = False
    assert finite.equal(expected)
