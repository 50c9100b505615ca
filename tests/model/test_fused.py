"""The Triton kernel equals plain PyTorch in values and gradients, at sizes that fit no block.

On a machine without a GPU it runs in Triton's interpreter, which tests/conftest.py switches on.
"""

import pytest
import torch

from megatoken.model.kernels import LOSS
from megatoken.model.kernels import cross_entropy as softmax
from tests.tiny_model import draw

pytestmark = pytest.mark.skipif(not softmax.HAS_TRITON, reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Both implementations round once to the dtype; sums in another order may round to its other side.
BOUNDS = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}


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
):
    monkeypatch.setattr(softmax, "WARPS", warps)
    targets = torch.arange(rows, device=DEVICE) * 7 % vocabulary
    targets[rows // 2] = -1 if rows > 1 else 0
    results = []
    for name in ("torch", "triton"):
        logits = 3 * draw(rows, padded, dtype=dtype).to(DEVICE)
        loss = LOSS[name](logits, targets, vocabulary, softcap, overwrite=True)
        results.append([loss, logits.float()])
    for fused, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(fused, plain, **BOUNDS[dtype])
    assert torch.count_nonzero(results[1][1][:, vocabulary:]) == 0
    assert torch.count_nonzero(results[1][1][targets < 0]) == 0
    assert (results[1][0] == 0).sum() == (rows > 1)


def test_loss_without_overwrite_leaves_the_logits():
    logits = draw(4, 40).to(DEVICE)
    before = logits.clone()
    LOSS["triton"](logits, torch.zeros(4, dtype=torch.int64, device=DEVICE), 33, overwrite=False)
    assert torch.equal(logits, before)
