"""torch's AdamW, with an optional native kernel for CPUs (native/kernels/adamw.cc)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatoken.native.library import DTYPES, AdamWUpdate, Library


class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov & Hutter 2019), which `use_native` switches to our native kernel.

    The update is limited by memory bandwidth. With master weights, the native kernel needs a single
    pass: it reads the gradients of the low-precision copies and also writes the updated copies.
    """

    _library: Library | None = None

    def use_native(self, library: Library, copies: Mapping[Tensor, Tensor]) -> None:
        """Switch to the native kernel.

        copies: bf16 copy of each fp32 parameter, updated by `step`; empty without master weights.
        """
        self._library = library
        self._copies = dict(copies)

    @property
    def updates_copies(self) -> bool:
        """Whether `step` reads the gradients of the low-precision copies and updates the copies."""
        return self._library is not None and bool(self._copies)

    def grad_norm(self) -> Tensor | None:
        """Return the L2 norm of all gradients (fp32), or None without the native kernel."""
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
        """Update all parameters that have a gradient.

        Two optional attributes have the same effect as in torch's fused AdamW. Gradients are
        divided by `self.grad_scale`, and nothing changes if `self.found_inf` is 1.
        """
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
