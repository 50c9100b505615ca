"""Tensor and sequence parallelism: neighbours share every layer (Shoeybi et al. 2019; Korthikanti et al. 2022).

In: a plain GPT, a mesh with a tensor axis. Out: the same GPT, whose products are split: attention by heads and the MLP
by its width, each gathering the sequence before it and scattering it after, and between them norms, dropout and
residuals on a slice of the sequence each; the token embedding by vocabulary. Ids go in whole, hidden states come out as
a slice of the sequence, the plain model's to rounding.

Weights are DTensors by torch's own styles. What stays plain (norms, positions) works on a slice of the sequence, so
each neighbour's gradient is a share of the whole: `Placement` adds them up once a step.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from megatoken.model.gpt import GPT, Block
from megatoken.parallel.layout import Layout
from megatoken.parallel.parts import Part, chunk
from megatoken.presets import Shape

SEQUENCE = Shard(1)  # of (B, T, C)


def split_layers(model: GPT, mesh: DeviceMesh, layout: Layout) -> None:
    """Replace weights by their part on the tensor axis, and let every layer gather and scatter what it needs."""
    by_output, by_input = ColwiseParallel(), RowwiseParallel(output_layouts=SEQUENCE)
    plan: dict[str, ParallelStyle] = {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE)}
    if model.head is not None:
        plan["head"] = by_output
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        block.attention.heads = [heads // layout.tensor for heads in block.attention.heads]
        for layer in (block.attention, block.mlp):
            layer.register_forward_pre_hook(partial(_gather_sequence, mesh))
        styles = {"attention.qkv": by_output, "attention.out": by_input, "mlp.up": by_output, "mlp.down": by_input}
        styles |= {} if block.mlp.gate is None else {"mlp.gate": by_output}
        plan |= {f"blocks.{index}.{name}": style for name, style in styles.items()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if model.positions is not None:
        model.positions.register_forward_pre_hook(partial(_slice_places, layout))


def _gather_sequence(mesh: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The whole sequence for a layer; its gradients, a share from every neighbour, are added and scattered at once."""
    x_BTC, *others = inputs
    whole = DTensor.from_local(x_BTC, mesh, (SEQUENCE,), run_check=False).redistribute(placements=(Replicate(),))
    return (whole, *others)


def _slice_places(layout: Layout, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
    return (inputs[0].chunk(layout.tensor)[layout.slice],)


def slice_sequence(layout: Layout, targets_BT: Tensor) -> Tensor:
    """The targets of the hidden states that come out here."""
    return targets_BT if layout.tensor == 1 else targets_BT.chunk(layout.tensor, dim=1)[layout.slice]


def gather_unembedding(weight_VC: Tensor) -> Tensor:
    """The whole output layer for the loss of this slice; its gradients are added over the slices."""
    return weight_VC.full_tensor(grad_placements=[Partial()]) if isinstance(weight_VC, DTensor) else weight_VC


def find_part(name: str, sizes: tuple[int, ...], shape: Shape, layout: Layout) -> Part:
    """What of a parameter this place on the tensor axis keeps."""
    part = Part.whole(sizes)
    if layout.tensor == 1:
        return part
    tensor, index = layout.tensor, layout.slice
    if ".attention.qkv." in name:
        # Whole heads: the packed rows are those of queries, keys and values, of each its own share.
        runs, start = [], 0
        for heads in (shape.n_head, shape.kv_heads, shape.kv_heads):
            size = heads * shape.d_head
            first, last = chunk(size, tensor, index)
            runs.append((start + first, start + last))
            start += size
        return Part(tuple(runs), part.columns)
    if name in ("tokens.weight", "head.weight") or ".mlp.up." in name or ".mlp.gate." in name:
        return part.cut_rows(*chunk(sizes[0], tensor, index))
    if name.endswith((".attention.out.weight", ".mlp.down.weight")):
        return part.cut_columns(*chunk(sizes[1], tensor, index))
    return part
