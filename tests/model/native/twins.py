"""Compare an operation with its twin in PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.tiny_model import draw, relative_error


def assert_same(
    call: Callable[..., Tensor],
    twin: Callable[..., Tensor],
    inputs: list[Tensor | None],
    *,
    largest: dict[torch.dtype, float],
    typical: dict[torch.dtype, float] | None = None,
) -> None:
    """Values and gradients of `call` are those of `twin` in fp64, within rounding.

    largest: a value's error, relative to its size and the tensor's root mean square; typical: that of the errors.
    """
    dtype = next(x.dtype for x in inputs if x is not None)
    results = []
    for fn, each in ((call, dtype), (twin, torch.float64)):
        given = [None if x is None else x.detach().to(each).requires_grad_() for x in inputs]
        y = fn(*given)
        dy = draw(*y.shape, seed=9, dtype=dtype).to(each)
        gradients = torch.autograd.grad(y, [x for x in given if x is not None], dy)
        results.append([y.detach(), *gradients])
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == dtype
        error, size = (got - wanted).abs(), wanted.square().mean().sqrt()
        relative = error / (wanted.abs() + size + 1e-3)
        assert relative.max() < largest[dtype], (tuple(got.shape), float(relative.max()))
        if typical is not None:
            assert relative_error(got, wanted) < typical[dtype]
