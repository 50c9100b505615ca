"""A plain model in, a placed model out: the one place where parallelism meets the model.

In: a GPT (on the meta device where the whole of it would not fit), a layout. Out: a Placement: the same GPT, which now
computes with the others on its part, and what of every parameter this process keeps: plain local tensors, which the
optimizer steps and checkpoints hold, whatever wraps the model. Absent: what a step does with them (train/step.py).
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatoken.config import Machine
from megatoken.device import Device
from megatoken.model.count import state_bytes
from megatoken.model.gpt import GPT, use_recompute
from megatoken.parallel.layout import Layout, choose_kind, lay_out
from megatoken.parallel.parts import Part, chunk
from megatoken.parallel.ranks import Ranks, naming_the_lost
from megatoken.parallel.tensor import find_part, split_layers
from megatoken.presets import Shape

AXES = "replicas", "shards", "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What of a model this process keeps, by name of the parameter; empty parts are left out.

    trained: what a backward differentiates; kept: this process's part of it, a plain tensor, or the same; parts: which
    part of the whole that is, and sizes: of the whole. copies: how many processes keep the same part. shared: every
    tensor neighbour's gradient is a share of theirs.
    """

    layout: Layout
    trained: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]
    parts: Mapping[str, Part]
    sizes: Mapping[str, tuple[int, ...]]
    copies: Mapping[str, int]
    shared: frozenset[str] = frozenset()
    mesh: DeviceMesh | None = None

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Those who keep the same and read different data; None: everybody."""
        return None if self.mesh is None else self.mesh["replicas"].get_group()

    def is_first_copy(self, name: str) -> bool:
        """Whether this is the process that speaks for all that keep the same part."""
        layout = self.layout
        alone_on_tensor = self.copies[name] == layout.replicas or layout.slice == 0
        return layout.reader < layout.shards and alone_on_tensor

    def fill(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Take this process's part of whole tensors."""
        with torch.no_grad():
            for name, whole in values:
                if name in self.kept:
                    self.kept[name].copy_(self.parts[name].take(whole))

    def gather(self, ranks: Ranks) -> Iterable[tuple[str, Tensor]]:
        """Every parameter whole, one after another; all processes have to take part, the first has the values."""
        for name, sizes in self.sizes.items():
            some = next(iter(self.kept.values()))
            whole = torch.zeros(sizes, dtype=some.dtype, device=some.device)
            if name in self.kept and self.is_first_copy(name):
                self.parts[name].put(whole, self.kept[name].detach())
            with naming_the_lost(ranks.topology):
                dist.reduce(whole, dst=0)
            yield name, whole

    def announce(self, model: torch.nn.Module, *, last: bool) -> None:
        """Say before a forward whether the backward to come is the step's last: what has to travel when."""
        if not isinstance(model, FSDPModule):
            return
        kind = self.layout.kind
        model.set_requires_gradient_sync(last or kind != "zero1")
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or kind in ("zero3", "hybrid"))

    def add_shared(self, ranks: Ranks) -> None:
        """Add up the gradients of which every tensor neighbour has a share, all in one message."""
        gradients = [kept.grad for name, kept in self.kept.items() if name in self.shared and kept.grad is not None]
        if not gradients or self.mesh is None:
            return
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        with naming_the_lost(ranks.topology):
            dist.all_reduce(flat, group=self.mesh["tensor"].get_group())
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def find_norm(self, ranks: Ranks) -> Tensor:
        """The norm of the whole gradient, the same on every process."""
        by_copies: dict[int, list[Tensor]] = {}
        for name, kept in self.kept.items():
            if kept.grad is not None:
                by_copies.setdefault(self.copies[name], []).append(kept.grad)
        if self.layout.is_whole:
            return torch.nn.utils.get_total_norm([g for gradients in by_copies.values() for g in gradients])
        squares = torch.zeros((), device=next(iter(self.kept.values())).device)
        for copies, gradients in by_copies.items():
            squares += torch.nn.utils.get_total_norm(gradients) ** 2 / copies
        return ranks.sum(squares).sqrt()


def agree_on_layout(machine: Machine, shape: Shape, device: Device, ranks: Ranks) -> Layout:
    """How a model will lie on the processes; the first one's memory decides where the recipe leaves it open.

    Raises Fault(CONFIG) when processes do not divide.
    """
    topology, tensor = ranks.topology, machine.tensor_parallel
    size = {"rank": topology.rank, "world_size": topology.world_size, "local_world_size": topology.local_world_size}
    memory = device.memory_bytes() // (topology.local_world_size if device.place.type == "cpu" else 1)
    parameters = state_bytes(shape) // 12  # padding included
    kind = ranks.agree(choose_kind(machine.shard, tensor, parameters, device.precision, memory, **size))
    return lay_out(kind, tensor, **size)


def place_model(model: GPT, layout: Layout, device: Device, *, recompute: str = "none") -> Placement:
    """Let a model compute as laid out. The order is fixed:

    1. tensor parallel, which replaces weights by parts that all that follows takes for the weights;
    2. recompute, whose second forward goes through the layers of 1.;
    3. FSDP2, whose hooks gather a block's weights outside of what 2. runs again. Replicas that are whole need nothing
       here: their gradients are added up where they are made (gradients.py).

    torch.compile of blocks belongs before 3.; it works in place on whatever a block does when it is first called, so
    it may be asked for later, when the micro-batch is known (train/probe.py).
    """
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if not on_meta:
        model.to(device.place)
    mesh, shared = None, frozenset[str]()
    if not layout.is_whole:
        lengths = layout.replicas, layout.shards, layout.tensor
        with unset_fake_temporarily():  # in a dry run weights are fake, the mesh is not
            mesh = init_device_mesh(device.place.type, lengths, mesh_dim_names=AXES)
    if layout.tensor > 1:
        assert mesh is not None
        split_layers(model, mesh["tensor"], layout)
        shared = frozenset(name for name, each in model.named_parameters() if not isinstance(each, DTensor))
    use_recompute(model, recompute)
    if layout.shards > 1:
        assert mesh is not None
        shard_weights(model, mesh["replicas", "shards"] if layout.replicas > 1 else mesh["shards"], layout, device)
    if on_meta:
        model.to_empty(device=device.place)
    return _list_parts(model, layout, sizes, shared, mesh)


def shard_weights(model: GPT, mesh: DeviceMesh, layout: Layout, device: Device) -> None:
    """FSDP2: every block, then what is left, gathered where it is used and added up where its gradients are made."""
    low = None if device.precision == "fp32" else device.dtype
    # Given to every module. Gradients are added in fp32. Inputs are low already, where they should be: tokens come out
    # of a gathered embedding, and the turns of rotary positions stay precise.
    policy = MixedPrecisionPolicy(
        param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
    )
    keep = layout.kind in ("zero1", "zero2")
    # Linear layers return views of a product; nothing here changes them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for module in (*model.blocks, model):
        # The root's own weights are needed again at once, by the output layer and its backward: never let go between.
        freed = None if module is model or not keep else False
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=freed, mp_policy=policy)
        # Losses are divided by the count of the whole batch: gradients are added, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _list_parts(
    model: GPT, layout: Layout, sizes: Mapping[str, tuple[int, ...]], shared: frozenset[str], mesh: DeviceMesh | None
) -> Placement:
    trained, kept, parts, copies = dict(model.named_parameters()), {}, {}, {}
    for name, parameter in trained.items():
        part = find_part(name, sizes[name], model.shape, layout)
        split = part != Part.whole(sizes[name])
        part = part.cut_rows(*chunk(part.n_rows, layout.shards, layout.shard))
        if part.n_rows == 0:
            continue
        kept[name] = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        parts[name] = part
        copies[name] = layout.replicas * (1 if split else layout.tensor)
    return Placement(
        layout=layout,
        trained={name: trained[name] for name in kept},
        kept=kept,
        parts=parts,
        sizes=sizes,
        copies=copies,
        shared=shared,
        mesh=mesh,
    )
