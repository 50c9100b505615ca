"""Optimizers by name, and the parameter groups that they update.

An entry of the kind "optimizer" (base/rooms.py) is an `OptimizerSpec`: how to build it, the size of
its state per parameter, and whether it needs full matrices. Learning rates, checkpoints, sharding
and memory estimates then work without further changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatoken.base.config.schema import OptimConfig
from megatoken.base.errors import ConfigError
from megatoken.base.rooms import find_entry, load_entry
from megatoken.base.system.torch_compat import fused_adamw_step
from megatoken.optim.costs import STATE_BYTES

# Keys: params, weight_decay, and lr_scale, by which the scheduled learning rate is multiplied.
ParamGroup = dict[str, Any]


MatrixFn = Callable[[list[Tensor]], list[Tensor]]  # takes and returns full matrices of equal shapes


class Matrices(Protocol):
    """Access to a model's hidden matrices in full, even if they are sharded over processes.

    names: hidden parameters of which this process has a shard. dtype: the dtype in which updates
    are computed.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def map(self, function: MatrixFn, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Apply `function` to full matrices, and return this process's shards of the results.

        All processes must call it. They divide the work: in each process, `function` gets a list of
        only some of the matrices.

        tensors: this process's shards of the matrices, in the order of `names`.
        """


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer whose last group are full hidden matrices, with a momentum that is scheduled."""

    matrices: Matrices


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """How to build an optimizer, and what the rest of the system must know about it.

    build: function of (groups, config, implementation) that returns the optimizer. It may set
        `lr_scale` of a group, by which the scheduled learning rate is multiplied.
    bytes_per_param: bytes of fp32 state per parameter, or a pair of them: for parameters in hidden
        matrices and for all others.
    hidden_group: whether `build` gets the hidden matrices as a separate, last group. The group's
        `matrices` gives access to them in full, even if they are sharded.
    whole_matrices: whether the update needs full matrices but cannot gather them, so that the model
        must not be sharded.
    """

    build: Callable[[list[ParamGroup], OptimConfig, str], torch.optim.Optimizer]
    bytes_per_param: int | tuple[int, int]
    hidden_group: bool = False
    whole_matrices: bool = False


def find_optimizer(name: str) -> OptimizerSpec:
    """Return the optimizer of this name. Raises ConfigError if there is none."""
    spec: OptimizerSpec = find_entry("optimizer", name, "optim.name")
    return spec


def build_optimizer(
    model: nn.Module | Mapping[str, Tensor],
    optim: OptimConfig,
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    implementation: str = "auto",
    matrices: Matrices | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer that `optim` names.

    Raises ConfigError for an unknown name, or if the optimizer needs full matrices and the model is
    sharded.

    model: the model, or this process's shards of its parameters by name.
    sizes: shapes of the full parameters, if `model` holds shards.
    implementation: how torch's AdamW computes: `loop`, `foreach`, `fused`, or `auto`, which is
        fused where the device supports it.
    matrices: access to the full hidden matrices. None only if the model is unsharded; their updates
        are then computed in fp32.
    """
    spec = find_optimizer(optim.name)
    params = dict(model.named_parameters()) if isinstance(model, nn.Module) else dict(model)
    sizes = sizes or {name: tuple(param.shape) for name, param in params.items()}
    if spec.whole_matrices and any(
        tuple(param.shape) != tuple(sizes[name]) for name, param in params.items()
    ):
        what = f"{optim.name} needs full matrices, and the model is sharded"
        raise ConfigError(
            what, "optim.name", "set machine.sharding=none and machine.tensor_parallel=1"
        )
    hidden: list[ParamGroup] = []
    if spec.hidden_group:
        if matrices is None:
            assert isinstance(model, nn.Module), "matrices must be passed with shards"
            matrices = load_entry("matrices", "whole")(model)
        assert matrices is not None
        hidden_params = [params.pop(name) for name in matrices.names]
        hidden = [
            {"params": hidden_params, "weight_decay": optim.weight_decay, "matrices": matrices}
        ]
    # Matrices and embeddings decay; vectors and scalars do not (Brown et al. 2020).
    groups: list[ParamGroup] = [
        {"params": [], "weight_decay": w} for w in (optim.weight_decay, 0.0)
    ]
    for name, param in params.items():
        groups[len(sizes[name]) < 2]["params"].append(param)
    optimizer = spec.build(groups + hidden, optim, implementation)
    set_lr(optimizer, optim.lr)
    return optimizer


def adopt_optimizer(optimizer: torch.optim.Optimizer, base_lr: float) -> None:
    """Record the learning rates of a user's optimizer as `lr_scale`, multiples of `base_lr`."""
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", group["lr"] / base_lr if base_lr else 1.0)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set every group's learning rate to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float) -> None:
    """Set Muon's momentum. Does nothing for other optimizers."""
    if isinstance(optimizer, MatrixOptimizer):
        optimizer.param_groups[-1]["momentum"] = momentum


class AdamW(torch.optim.AdamW):
    """torch's AdamW. `build_adamw` allocates its moments before the first step."""


class Update:
    """Applies the gradients of a step, by the optimizer's own operations.

    Tuning may replace it by a subclass that computes the same result (optim/native.py).

    updates_copies: whether `step` reads the gradients of the weights' low-precision copies, and
        updates the copies.
    """

    updates_copies = False

    def grad_norm(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Return the L2 norm of all gradients (fp32), or None if the caller is to compute it."""
        return None

    def step(
        self, optimizer: torch.optim.Optimizer, found_inf: Tensor, grad_scale: Tensor | None
    ) -> None:
        """Divide gradients by `grad_scale` and update, or do nothing if `found_inf` is 1."""
        fused_adamw_step(optimizer, found_inf, grad_scale)


def build_adamw(groups: list[ParamGroup], optim: OptimConfig, implementation: str) -> AdamW:
    """Build AdamW with torch's kernel."""
    params = [param for group in groups for param in group["params"]]
    if implementation in ("auto", "native"):
        implementation = "fused" if params[0].device.type in ("cuda", "cpu", "mps") else "foreach"
    fused = implementation == "fused"
    betas = (optim.beta1, optim.beta2)
    foreach = implementation == "foreach"
    optimizer = AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=fused, foreach=foreach)
    # torch allocates the moments in its first step; allocated here, they count when memory is
    # measured.
    for param in params:
        optimizer.state[param] = {
            "step": torch.zeros((), device=param.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    return optimizer


ADAMW = OptimizerSpec(build=build_adamw, bytes_per_param=STATE_BYTES["adamw"])
