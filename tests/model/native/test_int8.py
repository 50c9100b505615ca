"""Matmuls with 8-bit weights equal those with the rounded weights, for every instruction set."""

import pytest
import torch
import torch.nn.functional as F

from megatoken.model.native import int8
from tests.tiny_model import draw

pytestmark = pytest.mark.usefixtures("library")
# Rows, width, outputs.
SIZES = """\
1 1 1
1 768 70
2 33 5
3 64 33
4 97 2
7 31 16
1 5000 3
20 48 9
"""


def test_products_are_those_of_the_rounded_weights(dtype: torch.dtype):
    for sizes in SIZES.splitlines():
        rows, width, outputs = map(int, sizes.split())
        x, bias = draw(rows, width, dtype=dtype), draw(outputs, seed=2, dtype=dtype)
        weight = int8.round_to_int8(draw(outputs, width, seed=1))
        got = int8.linear(x, weight, bias)
        rounded = weight.to(dtype if rows > int8.MOST_ROWS else torch.float64).double()
        exact = F.linear(x.double(), rounded, bias.double())
        assert got.dtype == dtype
        # x is rounded to 2^-13 of its largest value: an error of each product, of either sign.
        bound = x.double().abs().amax(1)[:, None] * weight.to(torch.float64).norm(dim=1) * 2.0**-12
        rounding = (2.0**-8 if dtype == torch.bfloat16 else 1e-6) * (exact.abs() + 1)
        assert ((got.double() - exact).abs() <= bound + rounding).all()


def test_largest_values_do_not_overflow():
    for width in (768, 4096, 9000):
        weight = int8.round_to_int8(torch.full((2, width), 0.5))
        got = int8.linear(torch.full((1, width), -3.0), weight, None)
        torch.testing.assert_close(got, torch.full((1, 2), -1.5 * width), rtol=1e-3, atol=0)


def test_what_is_not_finite_or_zero():
    weight = int8.round_to_int8(torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    assert int8.linear(torch.zeros(1, 2), weight, torch.ones(2)).tolist() == [[1.0, 1.0]]
    for value in (torch.nan, torch.inf):
        assert int8.linear(torch.tensor([[1.0, value]]), weight, None)[0, 0].isnan()
    rows = int8.linear(torch.tensor([[1.0, torch.nan], [1.0, 1.0]]), weight, None)
    torch.testing.assert_close(rows[1], torch.tensor([3.0, 0.0]), rtol=1e-2, atol=1e-6)


def test_no_value_moves_by_more_than_half_a_step():
    weight = draw(50, 70) * torch.logspace(-3, 3, 50)[:, None]
    error = (int8.round_to_int8(weight).to(torch.float32) - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 254 * 1.0001).all()
