"""Our GPU kernels are their plain twins, value by value and gradient by gradient, at sizes that fit no block.

On a machine without a GPU they run in Triton's interpreter, which tests/conftest.py switches on.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatoken.model.gpt import GPT, initialize, use_kernels
from megatoken.model.kernels import GELU, LOSS, NORM, Kernels, softmax
from megatoken.model.kernels.jit import HAS_TRITON
from megatoken.model.loss import cross_entropy
from tests.tiny import SHAPE

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
PLACE = "cuda" if torch.cuda.is_available() else "cpu"
# Both forms round once to the dtype; sums in another order may round to its other side.
BOUNDS = {torch.float32: {"rtol": 2e-5, "atol": 2e-6}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2}}
DTYPES = pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)


def random(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    noise = torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))
    return noise.to(PLACE, dtype)


def differentiate(compute: Callable[..., tuple[Tensor, ...]], *leaves: Tensor) -> list[Tensor]:
    """Results and gradients of all leaves, in fp32."""
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    results = compute(*leaves)
    grads = [random(*y.shape, seed=9 + i, dtype=y.dtype) for i, y in enumerate(results)]
    torch.autograd.backward(results, grads)
    return [x.detach().float() for x in (*results, *(leaf.grad for leaf in leaves)) if x is not None]


def assert_same(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype, *, rows: int) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        bounds = dict(BOUNDS[dtype])
        if one.dim() == 1:  # a column sum; Triton's interpreter cuts off to bf16 where a GPU rounds, always downwards
            bounds["atol"] *= rows**0.5 if dtype == torch.float32 else max(rows / 4, 1)
        torch.testing.assert_close(one, other, **bounds)


def add_norm(form: str) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *given: NORM["layernorm"][form](*given, 1e-5)


@DTYPES
@pytest.mark.parametrize("sizes", [(1, 1, 5), (2, 3, 96), (1, 700, 33), (3, 5, 1600)])
def test_add_norm(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, update = random(*sizes, dtype=dtype), random(*sizes, seed=1, dtype=dtype)
    weight, bias = 1 + random(sizes[-1], seed=2, dtype=dtype) / 8, random(sizes[-1], seed=3, dtype=dtype)
    plain, fused = (differentiate(add_norm(form), x, update, weight, bias) for form in ("torch", "triton"))
    assert_same(fused, plain, dtype, rows=sizes[0] * sizes[1])


def test_add_norm_takes_an_update_that_is_not_contiguous_and_of_another_dtype() -> None:
    x, update = random(4, 6, 32), random(4, 32, 6, seed=1, dtype=torch.bfloat16).transpose(1, 2)
    weight, bias = random(32, seed=2), random(32, seed=3)
    plain, fused = (differentiate(add_norm(form), x, update, weight, bias) for form in ("torch", "triton"))
    assert_same(fused[:3], plain[:3], torch.float32, rows=24)
    assert_same(fused[3:4], plain[3:4], torch.bfloat16, rows=24)


@DTYPES
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 8, 3), (7, 32, 70), (40, 16, 129), (1100, 4, 65)])
def test_gelu(rows: int, width: int, inner: int, dtype: torch.dtype) -> None:
    x = random(2, rows, width, dtype=dtype)
    weight, bias = random(inner, width, seed=1, dtype=dtype) / width**0.5, random(inner, seed=2, dtype=dtype)

    def compute(form: str) -> Callable[..., tuple[Tensor, ...]]:
        def run(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            up = nn.Linear(width, inner, device="meta")
            up.weight, up.bias = nn.Parameter(weight), nn.Parameter(bias)
            y = GELU[form](up, x)()
            y.backward(random(*y.shape, seed=5, dtype=dtype))
            return y, *(x.grad, up.weight.grad, up.bias.grad)  # type: ignore[return-value]

        return run

    plain, fused = (
        [part.detach().float() for part in compute(form)(x.clone().requires_grad_(), weight, bias)]
        for form in ("torch", "triton")
    )
    for one, other in zip(fused, plain, strict=True):
        bounds = BOUNDS[dtype]
        scale = max(float(other.abs().max()), 1.0)  # gradients of weights are sums over rows
        torch.testing.assert_close(one / scale, other / scale, **bounds)


@DTYPES
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("rows", "vocabulary", "padded"), [(1, 3, 3), (9, 97, 128), (5, 300, 384), (2, 1025, 1152)])
def test_loss(
    rows: int, vocabulary: int, padded: int, whole: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:  # as if the row were longer than a program can hold
        monkeypatch.setattr(softmax, "LONGEST", 2)
        monkeypatch.setattr(softmax, "PIECE", 64)
    targets = torch.arange(rows, device=PLACE) * 7 % vocabulary
    targets[rows // 2] = -1 if rows > 1 else 0
    results = []
    for form in ("torch", "triton"):
        logits = 3 * random(rows, padded, dtype=dtype)
        lost = LOSS[form](logits, targets, vocabulary, overwrite=True)
        counted = targets >= 0  # rows that do not count are struck out by the caller
        results.append([lost, logits.float()[counted]])
    assert_same(results[1], results[0], dtype, rows=1)
    assert torch.count_nonzero(results[1][1][:, vocabulary:]) == 0
    assert (results[1][0] == 0).sum() == (rows > 1)


def test_loss_that_is_only_read_leaves_the_logits() -> None:
    logits = random(4, 40)
    kept = logits.clone()
    LOSS["triton"](logits, torch.zeros(4, dtype=torch.int64, device=PLACE), 33, overwrite=False)
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
def test_a_model_of_fused_kernels_learns_what_the_plain_one_does(precision: str) -> None:
    losses, gradients = [], []
    for kernels in (Kernels(), Kernels(norm="triton", gelu="triton", loss="triton")):
        model = GPT(replace(SHAPE, d_model=40, n_head=4, d_ff=72))
        initialize(model, 3)
        model.to(PLACE, torch.bfloat16 if precision == "bf16" else torch.float32)
        use_kernels(model, kernels)
        assert model.blocks[1].norm2.add_norm is NORM["layernorm"][kernels.norm]
        ids = (torch.arange(2 * SHAPE.seq_len, device=PLACE) * 5 % 97).view(2, -1)
        with torch.autocast(PLACE, dtype=torch.bfloat16, enabled=precision == "autocast"):
            total, count = cross_entropy(
                model(ids), model.unembedding, ids.roll(-1, 1), vocab_size=97, chunk=24, lose=LOSS[kernels.loss]
            )
        (total / count).backward()
        losses.append(float(total.detach() / count))
        gradients.append({name: p.grad.float() for name, p in model.named_parameters()})
    low = precision != "fp32"
    assert losses[1] == pytest.approx(losses[0], rel=2e-3 if low else 1e-6)
    for name, gradient in gradients[0].items():
        error = (gradients[1][name] - gradient).norm() / gradient.norm()
        assert error < (0.03 if low else 1e-5), (name, error)
