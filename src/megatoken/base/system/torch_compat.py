"""Wrap all private or undocumented names of torch that megatoken uses.

Names needed only by the dry run are looked up when they are first used. If a newer torch has moved
one of them, only the dry run fails, with a one-line error.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from megatoken.base.errors import ConfigError

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
    """Look up a name in DRY_RUN_NAMES. Raises ConfigError if this version of torch lacks it."""
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


def foreach_add(targets: tuple[Tensor, ...], terms: tuple[Tensor, ...]) -> None:
    """Add every term to its target in one call."""
    torch._foreach_add_(targets, terms)


def is_compiler_error(error: BaseException) -> bool:
    """Return whether torch.compile raised an error."""
    exceptions = import_module("torch._dynamo.exc")  # imports the compiler
    return isinstance(error, exceptions.TorchDynamoException)


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's `step` applies its attributes `found_inf` and `grad_scale`.

    Such a `step` divides gradients by `grad_scale`, and changes nothing if `found_inf` is 1.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def follow_found_inf(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Make `supports_found_inf` return the same for an optimizer as for its `inner` optimizer."""
    optimizer._step_supports_amp_scaling = supports_found_inf(inner)  # type: ignore[attr-defined]


def step_inner(optimizer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Copy `found_inf` and `grad_scale` from `optimizer` to `inner`, and step `inner`."""
    inner.found_inf = getattr(optimizer, "found_inf", None)  # type: ignore[attr-defined]
    inner.grad_scale = getattr(optimizer, "grad_scale", None)  # type: ignore[attr-defined]
    inner.step()


def fused_adamw_step(
    optimizer: torch.optim.Optimizer, found_inf: Tensor, grad_scale: Tensor | None
) -> None:
    """Step an optimizer, dividing gradients by `grad_scale`, or do nothing if `found_inf` is 1.

    Both are passed as attributes of the optimizer, as torch's GradScaler does. Raises ConfigError
    for an optimizer that would ignore them.
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
    """Return the overflow flags that `scaler.unscale_` has set, one tensor per device.

    A flag is > 0 if a gradient is not finite.
    """
    return list(scaler._found_inf_per_device(optimizer).values())


def flash_varlen(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    bounds: Tensor,
    longest: int,
    window: int = 0,
    keys: tuple[Tensor, int, Tensor] | None = None,
) -> Tensor:
    """Compute causal attention within each of the sequences of N tokens by FlashAttention-2.

    bounds: where each sequence begins, then N; int32. longest: upper bound of the lengths of
    sequences. window: number of latest keys that a query sees, or 0 for all. keys: bounds and
    longest of the M keys, if they differ from those of the queries, and the number of keys that each
    sequence uses.
    """
    key_bounds, key_longest, counts = keys or (bounds, longest, None)
    y_NHD: Tensor = torch.ops.aten._flash_attention_forward(
        *(q_NHD, k_MKD, v_MKD, bounds, key_bounds, longest, key_longest),
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        window_size_left=window - 1,
        window_size_right=None if keys else 0,
        seqused_k=counts,
    )[0]
    return y_NHD


def scaled_matmul(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, *, fast: bool
) -> None:
    """Write the product of two FP8 matrices times their scales to `out`.

    fast: whether Hopper GPUs may keep sums in fewer bits than fp32.
    """
    options: dict[str, Any] = {"out_dtype": out.dtype, "use_fast_accum": fast, "out": out}
    torch._scaled_mm(a, b, scale_a, scale_b, **options)


def mark_dynamic(tensor: Tensor) -> None:
    """Make torch.compile generate code for any length of the tensor's first dimension."""
    torch._dynamo.mark_dynamic(tensor, 0)


def abort_nccl() -> None:
    """Abort all NCCL process groups without waiting for running collectives."""
    distributed_c10d._abort_process_group()


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module's `compile()` method was called."""
    return bool(getattr(module, "_compiled_call_impl", None))


def uncompile(module: nn.Module) -> None:
    """Undo the `compile()` method for a module and its submodules."""
    for submodule in module.modules():
        submodule._compiled_call_impl = None


@contextmanager
def uncompiled(module: M) -> Iterator[M]:
    """Use a module uncompiled inside the context, so that new shapes do not recompile it."""
    plain: M = getattr(module, "_orig_mod", module)  # what torch.compile(module) wraps
    compiled = any(map(is_compiled, plain.modules()))
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield plain


def without_fake_tensors() -> AbstractContextManager[Any]:
    """Return a context in which a dry run creates real tensors; it has no effect elsewhere."""
    try:
        context: AbstractContextManager[Any] = __getattr__("unset_fake_temporarily")()
    except ConfigError:
        return nullcontext()
    return context


def record_cuda_memory() -> None:
    """Start to record the allocations on CUDA devices."""
    torch.cuda.memory._record_memory_history()


def write_cuda_memory(path: Path) -> None:
    """Write what is allocated and what was recorded, and stop recording."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    torch.cuda.memory._record_memory_history(enabled=None)
