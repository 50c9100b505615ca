"""Estimate the memory of one process from the config, and choose a sharding that fits. No torch.

tests/distributed/test_memory.py compares the estimate with a dry run, which adds up the sizes of
the tensors in a step.
"""

from dataclasses import dataclass

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import MachineConfig
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import SIMPLEST_FIRST, ParallelDims, build_dims, check_dims
from megatoken.model.extensions import count_additions
from megatoken.model.flops import (
    count_block_parameters,
    count_padded_parameters,
    count_trained_parameters,
    count_value_parameters,
)
from megatoken.model.memory import FP32, count_activation_bytes, resolve_loss_chunk
from megatoken.optim.costs import count_optimizer_bytes

STATE_SHARE = 0.7  # share of memory for weights, gradients and moments if micro_batch=auto
USABLE = 0.9  # share of a GPU's memory; the rest is CUDA's context, NCCL buffers and fragmentation
ERROR = 0.05  # by which a GPU may need more than the estimate (tests/nullgpu/test_cards.py)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one process at the peak of a step.

    gathered: full copies of sharded weights, and full gradients that are not yet reduced.
    activations: tensors saved for the backward.
    low_precision: copies of the weights in the dtype of matmuls.
    loss: temporary memory at the peak, such as logits and their gradients.
    """

    parameters: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    low_precision: int
    loss: int

    @property
    def total_bytes(self) -> int:
        state = self.parameters + self.gradients + self.moments + self.gathered
        return state + self.activations + self.low_precision + self.loss

    def usable_share(self, memory_bytes: float) -> float:
        """Return the share of a GPU's usable memory with room for the estimate's error."""
        return (1 + ERROR) * self.total_bytes / (USABLE * memory_bytes)


def estimate_memory(
    model: ModelConfig,
    dims: ParallelDims,
    *,
    precision: str,
    micro_batch: int,
    accumulates: bool,
    checkpointing: str = "none",
    loss_chunk: int | str = "auto",
    optimizer: str = "adamw",
    uses_master_weights: bool = False,
) -> Memory:
    """Estimate the peak memory of rank 0.

    accumulates: whether a step has more than one micro-batch. loss_chunk: rows of logits held at
    once. uses_master_weights: whether an unsharded model is held in low precision on CUDA.
    """
    n_params = count_padded_parameters(model) // dims.tp_size
    n_trained = count_trained_parameters(model) // dims.tp_size
    block_params = model.n_layer * count_block_parameters(model)
    block_params += count_value_parameters(model, model.padded_vocab_size)
    block_params //= dims.tp_size
    work = count_activation_bytes(
        model,
        micro_batch * model.seq_len // dims.tp_size,
        precision=precision,
        checkpointing=checkpointing,
        loss_chunk=resolve_loss_chunk(loss_chunk, "cuda", is_fused=uses_master_weights),
        sharded_blocks={"none": 0, "zero1": 1, "zero2": 1}.get(dims.sharding, 3),
        uses_master_weights=uses_master_weights,
        tp_size=dims.tp_size,
    )
    gathered = 0
    gradients = FP32 * n_trained // dims.dp_shard
    end = work.end
    if dims.dp_shard > 1:
        item = FP32 if precision == "fp32" else 2
        stays_gathered = dims.sharding in ("zero1", "zero2")
        gathered = item * (n_params if stays_gathered else n_params - block_params)
        if dims.sharding == "zero1" and accumulates:
            gathered += FP32 * n_trained
            gradients = 0
            if precision == "fp32" and not count_additions(model).freezes:  # reduced without a copy
                end -= FP32 * (n_params - block_params)
    activations, low_precision, loss = work.blocks, work.low_precision, work.loss
    # A single micro-batch's gradients exist only after its activations are freed.
    kept = low_precision if uses_master_weights else 0
    if activations + low_precision + loss < end + kept + (0 if accumulates else gradients):
        activations, low_precision, loss = 0, kept, end
    elif not accumulates:
        gradients = 0
    return Memory(
        parameters=FP32 * n_params // dims.dp_shard,
        gradients=gradients,
        moments=count_optimizer_bytes(optimizer, model) // dims.tp_size // dims.dp_shard,
        gathered=gathered,
        activations=activations,
        low_precision=low_precision,
        loss=loss,
    )


def holds_low_precision(machine: MachineConfig, dims: ParallelDims, precision: str) -> bool:
    """Return whether a CUDA run holds its weights in bf16 and fuses the loss, if both are open."""
    is_open = machine.master_weights != "off" and machine.fused != "off"
    return precision == "bf16" and dims.is_unsharded and is_open and not machine.deterministic


def count_state_bytes(
    dims: ParallelDims, model: ModelConfig, optimizer: str, precision: str
) -> int:
    """Return the bytes of weights, gradients and optimizer state in one process.

    The result is approximate if tensors do not divide evenly among ranks.

    precision: of gathered copies of sharded weights; the weights themselves and gradients are fp32.
    """
    tp_params = count_padded_parameters(model) // dims.tp_size
    local_params = tp_params // dims.dp_shard
    weights = FP32 * local_params
    if dims.sharding in ("zero1", "zero2"):
        weights += (FP32 if precision == "fp32" else 2) * tp_params
    gradients = FP32 * count_trained_parameters(model) // dims.tp_size
    if dims.sharding not in ("none", "zero1"):
        gradients //= dims.dp_shard
    optimizer_bytes = count_optimizer_bytes(optimizer, model)
    return weights + gradients + optimizer_bytes // dims.tp_size // dims.dp_shard


def choose_dims(
    machine: MachineConfig,
    model: ModelConfig,
    precision: str,
    memory_bytes: int,
    dist_env: DistEnv,
    optimizer: str = "adamw",
) -> ParallelDims:
    """Choose how to shard a run's model, and return the mesh of processes.

    With machine.sharding=auto, it picks the simplest sharding with which the micro-batch fits in
    memory. If the micro-batch is auto as well, weights, gradients and optimizer state may take only
    a share of the memory, to leave room for activations. If nothing fits, it picks zero3. Raises
    ConfigError if the processes do not divide among the axes of the mesh, or the model's sizes
    among tensor-parallel ranks.

    memory_bytes: memory available to one process; 0 if unknown.
    """
    for sharding in SIMPLEST_FIRST if machine.sharding == "auto" else (machine.sharding,):
        dims = build_dims(sharding, machine.tensor_parallel, dist_env)
        if not memory_bytes:
            break
        if machine.micro_batch == "auto":
            state_bytes = count_state_bytes(dims, model, optimizer, precision)
            share = state_bytes / STATE_SHARE / memory_bytes
        else:
            memory = estimate_memory(
                model,
                dims,
                precision=precision,
                micro_batch=machine.micro_batch,
                accumulates=True,
                checkpointing=machine.activation_checkpointing,
                loss_chunk=machine.loss_chunk,
                optimizer=optimizer,
                uses_master_weights=holds_low_precision(machine, dims, precision),
            )
            share = memory.usable_share(memory_bytes)
        if share <= 1:
            break
    check_dims(dims, model)
    return dims
