"""torch's AdamW, with an optional native kernel for CPUs (native/kernels/adamw.cc)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatoken.native.library import DTYPES, AdamWUpdate, Library


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW (Loshchilov & Hutter 2019), or the native kernel after `use_native`.

    The update is memory-bound. The native kernel passes over memory once: it reads gradients from
    low-precision copies of the parameters and writes the updated copies.
    """

    _library: Library | None = None

    def use_native(self, library: Library, copies: Mapping[Tensor, Tensor]) -> None:
        """Switch to the native kernel. copies: parameters' bf16 copies, which `step` updates."""
        self._library = library
        self._copies = dict(copies)

    @property
    def updates_copies(self) -> bool:
        """Whether `step` reads gradients from the low-precision copies and writes their values."""
        return self._library is not None and bool(self._copies)

    def grad_norm(self) -> Tensor | None:
        """Return the L2 norm of all gradients (fp32), or None if torch computes the update."""
        if self._library is None:
            return None
        params = [param for group in self.param_groups for param in group["params"]]
        gradients = [
            gradient for param in params if (gradient := self._gradient(param)) is not None
        ]
        total = sum(
            self._library.call("sum_of_squares", DTYPES[g.dtype], g, g.numel()) for g in gradients
        )
        return torch.tensor(total**0.5)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Bad steps: see `fused_adamw_step`."""
        if self._library is None:
            return super().step(closure)
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return None
        for group in self.param_groups:
            (beta1, beta2), grad_scale = group["betas"], 1.0 if scale is None else scale.item()
            for param in group["params"]:
                if (gradient := self._gradient(param)) is None:
                    continue
                state = self.state[param]
                state["step"] += 1
                step = state["step"].item()
                corrections = 1 - beta1**step, 1 - beta2**step
                rates = group["lr"], beta1, beta2, group["eps"], group["weight_decay"]
                update = AdamWUpdate(*rates, *corrections, grad_scale)
                moments, copy = (state["exp_avg"], state["exp_avg_sq"]), self._copies.get(param)
                dtype, n = DTYPES[gradient.dtype], param.numel()
                self._library.call(
                    "adamw", param, *moments, gradient.contiguous(), dtype, copy, n, update
                )
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for copy in self._copies.values() if self._library is not None else ():
            copy.grad = None

    def _gradient(self, param: Tensor) -> Tensor | None:
        copy = self._copies.get(param)
        return copy.grad if param.grad is None and copy is not None else param.grad
