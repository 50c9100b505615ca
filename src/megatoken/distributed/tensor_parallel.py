"""Split layers over tensor-parallel ranks (Shoeybi et al. 2019; Korthikanti et al. 2022).

Attention is split by heads, the MLP by its width, and the embedding by vocabulary, with torch's
parallel styles. Attention and MLP gather the sequence before they compute and reduce-scatter it
afterwards. Norms, dropout and residuals work on a slice of the sequence, so each rank has only a
partial sum of the gradients of norm weights; `ShardedParams.all_reduce_tp_grads` adds these once
per step. The model takes full sequences of token ids and returns hidden states of a slice.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatoken.base.config.model_config import ModelConfig
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.distributed.tensor_slice import TensorSlice, chunk, is_dtensor
from megatoken.model.dropout import Dropout
from megatoken.model.gpt import GPT, Block

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

SEQUENCE = 1  # the dimension of T in (B, T, C)
SPLIT_BY_ROWS = (".mlp.up.", ".mlp.gate.", ".attention.value_gate.")
SPLIT_BY_COLUMNS = (".attention.out.weight", ".mlp.down.weight", ".value_tokens.weight")


def apply_tensor_parallel(model: GPT, mesh: "DeviceMesh", dims: ParallelDims) -> None:
    """Replace the model's weights in place by DTensors on the tensor-parallel mesh."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    column = ColwiseParallel()
    row = RowwiseParallel(output_layouts=Shard(SEQUENCE))
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE))
    }
    if model.head is not None:
        plan["head"] = column
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        block.attention.heads = [heads // dims.tp_size for heads in block.attention.heads]
        for layer in (block.attention, block.mlp):
            layer.register_forward_pre_hook(partial(_gather_sequence, mesh))
        styles = {"attention.qkv": column, "attention.out": row, "mlp.up": column, "mlp.down": row}
        if block.mlp.gate is not None:
            styles["mlp.gate"] = column
        if block.attention.value_tokens is not None:
            styles["attention.value_tokens"] = column
            styles["attention.value_gate"] = column
        plan |= {f"blocks.{index}.{name}": style for name, style in styles.items()}
    for module in model.modules():
        if isinstance(module, Dropout):
            module.tp_rank = dims.tp_rank
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if model.positions is not None:
        model.positions.register_forward_pre_hook(
            lambda _, inputs: (inputs[0].chunk(dims.tp_size)[dims.tp_rank],)
        )


def _gather_sequence(mesh: "DeviceMesh", _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gather the sequence for a layer; the backward reduce-scatters its gradient."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    x_BTC, *others = inputs
    split = DTensor.from_local(x_BTC, mesh, (Shard(SEQUENCE),), run_check=False)
    return (split.redistribute(placements=(Replicate(),)), *others)


def slice_sequence(dims: ParallelDims, targets_BT: Tensor) -> Tensor:
    """Return the targets in this rank's slice of the sequence dimension."""
    return targets_BT if dims.tp_size == 1 else targets_BT.chunk(dims.tp_size, dim=1)[dims.tp_rank]


def gather_lm_head(weight_VC: Tensor) -> Tensor:
    """Return the full output layer on every rank, to compute the loss of a slice of the sequence.

    Its gradients are summed over tensor-parallel ranks.
    """
    if not is_dtensor(weight_VC):
        return weight_VC
    from torch.distributed.tensor import Partial

    return weight_VC.full_tensor(grad_placements=[Partial()])


def tp_slice(
    name: str, shape: tuple[int, ...], model_config: ModelConfig, dims: ParallelDims
) -> TensorSlice:
    """Return the slice of a parameter that this tensor-parallel rank holds.

    shape: of the full parameter.
    """
    full = TensorSlice.full(shape)
    if dims.tp_size == 1:
        return full
    if ".attention.qkv." in name:
        # Rows of queries, keys and values are packed; a rank has full heads of each.
        ranges = []
        start = 0
        for size in model_config.qkv_rows:
            first, last = chunk(size, dims.tp_size, dims.tp_rank)
            ranges.append((start + first, start + last))
            start += size
        return TensorSlice(tuple(ranges), full.columns)
    is_vocabulary = name in ("tokens.weight", "head.weight")
    if is_vocabulary or any(layer in name for layer in SPLIT_BY_ROWS):
        return full.cut_rows(*chunk(shape[0], dims.tp_size, dims.tp_rank))
    if name.endswith(SPLIT_BY_COLUMNS):
        return full.cut_columns(*chunk(shape[1], dims.tp_size, dims.tp_rank))
    return full
