"""The Triton kernel of AdamW equals torch's in fp64, at sizes that do and do not fill its loads.

torch's fused kernel is no reference: it computes 1 - beta2 in fp32, to 5 digits.

On a machine without a GPU it runs in Triton's interpreter, which tests/conftest.py switches on.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatoken.config.schema import OptimConfig
from megatoken.optim.adamw import AdamW
from megatoken.optim.optimizer import build_adamw
from megatoken.system.triton_jit import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"aligned": [(150, 32), (64,)], "odd": [(150, 33), (7,), (2,)]}  # of weights, then vectors


def draw(size: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def build(
    sizes: Sequence[Sequence[int]], step: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], AdamW]:
    """Return parameters and an optimizer that has taken `step` steps with tiny gradients."""
    params = [torch.nn.Parameter(draw(size, seed).to(dtype)) for seed, size in enumerate(sizes)]
    groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:]}]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    optim = OptimConfig(lr=1e-2, beta2=0.999)
    optimizer = build_adamw(groups, optim, "fused")
    for state in optimizer.state.values():
        state["step"] += step
    return list(params), optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("first_step", [0, 200, 100_000])
@pytest.mark.parametrize("sizes", SIZES)
def test_updates(sizes: str, first_step: int, dtype: torch.dtype) -> None:
    ours, native = build(SIZES[sizes], first_step)
    theirs, plain = build(SIZES[sizes], first_step, torch.float64)
    copies = {param: param.detach().to(dtype) for param in ours} if dtype != torch.float32 else {}
    native.use_native(None, copies)
    assert native.updates_copies == bool(copies)
    for step in range(6):
        for param, other in zip(ours, theirs, strict=True):
            gradient = draw(param.shape, step).to(dtype)
            copies.get(param, param).grad = gradient
            other.grad = gradient.double()
        if step == 5:  # as after several micro-batches
            for param in copies:
                param.grad, copies[param].grad = copies[param].grad.float(), None  # type: ignore[union-attr]
        norm = torch.nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None])
        torch.testing.assert_close(native.grad_norm(), norm.float(), rtol=1e-6, atol=0)
        for optimizer in (native, plain):
            optimizer.found_inf = torch.tensor(float(step == 3), device=DEVICE)  # type: ignore[attr-defined]
            optimizer.grad_scale = torch.tensor(2.0, device=DEVICE)  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
    for param, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, other.float(), rtol=1e-6, atol=2e-7)
        state, expected = native.state[param], plain.state[other]
        assert state.keys() == expected.keys()
        assert state["step"] == expected["step"] == first_step + 5
        for key, atol in {"exp_avg": 1e-7, "exp_avg_sq": 1e-9}.items():
            torch.testing.assert_close(state[key], expected[key].float(), rtol=1e-6, atol=atol)
        copy = copies.get(param, param)
        assert copy.grad is None
        # The interpreter truncates to bf16 where GPUs round.
        is_exact = DEVICE == "cuda" or dtype != torch.bfloat16
        rtol = 0.0 if is_exact else 2**-7
        torch.testing.assert_close(copy, param.to(copy.dtype), rtol=rtol, atol=0)
    assert not torch.equal(ours[0], draw(SIZES[sizes][0], 0))


def test_parameters_without_gradient_do_not_change() -> None:
    params, optimizer = build(SIZES["aligned"], 0)
    optimizer.use_native(None, {})
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert torch.equal(params[1], draw(params[1].shape, 1))
    assert [optimizer.state[param]["step"] for param in params] == [1, 0]
