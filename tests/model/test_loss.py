"""Chunked cross-entropy equals that of all logits at once, and torch's."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatoken.model.loss import cross_entropy
from megatoken.posttrain.answer_scores import token_log_probs
from tests.tiny_model import differentiate, draw, relative_error


def make(
    rows: int, time: int, width: int, vocab: int, padded: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, the weight of the output layer and targets."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, vocab, (rows, time), generator=generator)
    return draw(rows, time, width, seed=seed), draw(padded, width, seed=seed + 1), targets


def run(inputs: Sequence[Tensor], targets: Tensor, scale: float, **options: Any) -> list[Tensor]:
    """Return the loss, and its gradients times a scale."""

    def loss(*inputs):
        total, count = cross_entropy(*inputs, targets, **options)
        assert count == (targets >= 0).sum()
        return total

    return differentiate(loss, inputs, torch.tensor(scale))


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float,
    temperature: float = 1.0,
) -> Tensor:
    """Compute them by torch's log-softmax of all logits; 0 for negative targets."""
    logits = (hidden @ weight.T)[..., :vocab_size]
    logits = (logits / softcap).tanh() * softcap if softcap else logits
    of_all = (logits / temperature).log_softmax(-1)
    return of_all.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)


def run_reference(
    inputs: Sequence[Tensor], targets: Tensor, scale: float, **options: Any
) -> list[Tensor]:
    """Return what `run` does, by the definition in fp64."""

    def loss(*inputs):
        return -log_probs(*inputs, targets, **options).sum()

    return differentiate(loss, inputs, torch.tensor(scale), torch.float64)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 3),
    time=st.integers(1, 13),
    vocab=st.integers(2, 40),
    padding=st.sampled_from([0, 1, 9]),
    chunk=st.sampled_from([0, 1, 3, 7, 1024]),
    ignored=st.sampled_from([[], slice(None, None, 3), slice(None)]),
    softcap=st.sampled_from([0.0, 4.0]),
    size=st.sampled_from([1.0, 1.0, 1e4]),
)
def test_every_chunking_gives_torchs_values_and_gradients(
    rows: int,
    time: int,
    vocab: int,
    padding: int,
    chunk: int,
    ignored: slice,
    softcap: float,
    size: float,
):
    hidden, weight, targets = make(rows, time, 8, vocab, vocab + padding, seed=rows * time + vocab)
    inputs, targets[:, ignored] = (hidden * size, weight), -1
    options = {"vocab_size": vocab, "softcap": softcap}
    total, *gradients = run(inputs, targets, 0.25, chunk=chunk, **options)
    expected_total, *expected = run_reference(inputs, targets, 0.25, **options)
    assert float(total) == pytest.approx(float(expected_total), rel=1e-5, abs=1e-5)
    # Absolute: a nearly certain row leaves a gradient of rounding, the difference of a probability and 1.
    for found, wanted in zip(gradients, expected, strict=True):
        if size > 1:  # scores that would overflow, and gradients of their rounding
            assert found.isfinite().all()
            continue
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.count_nonzero(gradients[1][vocab:]) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("softcap", [0.0, 10.0])
def test_half_precision_stays_near_fp32(
    dtype: torch.dtype, tolerance: float, chunk: int, softcap: float
):
    """Products in half precision, logits and softmax in fp32: a few units of the dtype's last place (2^-9, 2^-12)."""
    *inputs, targets = make(2, 9, 16, 30, 32, seed=4)
    inputs = [x.to(dtype).float() for x in inputs]  # exact in either
    # A loss scale: 2^-20 of the sum would underflow fp16, were it not in the logits' gradient.
    scale = 2.0**-20 * 2.0**16
    options = {"vocab_size": 30, "softcap": softcap}
    try:
        with torch.autocast("cpu", dtype):
            found = run(inputs, targets, scale, chunk=chunk, **options)
    except RuntimeError as error:
        pytest.skip(f"this build of torch does not multiply {dtype} on a CPU: {error}")
    for ours, exact in zip(found, run_reference(inputs, targets, scale, **options), strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, exact) < tolerance


@pytest.mark.parametrize("chunk", [0, 3, 64])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_log_probabilities_of_targets(chunk: int, softcap: float):
    """Compare values, and gradients of a loss that weighs every token."""
    *inputs, targets = make(3, 5, 8, 11, 16, seed=1)
    targets[0, :3] = targets[2, 4] = -1
    options = {"vocab_size": 11, "softcap": softcap, "temperature": 0.7}

    def ours(*inputs):
        return token_log_probs(*inputs, targets, chunk=chunk, **options)

    def torchs(*inputs):
        return log_probs(*inputs, targets, **options)

    weights = draw(3, 5, seed=3)
    found = differentiate(ours, inputs, weights)
    expected = differentiate(torchs, inputs, weights, torch.float64)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)
