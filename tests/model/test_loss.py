"""Cross-entropy in chunks: the same numbers as whole, and as torch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatoken.model.loss import cross_entropy, token_log_probs
from tests.tiny_model import draw, relative_error


def make(
    rows: int, time: int, width: int, vocab: int, padded: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, the weight of the output layer and targets."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, vocab, (rows, time), generator=generator)
    return draw(rows, time, width, seed=seed), draw(padded, width, seed=seed + 1), targets


def differentiate(
    loss: Callable[..., Tensor], hidden: Tensor, weight: Tensor, scale: float = 1.0
) -> list[Tensor]:
    """Return a loss of hidden states and weights, and its gradients times a scale."""
    inputs = [each.clone().requires_grad_() for each in (hidden, weight)]
    total = loss(*inputs)
    return [total.detach(), *torch.autograd.grad(total * scale, inputs)]


def run(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, **options: Any
) -> list[Tensor]:
    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        total, count = cross_entropy(hidden, weight, targets, **options)
        assert count == (targets >= 0).sum()
        return total

    return differentiate(loss, hidden, weight, scale)


def compute_logits(hidden: Tensor, weight: Tensor, vocab: int, softcap: float) -> Tensor:
    logits = (hidden @ weight.T)[..., :vocab]
    return (logits / softcap).tanh() * softcap if softcap else logits


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float
) -> list[Tensor]:
    """torch's cross-entropy over the real vocabulary, in fp64."""

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = compute_logits(hidden, weight, vocab_size, softcap).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-1)

    return differentiate(loss, hidden.double(), weight.double())


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
    hidden, targets[:, ignored] = hidden * size, -1
    options = {"vocab_size": vocab, "softcap": softcap}
    total, *gradients = run(hidden, weight, targets, scale=0.25, chunk=chunk, **options)
    expected_total, *expected = reference(hidden, weight, targets, **options)
    assert float(total) == pytest.approx(float(expected_total), rel=1e-5, abs=1e-5)
    # Absolute: a nearly certain row leaves a gradient of rounding, the difference of a probability and 1.
    for found, wanted in zip(gradients, expected, strict=True):
        if size > 1:  # scores that would overflow, and gradients of their rounding
            assert found.isfinite().all()
            continue
        torch.testing.assert_close(found.double(), wanted * 0.25, rtol=1e-5, atol=1e-5)
    assert torch.count_nonzero(gradients[1][vocab:]) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("softcap", [0.0, 10.0])
def test_half_precision_stays_near_fp32(
    dtype: torch.dtype, tolerance: float, chunk: int, softcap: float
):
    """Products in half precision, logits and softmax in fp32: a few units of the dtype's last place (2^-9, 2^-12)."""
    hidden, weight, targets = make(2, 9, 16, 30, 32, seed=4)
    # The inputs themselves are exact.
    hidden, weight = hidden.to(dtype).float(), weight.to(dtype).float()
    # A loss scale: 2^-20 of the sum would underflow fp16, were it not in the logits' gradient.
    scale = 2.0**-20 * 2.0**16
    options = {"vocab_size": 30, "softcap": softcap}
    try:
        with torch.autocast("cpu", dtype):
            found = run(hidden, weight, targets, scale, chunk=chunk, **options)
    except RuntimeError as error:
        pytest.skip(f"this build of torch does not multiply {dtype} on a CPU: {error}")
    expected = reference(hidden, weight, targets, **options)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=tolerance)
    for gradient, wanted in zip(found[1:], expected[1:], strict=True):
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, wanted * scale) < tolerance


@pytest.mark.parametrize("chunk", [0, 3, 64])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_log_probabilities_of_targets(chunk: int, softcap: float):
    """Against torch's log-softmax of all logits in fp64, and their gradients for a loss that weighs every token."""
    hidden, weight, targets = make(3, 5, 8, 11, 16, seed=1)
    targets[0, :3] = targets[2, 4] = -1
    weights = draw(3, 5, seed=3)
    options = {"vocab_size": 11, "softcap": softcap, "temperature": 0.7, "chunk": chunk}

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        log_probs = token_log_probs(hidden, weight, targets, **options)
        found.append(log_probs.detach())
        return (log_probs * weights).sum()

    def torchs(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = compute_logits(hidden, weight, 11, softcap) / 0.7
        log_probs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        expected.append((log_probs * (targets >= 0)).detach())
        return (log_probs * (targets >= 0) * weights).sum()

    found, expected = list[Tensor](), list[Tensor]()
    found += differentiate(ours, hidden, weight)
    expected += differentiate(torchs, hidden.double(), weight.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)
