"""Lion: steps by the sign of a mix of momentum and gradient, with one momentum a parameter (Chen et al. 2023)."""

from typing import Any

import torch

from megatoken.system.torch_compat import declare_found_inf


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay: w <- (1 - lr wd) w - lr sign(beta1 m + (1 - beta1) g), with m of before.

    Then m <- beta2 m + (1 - beta2) g. As torch's fused optimizers it divides gradients by `self.grad_scale` and leaves
    everything as it is where `self.found_inf` is 1, if these tensors are set.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
        declare_found_inf(self)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                gradient = param.grad if grad_scale is None else param.grad / grad_scale
                momentum = self.state[param]["exp_avg"]
                update = gradient.lerp(momentum, beta1).sign_()
                after = momentum.lerp(gradient, 1 - beta2)
                weights = (param * (1 - lr * group["weight_decay"])).sub_(update, alpha=lr)
                for old, new in ((param, weights), (momentum, after)):
                    old.copy_(new if found_inf is None else torch.where(found_inf > 0, old, new))
