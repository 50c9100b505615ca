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
        """Switch to the native kernel. copies: bf16 copies of parameters, which `step` updates."""
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
        total = 0.0
        for grad in map(self._gradient, params):
            if grad is not None:
                total += self._library.call(
                    "sum_of_squares", DTYPES[grad.dtype], grad, grad.numel()
                )
        return torch.tensor(total**0.5)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Bad steps: see `fused_adamw_step`."""
        if self._library is None:
            return super().step(closure)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return None
        scale = getattr(self, "grad_scale", None)
        grad_scale = 1.0 if scale is None else scale.item()
        for group in self.param_groups:
            for param in group["params"]:
                grad = self._gradient(param)
                if grad is not None:
                    self._update(self._library, param, grad, group, grad_scale)
        return None

    def _update(
        self, library: Library, param: Tensor, grad: Tensor, group: dict[str, Any], scale: float
    ) -> None:
        state = self.state[param]
        state["step"] += 1
        step = state["step"].item()
        beta1, beta2 = group["betas"]
        rates = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        update = AdamWUpdate(*rates, 1 - beta1**step, 1 - beta2**step, scale)
        library.call(
            "adamw",
            param,
            state["exp_avg"],
            state["exp_avg_sq"],
            grad.contiguous(),
            DTYPES[grad.dtype],
            self._copies.get(param),
            param.numel(),
            update,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for copy in self._copies.values() if self._library is not None else ():
            copy.grad = None

    def _gradient(self, param: Tensor) -> Tensor | None:
        copy = self._copies.get(param)
        return copy.grad if param.grad is None and copy is not None else param.grad
