"""torch's AdamW, with optional native kernels (adamw_kernel.py, native/kernels/adamw.cc)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatoken.native.library import DTYPES, AdamWUpdate, Library
from megatoken.optim.adamw_kernel import update_group
from megatoken.system.torch_compat import foreach_add, foreach_norm


class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov & Hutter 2019), which `use_native` switches to our native kernel.

    The update is limited by memory bandwidth. With master weights, the native kernel needs a single
    pass: it reads the gradients of the low-precision copies and also writes the updated copies.
    """

    _is_native = False
    _library: Library | None = None
    _copies: Mapping[Tensor, Tensor] = {}

    def use_native(self, library: Library | None, copies: Mapping[Tensor, Tensor]) -> None:
        """Switch to the native kernel.

        library: of a CPU; None for the Triton kernel. copies: low-precision copy of each fp32
        parameter, updated by `step`; empty without master weights.
        """
        self._is_native = True
        self._library = library
        self._copies = dict(copies)

    @property
    def updates_copies(self) -> bool:
        """Whether `step` reads the gradients of the low-precision copies and updates the copies."""
        return bool(self._copies)

    def grad_norm(self) -> Tensor | None:
        """Return the L2 norm of all gradients (fp32), or None without the native kernel."""
        if not self._is_native:
            return None
        params = [param for group in self.param_groups for param in group["params"]]
        grads = [grad for grad in map(self._gradient, params) if grad is not None]
        if self._library is None:
            norm: Tensor = torch.linalg.vector_norm(torch.stack(foreach_norm(grads)))
            return norm
        total = 0.0
        for grad in grads:
            total += self._library.call("sum_of_squares", DTYPES[grad.dtype], grad, grad.numel())
        return torch.tensor(total**0.5)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Two optional attributes have the same effect as in torch's fused AdamW. Gradients are
        divided by `self.grad_scale`, and nothing changes if `self.found_inf` is 1.
        """
        if not self._is_native:
            return super().step(closure)
        found_inf = getattr(self, "found_inf", None)
        scale = getattr(self, "grad_scale", None)
        if self._library is None:
            return self._step_on_gpu(found_inf, scale)
        if found_inf is not None and found_inf.item():
            return None
        grad_scale = 1.0 if scale is None else scale.item()
        for group in self.param_groups:
            for param in group["params"]:
                grad = self._gradient(param)
                if grad is not None:
                    self._update(self._library, param, grad, group, grad_scale)
        return None

    def _step_on_gpu(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        device = self.param_groups[0]["params"][0].device
        found_inf = torch.zeros((), device=device) if found_inf is None else found_inf
        grad_scale = torch.ones((), device=device) if grad_scale is None else grad_scale
        for group in self.param_groups:
            rows = []
            for param in group["params"]:
                grad = self._gradient(param)
                if grad is not None:
                    # Without a low-precision copy, the kernel writes the weight twice.
                    copy = self._copies.get(param, param)
                    exp_avg, exp_avg_sq, step = (
                        self.state[param][key] for key in ("exp_avg", "exp_avg_sq", "step")
                    )
                    rows.append((param, exp_avg, exp_avg_sq, grad, copy, step))
            if rows:
                update_group(rows, group, found_inf, grad_scale)
                foreach_add([row[-1] for row in rows], 1 - found_inf)

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
        for copy in self._copies.values():
            copy.grad = None

    def _gradient(self, param: Tensor) -> Tensor | None:
        copy = self._copies.get(param)
        return copy.grad if param.grad is None and copy is not None else param.grad
