"""cuBLASLt is given the right matrices: a stand-in computes what its documentation says of them.

The stand-in reads column-major matrices from the addresses that the code passes. Values on a card
are compared by benchmarks/epilogues.py.
"""

import copy
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatoken.model.gpt import GPT, set_activation_checkpointing, set_block_kernels
from megatoken.model.kernels import cublaslt
from tests.tiny_model import TINY_GPT

TRANSPOSE_A, EPILOGUE, BIAS, AUX, AUX_STRIDE = 3, 7, 8, 11, 12


def read_memory(address: int, *shape: int) -> Tensor:
    """Return the bf16 values at an address, without a copy."""
    n = torch.Size(shape).numel()
    values = torch.frombuffer((ctypes.c_int16 * n).from_address(address), dtype=torch.bfloat16)
    return values.view(shape)


class StandIn:
    """cuBLASLt's functions by name, on CPU memory. Descriptors are numbers of `objects`."""

    def __init__(self) -> None:
        self.objects: dict[int | None, Any] = {}
        self.calls = 0

    def find(self, name: str) -> Callable[..., int]:
        if name.endswith("Create"):
            return self.create
        return self.multiply if name == "cublasLtMatmul" else self.set

    def create(self, created: Any, *arguments: Any) -> int:
        created._obj.value = len(self.objects) + 1
        values = [argument.value for argument in arguments]
        self.objects[created._obj.value] = values if len(values) == 4 else {"types": values}
        return 0

    def set(self, described: Any, attribute: Any, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[described.value][attribute.value] = value._obj.value
        return 0

    def read_matrix(self, address: Any, layout: Any) -> Tensor:
        """Return a column-major matrix."""
        kind, rows, columns, stride = self.objects[layout.value]
        assert (kind, stride) == (14, rows)  # bf16; the columns follow each other
        return read_memory(address.value, columns, rows).t()

    def multiply(self, _: Any, described: Any, alpha: Any, *others: Any) -> int:
        a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, *_ = others
        assert (alpha._obj.value, beta._obj.value, c.value, c_layout) == (1, 0, d.value, d_layout)
        attributes = self.objects[described.value]
        assert attributes["types"] == [68, 0]  # sums and factors in fp32
        assert (attributes[TRANSPOSE_A], attributes[EPILOGUE]) == (1, 164)
        left = self.read_matrix(a, a_layout).t().float()
        right = self.read_matrix(b, b_layout).float()
        out = self.read_matrix(d, d_layout)
        bias = read_memory(attributes[BIAS], len(out)).float()
        aux = read_memory(attributes[AUX], out.shape[1], attributes[AUX_STRIDE]).t()
        aux.copy_(left @ right + bias[:, None])
        out.copy_(F.gelu(aux.float(), approximate="tanh"))
        self.calls += 1
        return 0


@pytest.fixture(autouse=True)
def lt(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    monkeypatch.setattr(cublaslt, "_find", stand_in.find)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    cublaslt._create.cache_clear()
    yield stand_in
    cublaslt._create.cache_clear()


def draw(*shape: int, seed: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (values / shape[-1] ** 0.5).bfloat16()


def test_values_and_gradients_are_torchs(lt: StandIn):
    inputs = [draw(24, 16, seed=0), draw(40, 16, seed=1), draw(40, seed=2)]
    dy = draw(24, 40, seed=3)
    results = []
    for dtype, linear in ((torch.bfloat16, cublaslt.linear_gelu), (torch.float32, F.linear)):
        given = [x.to(dtype).requires_grad_() for x in inputs]
        y: Any = linear(*given)
        y = y[0] if dtype == torch.bfloat16 else F.gelu(y, approximate="tanh")
        results.append([y.detach(), *torch.autograd.grad(y, given, dy.to(dtype))])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16
        assert float((ours.float() - exact).norm() / exact.norm()) < 8e-3
    assert lt.calls == 1


def test_blocks_use_it_only_to_train(lt: StandIn):
    model = GPT(TINY_GPT, 64).bfloat16()
    ids = torch.arange(8)[None]
    expected = model(ids).detach()
    set_block_kernels(model, "cublaslt")
    with torch.no_grad():
        model(ids)
    set_activation_checkpointing(model, "gelu")
    model(ids)
    assert lt.calls == 0
    set_activation_checkpointing(model, "none")
    found = copy.deepcopy(model)(ids).detach()
    assert float((found - expected).norm() / expected.norm()) < 8e-3
    assert lt.calls == TINY_GPT.n_layer
