"""Optimizers by name, and which parameters they decay.

A new optimizer is one `register_optimizer` call: how it is built, what it keeps for every parameter, and how it gets
whole matrices if it needs them. Everything else (learning rates, checkpoints, sharding, memory estimates) follows from
that entry.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatoken.config.fields import register_choice
from megatoken.config.schema import OptimConfig
from megatoken.errors import ConfigError
from megatoken.optim.adamw import AdamW
from megatoken.optim.costs import STATE_BYTES
from megatoken.optim.muon import Matrices, Muon, WholeMatrices, list_hidden_matrices

ParamGroup = dict[
    str, Any
]  # params, weight_decay; lr_scale: the group's rate as a multiple of the schedule's


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """What the rest of the system needs to know of an optimizer.

    build: (groups, config, implementation) -> optimizer; it may set `lr_scale` in a group (default 1).
    state_keys: tensors kept for a parameter, of its shape; bytes_per_param: their size in fp32, or two, for matrices of
    hidden layers and for all others. hidden_group: these matrices are a group of their own, the last, whose `matrices`
    (optim/muon.py) gives them whole on any number of processes. whole_matrices: the update of a matrix needs all of its
    rows and does not get them so: it cannot be sharded.
    """

    build: Callable[[list[ParamGroup], OptimConfig, str], torch.optim.Optimizer]
    state_keys: tuple[str, ...]
    bytes_per_param: int | tuple[int, int]
    hidden_group: bool = False
    whole_matrices: bool = False


OPTIMIZERS: dict[str, OptimizerSpec] = {}


def register_optimizer(name: str, spec: OptimizerSpec) -> None:
    """Make an optimizer available as `optim.name=NAME`. Raises ConfigError for the name of a built-in one."""
    if name in BUILT_IN:
        raise ConfigError(
            f"{name!r} is a built-in optimizer", "register_optimizer", "choose another name"
        )
    register_choice("optim.name", name)
    OPTIMIZERS[name] = spec
    size = spec.bytes_per_param
    STATE_BYTES[name] = (size, size) if isinstance(size, int) else size


def find_optimizer(name: str) -> OptimizerSpec:
    """The optimizer of that name. Raises ConfigError with the known names."""
    if name not in OPTIMIZERS:
        raise ConfigError(
            f"unknown optimizer {name!r}", "optim.name", f"choose one of {', '.join(OPTIMIZERS)}"
        )
    return OPTIMIZERS[name]


def build_optimizer(
    model: nn.Module | Mapping[str, Tensor],
    optim: OptimConfig,
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    implementation: str = "auto",
    matrices: Matrices | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that `optim` names over a model's parameters, or over the local shards of them by name.

    sizes: shapes of the whole parameters, where `model` holds shards. implementation: for AdamW `loop`, `foreach` or
    `fused`, torch's own; `auto` is fused where the device has it. matrices: those of hidden layers, by default of a
    model that is whole, in fp32. Raises ConfigError for an unknown name, or when the optimizer needs whole matrices and
    does not get them.
    """
    spec = find_optimizer(optim.name)
    params = dict(model.named_parameters()) if isinstance(model, nn.Module) else dict(model)
    sizes = sizes or {name: tuple(param.shape) for name, param in params.items()}
    if spec.whole_matrices and any(
        tuple(param.shape) != tuple(sizes[name]) for name, param in params.items()
    ):
        what = f"{optim.name} needs whole matrices, which are sharded here"
        raise ConfigError(
            what, "optim.name", "set machine.sharding=none and machine.tensor_parallel=1"
        )
    hidden: list[ParamGroup] = []
    if spec.hidden_group:
        if matrices is None:
            if not isinstance(model, nn.Module):
                what = f"{optim.name} does not know which of these parameters are matrices of hidden layers"
                raise ConfigError(what, "build_optimizer", "pass the model, or `matrices`, too")
            matrices = WholeMatrices(list_hidden_matrices(model))
        own = [params.pop(name) for name in matrices.names]
        hidden = [{"params": own, "weight_decay": optim.weight_decay, "matrices": matrices}]
    groups = group_parameters(params, sizes, optim.weight_decay) + hidden
    optimizer = spec.build(groups, optim, implementation)
    set_lr(optimizer, optim.lr)
    return optimizer


def group_parameters(
    params: Mapping[str, Tensor], sizes: Mapping[str, Sequence[int]], weight_decay: float
) -> list[ParamGroup]:
    """Two groups: matrices and embeddings are decayed, norms and biases are not (Brown et al. 2020)."""
    matrices = {name for name in params if len(sizes[name]) >= 2}
    return [
        {
            "params": [params[name] for name in params if name in matrices],
            "weight_decay": weight_decay,
        },
        {"params": [params[name] for name in params if name not in matrices], "weight_decay": 0.0},
    ]


def adopt_optimizer(optimizer: torch.optim.Optimizer, base_lr: float) -> None:
    """Prepare an optimizer that the user built: its groups keep their rates as multiples of the schedule's peak."""
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", group["lr"] / base_lr if base_lr else 1.0)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate: the schedule's times the group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float) -> None:
    """Set Muon's momentum; other optimizers keep theirs."""
    if isinstance(optimizer, Muon):
        optimizer.param_groups[-1]["momentum"] = momentum


def build_adamw(groups: list[ParamGroup], optim: OptimConfig, implementation: str) -> AdamW:
    """AdamW, whose kernel the machine's autotuning may replace (train/kernel_autotune.py)."""
    params = [param for group in groups for param in group["params"]]
    if implementation in ("auto", "native"):
        implementation = "fused" if params[0].device.type in ("cuda", "cpu", "mps") else "foreach"
    fused = implementation == "fused"
    betas = (optim.beta1, optim.beta2)
    foreach = implementation == "foreach"
    optimizer = AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=fused, foreach=foreach)
    # torch makes the moments in the first step; made here, they count when memory is measured before it.
    for param in params:
        moments = {key: torch.zeros_like(param) for key in ADAMW_KEYS}
        optimizer.state[param] = {
            "step": torch.zeros((), device=param.device if fused else "cpu"),
            **moments,
        }
    return optimizer


def build_muon(groups: list[ParamGroup], optim: OptimConfig, implementation: str) -> Muon:
    """Muon for the last group, AdamW for the others. The ratio of their rates is fixed."""
    *others, hidden = groups
    hidden["lr_scale"] = optim.matrix_lr / optim.lr if optim.lr else 1.0
    adamw, matrices = build_adamw(others, optim, implementation), hidden.pop("matrices")
    numbers = {"lr": optim.lr, "momentum": optim.momentum}
    return Muon(adamw, hidden, matrices, **numbers, cautious_decay=optim.cautious_decay)


ADAMW_KEYS = ("exp_avg", "exp_avg_sq")
OPTIMIZERS["adamw"] = OptimizerSpec(
    build=build_adamw, state_keys=ADAMW_KEYS, bytes_per_param=STATE_BYTES["adamw"]
)
OPTIMIZERS["muon"] = OptimizerSpec(
    build=build_muon,
    state_keys=("momentum_buffer", *ADAMW_KEYS),
    bytes_per_param=STATE_BYTES["muon"],
    hidden_group=True,
)
BUILT_IN = frozenset(OPTIMIZERS)
