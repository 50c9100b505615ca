"""Norms, activations, loss and AdamW of the compiled kernels beside torch's, for every instruction set at hand."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatoken.model.kernels.block import torch_norm, torch_swiglu
from megatoken.model.kernels.cross_entropy import softmax_cross_entropy
from megatoken.native import ops as native
from megatoken.native.library import DTYPES, Library, Values
from megatoken.optim.adamw import AdamW
from tests.native.twins import assert_same, assert_same_on_threads
from tests.tiny_model import draw

# Of a result near 1: a few roundings; one to bf16.
EPS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
LARGEST = {dtype: 2 * eps for dtype, eps in EPS.items()}
SIZES = [(1, 1), (3, 17), (64, 32), (65, 48), (130, 771)]


@pytest.mark.parametrize("rms", [False, True])
def test_norm(library: Library, rms: bool, dtype: torch.dtype):
    for N, C in SIZES[1:]:
        weight, bias = (draw(C, dtype=dtype, seed=seed) for seed in (1, 2))
        inputs = [3 * draw(N, C, dtype=dtype) + 1, weight, None if rms else bias]
        norms = (partial(norm, eps=1e-5, rms=rms) for norm in (native.norm, torch_norm))
        assert_same(*norms, inputs, largest=LARGEST)


def test_activations(library: Library, dtype: torch.dtype):
    for N, C in SIZES:
        x, up = 4 * draw(N, C, dtype=dtype), draw(N, C, dtype=dtype, seed=1)
        assert_same(native.gelu, lambda x: F.gelu(x, approximate="tanh"), [x], largest=LARGEST)
        assert_same(native.swiglu, torch_swiglu, [x, up], largest=LARGEST)
    extremes = torch.tensor([-100.0, -30.0, 0.0, 30.0, 100.0, torch.inf])
    torch.testing.assert_close(native.gelu(extremes), extremes.clamp(min=0), rtol=1e-6, atol=1e-15)
    assert native.gelu(torch.tensor([torch.nan])).isnan().all()
    assert torch.equal(native.gelu(x.float(), approximate="none"), F.gelu(x.float()))


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
    loss = native.softmax_cross_entropy(logits, targets, vocab_size, softcap, overwrite=False)
    assert loss[0].isnan()


def test_adamw(library: Library):
    """Ten updates, decayed and not, with a divisor of the gradient: torch's fused weights to a few roundings."""
    ours, torchs = ([nn.Parameter(draw(*size)) for size in ((100, 33), (77,))] for _ in range(2))
    optimizers = []
    for matrix, vector in (ours, torchs):
        groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [vector]}]
        optimizer = AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        for p in (matrix, vector):
            state = {"step": torch.zeros(()), "exp_avg": 0 * p.data, "exp_avg_sq": 0 * p.data}
            optimizer.state[p] = state
        optimizers.append(optimizer)
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
    assert all(map(torch.equal, ours, before))
    optimizers[0].zero_grad()
    assert all(copy.grad is None for copy in copies.values())


def test_sums_do_not_depend_on_the_threads(library: Library):
    x, weight, bias = draw(1000, 64), draw(64, seed=1), draw(64, seed=2)

    def compute() -> list[Tensor]:
        inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
        native.norm(*inputs, 1e-5).square().sum().backward()
        values = Values(x.data_ptr(), x.numel(), DTYPES[x.dtype])
        squares = torch.tensor(library.call_all("sum_of_squares", [values]), dtype=torch.float64)
        return [squares, *(each.grad for each in inputs if each.grad is not None)]

    assert_same_on_threads(compute)
