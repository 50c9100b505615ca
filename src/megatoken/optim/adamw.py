"""torch's AdamW, with an optional native kernel for CPUs (model/native/kernels/adamw.cc)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatoken.model.native.library import DTYPES, AdamWUpdate, addresses
from megatoken.optim.native import NativeOptimizer


class AdamW(NativeOptimizer, torch.optim.AdamW):
    """torch's AdamW (Loshchilov & Hutter 2019), which `use_native` switches to our native kernel."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        if self._library is None:
            return super().step(closure)
        if self.skips_update:
            return None
        updates = [
            self._update(param, grad, group)
            for group in self.param_groups
            for param in group["params"]
            if (grad := self.gradient(param)) is not None
        ]
        self._library.call_all("adamw", updates)
        return None

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> AdamWUpdate:
        state = self.state[param]
        state["step"] += 1
        step = state["step"].item()
        beta1, beta2 = group["betas"]
        tensors = param, state["exp_avg"], state["exp_avg_sq"], grad, self.copies.get(param)
        return AdamWUpdate(
            *addresses(tensors),
            param.numel(),
            DTYPES[grad.dtype],
            *(group["lr"], beta1, beta2, group["eps"], group["weight_decay"]),
            *(1 - beta1**step, 1 - beta2**step, self.gradient_scale),
        )
