"""Native norms, activations and loss equal torch's, for every instruction set of this processor."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megatoken.model.kernels.block import torch_norm, torch_swiglu
from megatoken.model.kernels.cross_entropy import softmax_cross_entropy
from megatoken.model.native import ops as native
from megatoken.model.native.library import Library
from tests.model.native.twins import assert_same
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
