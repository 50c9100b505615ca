"""Compare an operation with its twin in PyTorch, and with itself on other numbers of threads."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatoken.system.threads import set_thread_count, thread_count


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
    given = [None if x is None else x.detach().requires_grad_() for x in inputs]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    y, expected = call(*given), twin(*exact)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    y.backward(dy)
    expected.backward(dy.double())
    pairs = [(y.detach(), expected.detach())]
    pairs += [
        (x.grad, e.grad)
        for x, e in zip(given, exact, strict=True)
        if x is not None and e is not None
    ]
    for got, wanted in pairs:
        assert got is not None
        assert wanted is not None
        assert got.dtype == y.dtype
        error, size = (got.double() - wanted).abs(), wanted.square().mean().sqrt()
        relative = error / (wanted.abs() + size + 1e-3)
        assert relative.max() < largest[y.dtype], (tuple(got.shape), float(relative.max()))
        if typical is not None:
            assert error.square().mean().sqrt() < typical[y.dtype] * size


def assert_same_on_threads(call: Callable[[], Sequence[Tensor]]) -> None:
    """Compare the results of a call on one, two and three threads bit for bit."""
    threads = thread_count()
    results = []
    try:
        for count in (1, 2, 3):
            set_thread_count(count)
            results.append(call())
    finally:
        set_thread_count(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
