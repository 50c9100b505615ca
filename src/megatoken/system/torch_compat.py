"""Every private or undocumented name of torch that megatoken uses.

Those of the dry run are looked up when they are first used: one that a newer torch has moved breaks it alone, in one
line.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from megatoken.errors import ConfigError

M = TypeVar("M", bound=nn.Module)
DRY_RUN_NAMES = {
    "active_fake_mode": "torch._guards",
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor",
    "CollectiveOp": "torch.distributed._tools.fake_collectives",
    "FakeStore": "torch.testing._internal.distributed.fake_pg",
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "tree_leaves": "torch.utils._pytree",
}
READ_BY_HOST = (
    torch.ops.aten._local_scalar_dense.default
)  # optimizers read their step, update_on_host the loss
TESTED = "install torch 2.13, which megatoken is tested with"


def __getattr__(name: str) -> Any:
    """A name of DRY_RUN_NAMES. Raises ConfigError where this torch does not have it."""
    if name not in DRY_RUN_NAMES:
        raise AttributeError(name)
    try:
        return getattr(import_module(DRY_RUN_NAMES[name]), name)
    except (ImportError, AttributeError):
        what = f"torch {torch.__version__} has no {DRY_RUN_NAMES[name]}.{name}, which dry runs need"
        raise ConfigError(what, "torch", TESTED) from None


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source into its target in one call, converting the dtype."""
    torch._foreach_copy_(list(targets), list(sources))


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step heeds `found_inf` and `grad_scale`, as those of torch's fused optimizers do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def declare_found_inf(optimizer: torch.optim.Optimizer) -> None:
    """Declare that an optimizer's step heeds them."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def follow_found_inf(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Declare that an optimizer heeds them where `inner`, which it steps, does."""
    optimizer._step_supports_amp_scaling = supports_found_inf(inner)  # type: ignore[attr-defined]


def step_inner(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Step `inner` by the `found_inf` and `grad_scale` that `optimizer` was given."""
    inner.found_inf = getattr(optimizer, "found_inf", None)  # type: ignore[attr-defined]
    inner.grad_scale = getattr(optimizer, "grad_scale", None)  # type: ignore[attr-defined]
    inner.step()


def fused_adamw_step(
    optimizer: torch.optim.Optimizer, found_inf: Tensor, grad_scale: Tensor | None
) -> None:
    """Step a fused AdamW: gradients are divided by `grad_scale`; nothing changes where `found_inf` is 1.

    The two are the attributes that torch's GradScaler sets on an optimizer that says it supports them. Raises
    ConfigError for others: a step that should be left out would reach the weights.
    """
    if not supports_found_inf(optimizer):
        what = f"the fused AdamW of torch {torch.__version__} ignores found_inf or grad_scale"
        raise ConfigError(what, "optim", TESTED)
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
    optimizer.step()


def scaler_found_inf(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> list[Tensor]:
    """The flags of `scaler.unscale_`, one a device: above 0 where a gradient is not finite. May be changed in place."""
    return list(scaler._found_inf_per_device(optimizer).values())


def abort_nccl() -> None:
    """Leave all process groups without waiting for collectives in flight; torch has no public way for all at once."""
    distributed_c10d._abort_process_group()


def uncompile(module: nn.Module) -> None:
    """Undo `submodule.compile()` for all submodules; torch has no public way."""
    for submodule in module.modules():
        submodule._compiled_call_impl = None


@contextmanager
def uncompiled(module: M) -> Iterator[M]:
    """The module without torch.compile (of the whole or of submodules), which would recompile for every new shape."""
    plain: M = getattr(module, "_orig_mod", module)  # what torch.compile(module) wraps
    compiled = any(getattr(submodule, "_compiled_call_impl", None) for submodule in plain.modules())
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield plain


def without_fake_tensors() -> AbstractContextManager[Any]:
    """Inside a dry run make real tensors; elsewhere, and where torch has no such switch, do nothing."""
    try:
        context: AbstractContextManager[Any] = __getattr__("unset_fake_temporarily")()
    except ConfigError:
        return nullcontext()
    return context
