"""Norms, activations, loss and AdamW of the compiled kernels beside torch's, for every instruction set at hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.model.kernels.block import torch_norm, torch_swiglu
from megatoken.model.kernels.cross_entropy import softmax_cross_entropy
from megatoken.native import ops as native
from megatoken.native.library import DTYPES, Library, Values
from megatoken.optim.adamw import AdamW
from tests.native.twins import assert_same, assert_same_on_threads

EPS = {
    torch.float32: 2e-6,
    torch.bfloat16: 2.0**-8,
}  # of a result near 1: a few roundings; one to bf16
LARGEST = {dtype: 2 * eps for dtype, eps in EPS.items()}
SIZES = [(1, 1), (3, 17), (64, 32), (65, 48), (130, 771)]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("rms", [False, True])
def test_norm(library: Library, rms: bool, dtype: torch.dtype):
    for N, C in SIZES[1:]:
        inputs = [
            3 * draw(N, C, dtype=dtype) + 1,
            draw(C, dtype=dtype, seed=1),
            draw(C, dtype=dtype, seed=2),
        ]
        inputs = [*inputs[:2], None] if rms else inputs  # type: ignore[list-item]
        assert_same(
            lambda x, w, b: native.norm(x, w, b, 1e-5, rms=rms),
            lambda x, w, b: torch_norm(x, w, b, 1e-5, rms=rms),
            inputs,
            largest=LARGEST,
        )


@pytest.mark.parametrize("dtype", EPS)
def test_activations(library: Library, dtype: torch.dtype):
    for N, C in SIZES:
        x, up = 4 * draw(N, C, dtype=dtype), draw(N, C, dtype=dtype, seed=1)
        assert_same(native.gelu, lambda x: F.gelu(x, approximate="tanh"), [x], largest=LARGEST)
        assert_same(native.swiglu, torch_swiglu, [x, up], largest=LARGEST)
    extremes = torch.tensor([-100.0, -30.0, 0.0, 30.0, 100.0, torch.inf])
    assert native.gelu(extremes).tolist() == pytest.approx(
        [0.0, 0.0, 0.0, 30.0, 100.0, torch.inf], abs=1e-15
    )
    assert native.gelu(torch.tensor([torch.nan])).isnan().all()
    exact = F.gelu(x.float())
    assert torch.equal(native.gelu(x.float(), approximate="none"), exact)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_cross_entropy(library: Library, dtype: torch.dtype, softcap: float):
    for N, V, vocab_size in [(1, 64, 50), (7, 128, 97), (33, 1024, 1024)]:
        logits = 5 * draw(N, V, dtype=dtype)
        targets = torch.arange(N) * 13 % vocab_size
        targets[N // 2] = -1
        ours, torchs = logits.clone(), logits.clone()
        loss = native.softmax_cross_entropy(ours, targets, vocab_size, softcap, overwrite=True)
        expected = softmax_cross_entropy(torchs, targets, vocab_size, softcap, overwrite=True)
        counted = targets >= 0
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(ours[counted], torchs[counted], rtol=2 * EPS[dtype], atol=1e-6)
        assert (ours[:, vocab_size:] == 0).all()
    logits[0, 3] = torch.nan
    assert native.softmax_cross_entropy(logits, targets, vocab_size, softcap, overwrite=False)[
        0
    ].isnan()


def test_adamw(library: Library):
    """Ten updates, decayed and not, with a divisor of the gradient: torch's fused weights to a few roundings."""
    sizes, dtype = [(100, 33), (77,)], torch.float32
    ours, torchs = (
        [torch.nn.Parameter(draw(*size, dtype=dtype)) for size in sizes] for _ in range(2)
    )
    optimizers = []
    for params in (ours, torchs):
        groups = [
            {"params": [p], "weight_decay": decay}
            for p, decay in zip(params, (0.1, 0.0), strict=True)
        ]
        optimizers.append(AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state[p] = {
                    "step": torch.zeros(()),
                    "exp_avg": 0 * p.data,
                    "exp_avg_sq": 0 * p.data,
                }
    copies = {p: p.detach().bfloat16() for p in ours}
    optimizers[0].use_native(library, copies)
    for step in range(10):
        for mine, theirs in zip(ours, torchs, strict=True):
            gradient = draw(*mine.shape, seed=step).bfloat16()
            copies[mine].grad, theirs.grad = gradient, gradient.float()
        norm = torch.nn.utils.get_total_norm([p.grad for p in torchs if p.grad is not None])
        assert optimizers[0].grad_norm() == pytest.approx(float(norm), rel=1e-6)
        for optimizer in optimizers:
            optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0), torch.tensor(2.0)  # type: ignore[attr-defined]
            optimizer.step()
    for mine, theirs in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(copies[mine], mine.detach().bfloat16())
    before = [p.detach().clone() for p in ours]
    optimizers[0].found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizers[0].step()
    assert all(torch.equal(p, b) for p, b in zip(ours, before, strict=True))
    optimizers[0].zero_grad()
    assert all(copy.grad is None for copy in copies.values())


def test_sums_do_not_depend_on_the_threads(library: Library):
    x, weight, bias = draw(1000, 64), draw(64, seed=1), draw(64, seed=2)

    def compute() -> list[Tensor]:
        inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
        native.norm(*inputs, 1e-5).square().sum().backward()
        squares = library.call_all(
            "sum_of_squares", [Values(x.data_ptr(), x.numel(), DTYPES[x.dtype])]
        )
        return [
            torch.tensor(squares, dtype=torch.float64),
            *(each.grad for each in inputs if each.grad is not None),
        ]

    assert_same_on_threads(compute)
