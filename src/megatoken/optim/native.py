"""AdamW and Muon updated by native kernels for CPUs (model/native/kernels/{adamw,muon}.cc).

Updates are limited by memory bandwidth. With master weights, the native kernels need a single pass:
they read the gradients of the low-precision copies and also write the updated copies.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatoken.model.native.library import (
    DTYPES,
    AdamWUpdate,
    Library,
    MuonUpdate,
    Values,
    addresses,
)
from megatoken.optim.muon import Muon, WholeMatrices
from megatoken.optim.optimizer import AdamW, Update


def is_supported(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether there is a kernel: not for matrices that are divided between processes."""
    if isinstance(optimizer, Muon):
        return isinstance(optimizer.matrices, WholeMatrices)
    return isinstance(optimizer, AdamW)


class NativeUpdate(Update):
    """The update of an AdamW or a Muon by native kernels.

    copies: bf16 copy of each fp32 parameter, updated by `step`; empty without master weights.
    """

    def __init__(self, library: Library, copies: Mapping[Tensor, Tensor]) -> None:
        self.library = library
        self.copies = copies
        self.updates_copies = bool(copies)

    def grad_norm(self, optimizer: torch.optim.Optimizer) -> Tensor:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [grad for grad in map(self._gradient, params) if grad is not None]
        values = [Values(grad.data_ptr(), grad.numel(), DTYPES[grad.dtype]) for grad in grads]
        return torch.tensor(self.library.call_all("sum_of_squares", values) ** 0.5)

    @torch.no_grad()
    def step(
        self, optimizer: torch.optim.Optimizer, found_inf: Tensor, grad_scale: Tensor | None
    ) -> None:
        if found_inf:
            return
        scale = 1.0 if grad_scale is None else float(grad_scale)
        *others, last = optimizer.param_groups
        if isinstance(optimizer, Muon):
            muon = list(self._muon_updates(optimizer, last, scale))
        else:
            others, muon = [*others, last], []
        adamw = [
            update for group in others for update in self._adamw_updates(optimizer, group, scale)
        ]
        self.library.call_all("adamw", adamw)
        self.library.call_all("muon", muon)

    def _adamw_updates(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], scale: float
    ) -> Iterator[AdamWUpdate]:
        """Yield the update of each parameter that has a gradient."""
        for param in group["params"]:
            grad = self._gradient(param)
            if grad is None:
                continue
            state = optimizer.state[param]
            state["step"] += 1
            step = state["step"].item()
            beta1, beta2 = group["betas"]
            tensors = param, state["exp_avg"], state["exp_avg_sq"], grad, self.copies.get(param)
            rates = group["lr"], beta1, beta2, group["eps"], group["weight_decay"]
            sizes = param.numel(), DTYPES[grad.dtype]
            corrections = 1 - beta1**step, 1 - beta2**step
            yield AdamWUpdate(*addresses(tensors), *sizes, *rates, *corrections, scale)

    def _muon_updates(
        self, optimizer: Muon, group: dict[str, Any], scale: float
    ) -> Iterator[MuonUpdate]:
        """Yield the update of each matrix; without a gradient, as if it were 0."""
        assert isinstance(optimizer.matrices, WholeMatrices)
        rates = group["lr"], group["weight_decay"], group["momentum"]
        settings = *rates, scale, optimizer.cautious_decay, optimizer.equal_rows
        dtype = DTYPES[optimizer.matrices.dtype]
        for param, rows in zip(group["params"], optimizer.matrices.rows.values(), strict=True):
            grad = self._gradient(param)
            tensors = param, optimizer.state[param]["momentum_buffer"], grad, self.copies.get(param)
            grad_dtype = DTYPES[torch.float32 if grad is None else grad.dtype]
            pieces = ([None] * len(rows) if x is None else x.split(list(rows)) for x in tensors)
            for n_rows, *matrices in zip(rows, *pieces, strict=True):
                sizes = n_rows, param.shape[1], grad_dtype, dtype
                yield MuonUpdate(*addresses(matrices), *sizes, *settings)

    def _gradient(self, param: Tensor) -> Tensor | None:
        """Return a parameter's gradient, or that of its low-precision copy."""
        copy = self.copies.get(param)
        return copy.grad if param.grad is None and copy is not None else param.grad
