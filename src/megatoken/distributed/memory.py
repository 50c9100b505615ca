"""Memory of one process by arithmetic, without torch, and the split that it asks for.

tests/distributed/test_memory.py holds it to the dry run (estimate/dry_run.py), which counts the tensors of a step.
"""

from dataclasses import dataclass

from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import MachineConfig
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import (
    FP32,
    SIMPLEST_FIRST,
    ParallelDims,
    build_dims,
    check_dims,
    count_state_bytes,
)
from megatoken.model.flops import (
    count_block_parameters,
    count_padded_parameters,
    count_value_parameters,
)
from megatoken.model.memory import LOSS_CHUNK, count_activation_bytes
from megatoken.optim.costs import count_optimizer_bytes

STATE_SHARE = (
    0.7  # of memory for weights, gradients and moments, where the micro-batch is not known yet
)
USABLE = 0.9  # of a GPU's memory: its context, NCCL's buffers and gaps between blocks take the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes at the peak of a step. gathered: whole copies of sharded weights, and of gradients that wait for the last
    micro-batch. activations: kept for the backward. low_precision: copies of weights in the precision of products.
    loss: logits and what is made of them, or what else is at work at the peak."""

    parameters: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    low_precision: int
    loss: int

    @property
    def total_bytes(self) -> int:
        kept = self.parameters + self.gradients + self.moments + self.gathered
        return kept + self.activations + self.low_precision + self.loss


def estimate_memory(
    model: ModelConfig,
    dims: ParallelDims,
    *,
    precision: str,
    micro_batch: int,
    accumulates: bool,
    checkpointing: str = "none",
    loss_chunk: int = LOSS_CHUNK["cuda"],
    optimizer: str = "adamw",
) -> Memory:
    """The memory of the first process. accumulates: a step has more than one micro-batch."""
    n_params = count_padded_parameters(model) // dims.tp_size
    local, item = n_params // dims.dp_shard, FP32 if precision == "fp32" else 2
    blocks = model.n_layer * count_block_parameters(model) + count_value_parameters(
        model, model.padded_vocab_size
    )
    blocks //= dims.tp_size
    work = count_activation_bytes(
        model,
        micro_batch * model.seq_len // dims.tp_size,
        precision=precision,
        checkpointing=checkpointing,
        loss_chunk=loss_chunk,
        sharded=dims.dp_shard > 1,
    )
    gathered, gradients = 0, FP32 * local
    end = work.end
    if dims.dp_shard > 1:
        gathered = item * (n_params if dims.sharding in ("zero1", "zero2") else n_params - blocks)
        if dims.sharding == "zero1" and accumulates:
            gathered, gradients = gathered + FP32 * n_params, 0
            end -= (
                FP32 * (n_params - blocks) if precision == "fp32" else 0
            )  # no copy in fp32 to reduce
    peak = {"activations": work.blocks, "low_precision": work.low_precision, "loss": work.loss}
    # The gradients of the only micro-batch are there when its activations are gone.
    if sum(peak.values()) < end + (0 if accumulates else gradients):
        peak = {"activations": 0, "low_precision": 0, "loss": end}
    elif not accumulates:
        gradients = 0
    moments = count_optimizer_bytes(optimizer, model) // dims.tp_size // dims.dp_shard
    state = {"parameters": FP32 * local, "gradients": gradients, "moments": moments}
    return Memory(**state, gathered=gathered, **peak)


def choose_dims(
    machine: MachineConfig,
    model: ModelConfig,
    precision: str,
    memory_bytes: int,
    dist_env: DistEnv,
    optimizer: str = "adamw",
) -> ParallelDims:
    """The mesh of a run; `sharding=auto` is the simplest with which the micro-batch fits, or whose state leaves room
    for activations where that is auto too; zero3 if none does.

    memory_bytes: of one process, 0 if unknown. Raises ConfigError when processes or sizes do not divide.
    """
    for sharding in SIMPLEST_FIRST if machine.sharding == "auto" else (machine.sharding,):
        dims = build_dims(sharding, machine.tensor_parallel, dist_env)
        if not memory_bytes or _fits(machine, model, dims, precision, memory_bytes, optimizer):
            break
    check_dims(dims, model)
    return dims


def _fits(
    machine: MachineConfig,
    model: ModelConfig,
    dims: ParallelDims,
    precision: str,
    memory_bytes: int,
    optimizer: str,
) -> bool:
    optimizer_bytes = count_optimizer_bytes(optimizer, model)
    state_bytes = count_state_bytes(
        dims, count_padded_parameters(model), optimizer_bytes, precision
    )
    if machine.micro_batch == "auto":
        return state_bytes <= STATE_SHARE * memory_bytes
    memory = estimate_memory(
        model,
        dims,
        precision=precision,
        micro_batch=machine.micro_batch,
        accumulates=True,
        checkpointing=machine.activation_checkpointing,
        loss_chunk=LOSS_CHUNK["cuda"] if machine.loss_chunk == "auto" else machine.loss_chunk,
        optimizer=optimizer,
    )
    return memory.total_bytes <= USABLE * memory_bytes
