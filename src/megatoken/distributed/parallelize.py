"""Turn a plain GPT into one that computes with other processes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.system.device import Device
from megatoken.base.system.torch_compat import without_fake_tensors
from megatoken.distributed.comm import Comm, peer_errors
from megatoken.distributed.grad_reduce import copy_from_flat
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.distributed.tensor_parallel import apply_tensor_parallel, tp_slice
from megatoken.distributed.tensor_slice import TensorSlice, chunk, is_dtensor
from megatoken.model.gpt import GPT, set_activation_checkpointing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True, kw_only=True)
class ShardedParams:
    """The slices of a model's parameters that this process holds, by parameter name.

    A parameter without a slice in this process is only in full_shapes.

    trained: parameters of the model that computes; DTensors if sharded.
    local_params: plain tensors that the optimizer updates and checkpoints store.
    slices: for each of local_params, its slice of the full parameter.
    full_shapes: shapes of all full parameters.
    n_copies: how many processes hold the same slice.
    tp_partial: parameters whose gradients must be summed over tensor-parallel ranks.
    mesh: None if the model is unsharded.
    """

    dims: ParallelDims
    trained: Mapping[str, Tensor]
    local_params: Mapping[str, Tensor]
    slices: Mapping[str, TensorSlice]
    full_shapes: Mapping[str, tuple[int, ...]]
    n_copies: Mapping[str, int]
    tp_partial: frozenset[str] = frozenset()
    mesh: "DeviceMesh | None" = None

    @property
    def updated(self) -> dict[str, Tensor]:
        """The local_params that are not frozen."""
        params = self.local_params.items()
        return {name: param for name, param in params if self.trained[name].requires_grad}

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The process group of this rank's replicas; None means all processes."""
        return None if self.mesh is None else self.mesh["dp_replicate"].get_group()

    def is_first_copy(self, name: str) -> bool:
        """Return whether this is the first of the ranks that hold the same slice of a parameter."""
        dims = self.dims
        is_first_replica = dims.dp_rank < dims.dp_shard
        is_tp_split = self.n_copies[name] == dims.dp_replicate
        return is_first_replica and (is_tp_split or dims.tp_rank == 0)

    def copy_from_full(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Set the local parameters from (name, full tensor) pairs."""
        with torch.no_grad():
            for name, full in values:
                if name in self.local_params:
                    self.local_params[name].copy_(self.slices[name].take(full))

    def gather_full(
        self, comm: Comm, dtype: torch.dtype = torch.float32, *, on_all: bool = False
    ) -> Iterable[tuple[str, Tensor]]:
        """Yield (name, full tensor in `dtype`) of every parameter, one at a time, sorted by name.

        If the model is sharded, all ranks must iterate over it, and without `on_all` the tensors
        are valid only on rank 0.
        """
        device = next(iter(self.local_params.values())).device
        for name, shape in sorted(self.full_shapes.items()):
            if self.dims.is_unsharded:
                yield name, self.local_params[name].detach().to(dtype)
                continue
            full = torch.zeros(shape, dtype=dtype, device=device)
            if name in self.local_params and self.is_first_copy(name):
                self.slices[name].put(full, self.local_params[name].detach())
            # One process has each value and the others have zeros. Summing bytes preserves -0.0.
            bits = full.view(-1).view(torch.uint8)
            with peer_errors(comm.dist_env):
                if on_all:
                    dist.all_reduce(bits)
                else:
                    dist.reduce(bits, dst=0)
            yield name, full

    def set_grad_sync(self, model: nn.Module, *, last: bool) -> None:
        """Set which gradients FSDP reduces in the next micro-batch, and when it frees weights.

        last: whether it is the last micro-batch of the step.
        """
        if self.dims.dp_shard == 1:
            return
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last or self.dims.sharding != "zero1")
            model.set_requires_all_reduce(last)
            model.set_reshard_after_backward(last or self.dims.sharding in ("zero3", "hybrid"))

    def all_reduce_tp_grads(self, comm: Comm) -> None:
        """Sum the gradients in `tp_partial` over tensor-parallel ranks with one all-reduce."""
        params = [self.local_params[name] for name in self.local_params if name in self.tp_partial]
        gradients = [param.grad for param in params if param.grad is not None]
        if not gradients or self.mesh is None:
            return
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        with peer_errors(comm.dist_env):
            dist.all_reduce(flat, group=self.mesh["tp"].get_group())
        copy_from_flat(flat, gradients)

    def global_grad_norm(self, comm: Comm) -> Tensor:
        """Return the L2 norm of the full model's gradient, the same on every process."""
        by_copies: dict[int, list[Tensor]] = {}
        for name, param in self.local_params.items():
            if param.grad is not None:
                by_copies.setdefault(self.n_copies[name], []).append(param.grad)
        if self.dims.is_unsharded:
            gradients = [gradient for group in by_copies.values() for gradient in group]
            return nn.utils.get_total_norm(gradients)
        squares = torch.zeros((), device=next(iter(self.local_params.values())).device)
        for n_copies, gradients in by_copies.items():
            squares += nn.utils.get_total_norm(gradients) ** 2 / n_copies
        return comm.sum(squares).sqrt()


def parallelize(
    model: GPT, dims: ParallelDims, device: Device, *, activation_checkpointing: str = "none"
) -> ShardedParams:
    """Move a model to the device, shard it in place by `dims`, and return the local slices.

    The order is fixed:

    1. Tensor parallelism comes first, because it replaces weights that the next two steps wrap.
    2. Activation checkpointing wraps layers, to run them again in the backward.
    3. FSDP2 comes last, so that its hooks gather weights outside of what is run again.

    An unsharded model is only moved. A model on the meta device gets uninitialized storage.
    """
    full_shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    tensors = [*model.parameters(), *model.buffers()]
    is_meta = any(param.is_meta for param in model.parameters())
    # Fake tensors of a dry run cannot be moved.
    if not is_meta and any(tensor.device != device.torch_device for tensor in tensors):
        model.to(device.torch_device)
    mesh = None
    tp_partial: frozenset[str] = frozenset()
    if not dims.is_unsharded:
        from torch.distributed.device_mesh import init_device_mesh

        sizes = (dims.dp_replicate, dims.dp_shard, dims.tp_size)
        with without_fake_tensors():  # a dry run fakes the weights, not the mesh
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    if mesh is not None and dims.tp_size > 1:
        apply_tensor_parallel(model, mesh["tp"], dims)
        tp_partial = frozenset(
            name for name, param in model.named_parameters() if not is_dtensor(param)
        )
    set_activation_checkpointing(model, activation_checkpointing)
    if mesh is not None and dims.dp_shard > 1:
        axes = mesh["dp_replicate", "dp_shard"] if dims.dp_replicate > 1 else mesh["dp_shard"]
        apply_fsdp(model, axes, dims, device)
    if is_meta:
        model.to_empty(device=device.torch_device)
    return _collect_params(model, dims, full_shapes, tp_partial, mesh)


def _collect_params(
    model: GPT,
    dims: ParallelDims,
    full_shapes: Mapping[str, tuple[int, ...]],
    tp_partial: frozenset[str],
    mesh: "DeviceMesh | None",
) -> ShardedParams:
    trained: dict[str, Tensor] = {}
    local_params: dict[str, Tensor] = {}
    slices: dict[str, TensorSlice] = {}
    n_copies: dict[str, int] = {}
    for name, param in model.named_parameters():
        shape = full_shapes[name]
        local = local_slice(name, shape, model.config, dims)
        if not local.n_rows:
            continue
        is_tp_split = tp_slice(name, shape, model.config, dims) != TensorSlice.full(shape)
        trained[name] = param
        slices[name] = local
        n_copies[name] = dims.dp_replicate * (1 if is_tp_split else dims.tp_size)
        with torch.no_grad():  # to_local() then returns the tensor, not a differentiable view
            local_params[name] = param.to_local() if is_dtensor(param) else param
    return ShardedParams(
        dims=dims,
        trained=trained,
        local_params=local_params,
        slices=slices,
        full_shapes=full_shapes,
        n_copies=n_copies,
        tp_partial=tp_partial,
        mesh=mesh,
    )


def local_slice(
    name: str, shape: tuple[int, ...], model_config: ModelConfig, dims: ParallelDims
) -> TensorSlice:
    """Return the slice of a parameter that the process `dims.rank` holds; it may be empty.

    shape: of the full parameter.
    """
    tp_part = tp_slice(name, shape, model_config, dims)
    return tp_part.cut_rows(*chunk(tp_part.n_rows, dims.dp_shard, dims.shard_rank))


def apply_fsdp(model: GPT, mesh: "DeviceMesh", dims: ParallelDims, device: Device) -> None:
    """Shard every block, then the rest of the model, with FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low_precision = None if device.precision == "fp32" else device.dtype
    # Gradients are reduced in fp32. Inputs are not cast: a gathered embedding already returns low
    # precision, and rotary cos and sin stay precise.
    policy = MixedPrecisionPolicy(
        param_dtype=low_precision,
        reduce_dtype=torch.float32 if low_precision else None,
        cast_forward_inputs=False,
    )
    for module in (*model.blocks, model):
        # The root's weights are needed right away by the output layer and its backward; FSDP's
        # default keeps them gathered.
        keeps_gathered = module is not model and dims.sharding in ("zero1", "zero2")
        reshard = False if keeps_gathered else None
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        # Losses are divided by the global number of tokens: gradients are summed, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
