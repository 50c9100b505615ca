"""Cross-entropy in chunks: the same numbers as whole, and as torch's own."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatoken.model.loss import cross_entropy, token_log_probs


def make(
    rows: int, time: int, width: int, vocab: int, padded: int, seed: int
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, time, width, generator=generator)
    weight = torch.randn(padded, width, generator=generator)
    targets = torch.randint(0, vocab, (rows, time), generator=generator)
    return hidden, weight, targets


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab: int,
    chunk: int,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total, count = cross_entropy(
        hidden, weight, targets, vocab_size=vocab, chunk=chunk, softcap=softcap
    )
    (total * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return total.detach(), hidden.grad, weight.grad, int(count)


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab: int,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """torch's cross-entropy over the real vocabulary, in fp64."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (hidden @ weight.T)[..., :vocab].flatten(0, 1)
    if softcap:
        logits = (logits / softcap).tanh() * softcap
    total = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-1)
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return total.detach(), hidden.grad, weight.grad, int((targets >= 0).sum())


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-12))


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
    found = run(hidden, weight, targets, vocab=vocab, chunk=chunk, scale=0.25, softcap=softcap)
    expected = reference(hidden, weight, targets, vocab=vocab, softcap=softcap)
    assert found[3] == expected[3]
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5, abs=1e-5)
    # Absolute: a nearly certain row leaves a gradient of rounding, the difference of a probability and 1.
    for gradient, expected_grad in zip(found[1:3], expected[1:3], strict=True):
        if size > 1:  # scores that would overflow, and gradients of their rounding
            assert gradient.isfinite().all()
            continue
        torch.testing.assert_close(gradient.double(), expected_grad * 0.25, rtol=1e-5, atol=1e-5)
    assert torch.count_nonzero(found[2][vocab:]) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("softcap", [0.0, 10.0])
def test_half_precision_stays_near_fp32(
    dtype: torch.dtype, tolerance: float, chunk: int, softcap: float
):
    """Products in half precision, logits and softmax in fp32: a few units of the dtype's last place (2^-9, 2^-12)."""
    hidden, weight, targets = make(2, 9, 16, 30, 32, seed=4)
    hidden, weight = (
        hidden.to(dtype).float(),
        weight.to(dtype).float(),
    )  # the inputs themselves are exact
    try:
        with torch.autocast("cpu", dtype):
            # A loss scale: 2^-20 of the sum would underflow fp16, were it not in the logits' gradient.
            scale = 2.0**-20 * 2.0**16
            options = {"vocab": 30, "softcap": softcap}
            found = run(hidden, weight, targets, chunk=chunk, scale=scale, **options)
    except RuntimeError as error:
        pytest.skip(f"this build of torch does not multiply {dtype} on a CPU: {error}")
    expected = reference(hidden, weight, targets, **options)
    assert found[1].dtype == found[2].dtype == torch.float32
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=tolerance)
    assert relative(found[1], expected[1] * scale) < tolerance
    assert relative(found[2], expected[2] * scale) < tolerance


@pytest.mark.parametrize("chunk", [0, 3, 64])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_log_probabilities_of_targets(chunk: int, softcap: float):
    """Against torch's log-softmax of all logits in fp64, and their gradients for a loss that weighs every token."""
    hidden, weight, targets = make(3, 5, 8, 11, 16, seed=1)
    targets[0, :3] = targets[2, 4] = -1
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    found, expected = [], []
    for dtype, results in ((torch.float32, found), (torch.float64, expected)):
        h, w = (
            hidden.to(dtype, copy=True).requires_grad_(),
            weight.to(dtype, copy=True).requires_grad_(),
        )
        if dtype == torch.float32:
            options = {"vocab_size": 11, "softcap": softcap, "temperature": 0.7, "chunk": chunk}
            log_probs = token_log_probs(h, w, targets, **options)
        else:
            logits = (h @ w.T)[..., :11]
            logits = softcap * (logits / softcap).tanh() if softcap else logits
            log_probs = (
                (logits / 0.7).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
            )
            log_probs = log_probs * (targets >= 0)
        (log_probs * weights).sum().backward()
        results += [log_probs, h.grad, w.grad]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)
