"""All private or undocumented names of torch that megatoken uses.

Names that only the dry run needs are looked up when first used, so that one that a newer torch has
moved breaks only the dry run, with a one-line error.
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
READ_BY_HOST = torch.ops.aten._local_scalar_dense.default  # a tensor's value is read by the host
TESTED = "install torch 2.13, which megatoken is tested with"


def __getattr__(name: str) -> Any:
    """Return a name of DRY_RUN_NAMES. Raises ConfigError if this torch lacks it."""
    if name not in DRY_RUN_NAMES:
        raise AttributeError(name)
    try:
        return getattr(import_module(DRY_RUN_NAMES[name]), name)
    except (ImportError, AttributeError):
        what = f"torch {torch.__version__} has no {DRY_RUN_NAMES[name]}.{name}, which dry runs need"
        raise ConfigError(what, "torch", TESTED) from None


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy every source to its target in one call, converting dtypes."""
    torch._foreach_copy_(list(targets), list(sources))


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` applies `found_inf` and `grad_scale`."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def declare_found_inf(optimizer: torch.optim.Optimizer) -> None:
    """Declare that an optimizer's step applies `found_inf` and `grad_scale` itself."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def follow_found_inf(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Declare that an optimizer applies them if `inner`, which it steps, does."""
    optimizer._step_supports_amp_scaling = supports_found_inf(inner)  # type: ignore[attr-defined]


def step_inner(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Step `inner` with the `found_inf` and `grad_scale` of `optimizer`."""
    inner.found_inf = getattr(optimizer, "found_inf", None)  # type: ignore[attr-defined]
    inner.grad_scale = getattr(optimizer, "grad_scale", None)  # type: ignore[attr-defined]
    inner.step()


def fused_adamw_step(
    optimizer: torch.optim.Optimizer, found_inf: Tensor, grad_scale: Tensor | None
) -> None:
    """Step a fused AdamW: divide gradients by `grad_scale`, and change nothing if `found_inf` is 1.

    torch's GradScaler sets both as attributes of optimizers that support them. Raises ConfigError
    for others, which would not skip the step.
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
    """Return the flags of `scaler.unscale_`, one per device: > 0 if a gradient is not finite."""
    return list(scaler._found_inf_per_device(optimizer).values())


def abort_nccl() -> None:
    """Leave all process groups without waiting for collectives in flight."""
    distributed_c10d._abort_process_group()


def uncompile(module: nn.Module) -> None:
    """Undo `submodule.compile()` for all submodules."""
    for submodule in module.modules():
        submodule._compiled_call_impl = None


@contextmanager
def uncompiled(module: M) -> Iterator[M]:
    """Yield the module without torch.compile, which would recompile for every new shape."""
    plain: M = getattr(module, "_orig_mod", module)  # what torch.compile(module) wraps
    compiled = any(getattr(submodule, "_compiled_call_impl", None) for submodule in plain.modules())
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield plain


def without_fake_tensors() -> AbstractContextManager[Any]:
    """Make real tensors inside a dry run; no effect elsewhere."""
    try:
        context: AbstractContextManager[Any] = __getattr__("unset_fake_temporarily")()
    except ConfigError:
        return nullcontext()
    return context
