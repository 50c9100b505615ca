"""Optimizers that can update all their parameters in one call of a native kernel for CPUs."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatoken.model.native.library import DTYPES, Library, Values


class NativeOptimizer(torch.optim.Optimizer):
    """An optimizer that `use_native` switches to a native kernel.

    Updates are limited by memory bandwidth. With master weights, the native kernels need a single
    pass: they read the gradients of the low-precision copies and also write the updated copies.

    Two optional attributes have the same effect as in torch's fused optimizers. Gradients are
    divided by `self.grad_scale`, and nothing changes if `self.found_inf` is 1.
    """

    _library: Library | None = None

    def use_native(self, library: Library, copies: Mapping[Tensor, Tensor]) -> None:
        """Switch to the native kernel.

        copies: bf16 copy of each fp32 parameter, updated by `step`; empty without master weights.
        """
        self._library = library
        self.copies = dict(copies)

    @property
    def updates_copies(self) -> bool:
        """Whether `step` reads the gradients of the low-precision copies and updates the copies."""
        return self._library is not None and bool(self.copies)

    def grad_norm(self) -> Tensor | None:
        """Return the L2 norm of all gradients (fp32), or None without the native kernel."""
        if self._library is None:
            return None
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [grad for grad in map(self.gradient, params) if grad is not None]
        values = [Values(grad.data_ptr(), grad.numel(), DTYPES[grad.dtype]) for grad in grads]
        total = self._library.call_all("sum_of_squares", values)
        return torch.tensor(total**0.5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._library is None:
            return super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None
        for copy in self.copies.values():
            copy.grad = None

    @property
    def skips_update(self) -> bool:
        """Whether `found_inf` is 1."""
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and bool(found_inf.item())

    @property
    def gradient_scale(self) -> float:
        """What gradients are divided by."""
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(scale.item())

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return a parameter's gradient, or that of its low-precision copy."""
        copy = self.copies.get(param)
        return copy.grad if param.grad is None and copy is not None else param.grad
