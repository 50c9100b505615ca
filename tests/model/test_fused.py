"""The Triton kernel equals plain PyTorch in values and gradients, at sizes that fit no block.

On a machine without a GPU it runs in Triton's interpreter, which tests/conftest.py switches on.
"""

import pytest
import torch
from torch import Tensor

from megatoken.model.gpt import GPT
from megatoken.model.kernels import LOSS
from megatoken.model.kernels import cross_entropy as softmax
from megatoken.model.loss import cross_entropy
from tests.tiny_model import TINY_GPT

pytestmark = pytest.mark.skipif(not softmax.HAS_TRITON, reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Both implementations round once to the dtype; sums in another order may round to its other side.
BOUNDS = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}


def random(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("warps", [softmax.WARPS, 1])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "padded"), [(1, 3, 3), (9, 97, 128), (5, 300, 384), (2, 1025, 1152)]
)
def test_loss(
    rows: int,
    vocabulary: int,
    padded: int,
    softcap: float,
    warps: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(softmax, "WARPS", warps)
    targets = torch.arange(rows, device=DEVICE) * 7 % vocabulary
    targets[rows // 2] = -1 if rows > 1 else 0
    results = []
    for name in ("torch", "triton"):
        logits = 3 * random(rows, padded, dtype=dtype)
        loss = LOSS[name](logits, targets, vocabulary, softcap, overwrite=True)
        counted = targets >= 0  # the caller zeroes the gradient of ignored rows
        results.append([loss, logits.float()[counted]])
    for fused, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(fused, plain, **BOUNDS[dtype])
    assert torch.count_nonzero(results[1][1][:, vocabulary:]) == 0
    assert (results[1][0] == 0).sum() == (rows > 1)


def test_loss_without_overwrite_leaves_the_logits() -> None:
    logits = random(4, 40)
    before = logits.clone()
    LOSS["triton"](logits, torch.zeros(4, dtype=torch.int64, device=DEVICE), 33, overwrite=False)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
def test_a_model_with_the_fused_loss_has_the_plain_losses_and_gradients(precision: str) -> None:
    losses, gradients = [], []
    for name in ("torch", "triton"):
        model = GPT(TINY_GPT, seed=3).to(
            DEVICE, torch.bfloat16 if precision == "bf16" else torch.float32
        )
        ids = (torch.arange(2 * TINY_GPT.seq_len, device=DEVICE) * 5 % 97).view(2, -1)
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=precision == "autocast"):
            hidden, weight = model(ids), model.lm_head_weight
            total, count = cross_entropy(
                hidden,
                weight,
                ids.roll(-1, 1),
                vocab_size=97,
                chunk=24,
                softmax_cross_entropy=LOSS[name],
            )
        (total / count).backward()
        losses.append(float(total.detach() / count))
        gradients.append({name: p.grad.float() for name, p in model.named_parameters()})
    low = precision != "fp32"
    assert losses[1] == pytest.approx(losses[0], rel=2e-3 if low else 1e-6)
    for name, gradient in gradients[0].items():
        error = (gradients[1][name] - gradient).norm() / gradient.norm()
        assert error < (0.03 if low else 1e-5), (name, error)
