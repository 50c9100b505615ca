"""Parameters into optimizer groups: matrices and embeddings are decayed, norms and biases are not (GPT-3's recipe)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatoken.config import Optim


def build_optimizer(
    kept: Mapping[str, Tensor], sizes: Mapping[str, Sequence[int]], optim: Optim, *, form: str = "auto"
) -> torch.optim.AdamW:
    """AdamW over every parameter, or what of it is kept here, in two groups. sizes: of the whole parameters.

    form: `loop`, `foreach` or `fused`: torch's implementations, a tensor, a list of tensors or one kernel at a time;
    auto is fused where the device has it. The learning rate is set at every step by whoever steps.
    """
    parameters = list(kept.values())
    matrices = {name for name in kept if len(sizes[name]) >= 2}
    groups = [
        {"params": [kept[name] for name in kept if name in matrices], "weight_decay": optim.weight_decay},
        {"params": [kept[name] for name in kept if name not in matrices], "weight_decay": 0.0},
    ]
    if form == "auto":
        form = "fused" if parameters[0].device.type in ("cuda", "cpu", "mps") else "foreach"
    optimizer = torch.optim.AdamW(
        groups,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=form == "fused",
        foreach=form == "foreach",
    )
    # torch makes the moments at the first step; made now, whatever is measured before it is measured beside them.
    for parameter in parameters:
        steps = torch.zeros((), device=parameter.device if form == "fused" else "cpu")
        moments = {part: torch.zeros_like(parameter) for part in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": steps, **moments}
    return optimizer
