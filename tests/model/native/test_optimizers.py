"""Native Muon and AdamW equal torch's operations, for every instruction set of this processor."""

import pytest
import torch
from torch import Tensor, nn

from megatoken.base.config.schema import OptimConfig
from megatoken.model.native.library import Library
from megatoken.optim.muon import WholeMatrices, list_hidden_matrices
from megatoken.optim.native import NativeUpdate, is_supported
from megatoken.optim.optimizer import Update, build_optimizer

# Tall, with queries, keys and values; wide; and one that all threads divide.
SHAPES = [(96, 32), (32, 97), (8, 33000)]


class Training:
    """Weights, their optimizer and, for a native one in bf16, their copies."""

    def __init__(
        self, library: Library | None, dtype: torch.dtype, name: str = "muon", options: bool = False
    ) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(columns, rows, bias=False) for rows, columns in SHAPES)
        self.model = nn.Sequential(*layers, nn.LayerNorm(70))
        rows = list_hidden_matrices(self.model) | {"0.weight": [64, 16, 16]}
        values = {"weight_decay": 0.1, "cautious_decay": options, "equal_rows": options}
        optim = OptimConfig(name=name, lr=0.01, matrix_lr=0.02, **values)
        optimizer = build_optimizer(self.model, optim, matrices=WholeMatrices(rows, dtype))
        assert is_supported(optimizer)
        self.update = Update()
        self.copies = {}
        if library:
            if dtype == torch.bfloat16:
                self.copies = {
                    param: param.detach().bfloat16() for param in self.model.parameters()
                }
            self.update = NativeUpdate(library, self.copies)
        self.optimizer = optimizer

    def parameters(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]

    def step(self, step: int, found_inf: float = 0.0) -> None:
        """Update the weights, dividing the gradients by a scale that changes each step."""
        self.update.step(self.optimizer, torch.tensor(found_inf), torch.tensor(1.0 + step))

    def set_gradients(self, step: int) -> None:
        """Give every parameter a gradient, but one matrix in one step."""
        generator = torch.Generator().manual_seed(step)
        for index, param in enumerate(self.model.parameters()):
            gradient = torch.randn(param.shape, generator=generator).bfloat16()
            trained = self.copies.get(param, param)
            trained.grad = None if (step, index) == (1, 0) else gradient.to(trained.dtype)


@pytest.mark.parametrize(("name", "options"), [("muon", False), ("muon", True), ("adamw", False)])
def test_weights_are_those_of_torchs_operations(
    library: Library, dtype: torch.dtype, name: str, options: bool
):
    ours = Training(library, dtype, name, options)
    torchs = Training(None, torch.float32, name, options)
    # Error of Muon's updates, which torch computes in fp32 here; in bf16, torch's own is 0.013.
    tolerance = 0.015 if (name, dtype) == ("muon", torch.bfloat16) else 1e-5
    start = [param.clone() for param in torchs.parameters()]
    for step in range(3):
        for each in (ours, torchs):
            each.set_gradients(step)
        grads = [p.grad.double() for p in torchs.model.parameters() if p.grad is not None]
        norm = ours.update.grad_norm(ours.optimizer)
        assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(grads)), rel=1e-6)
        for each in (ours, torchs):
            each.step(step)
    for own, other, before in zip(ours.parameters(), torchs.parameters(), start, strict=True):
        assert (own - other).norm() < tolerance * (other - before).norm()
    assert all(torch.equal(copy, param.bfloat16()) for param, copy in ours.copies.items())


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_bad_step_changes_nothing(library: Library, name: str):
    training = Training(library, torch.bfloat16, name)
    state = training.optimizer.state
    kept = [*training.parameters(), *training.copies.values()]
    kept += [value for each in state.values() for value in each.values()]
    before = [value.clone() for value in kept]
    training.set_gradients(0)
    training.step(0, found_inf=1.0)
    assert all(map(torch.equal, kept, before))
