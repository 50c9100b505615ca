"""Describe how a model is sharded over processes. No torch.

Processes form a mesh with three axes. Along the tensor-parallel axis, ranks split every layer and
read the same data. Along the sharding axis, ranks split weights, gradients or optimizer state and
read different data. Along the replica axis, ranks hold copies and read different data.
`machine.sharding` chooses what the sharding axis splits (Rajbhandari et al. 2020, ZeRO):

    none    nothing: every replica holds everything
    zero1   optimizer state and fp32 weights; a step gathers full weights and has full gradients
    zero2   also gradients, which are reduced after every micro-batch
    zero3   also the weights during a step: each layer's are gathered only while it computes
    hybrid  zero3 within a machine; machines are replicas
"""

from dataclasses import dataclass, replace

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import Config, MachineConfig
from megatoken.base.errors import ConfigError
from megatoken.distributed.env import DistEnv

SIMPLEST_FIRST = ("none", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The sizes of the mesh's three axes, and this process's rank.

    dp_replicate, dp_shard, tp_size: numbers of replicas, sharding ranks and tensor-parallel ranks.
    """

    sharding: str = "none"
    dp_replicate: int = 1
    dp_shard: int = 1
    tp_size: int = 1
    rank: int = 0

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks; a tensor-parallel group counts as one."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp_size * self.tp_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def shard_rank(self) -> int:
        return self.dp_rank % self.dp_shard

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def is_unsharded(self) -> bool:
        """Whether every process holds the full model."""
        return self.dp_shard == self.tp_size == 1

    def __str__(self) -> str:
        axes = [f"{self.dp_replicate} replicas"] if self.dp_replicate > 1 else []
        axes += [f"{self.sharding} over {self.dp_shard}"] if self.dp_shard > 1 else []
        axes += [f"tensor parallel over {self.tp_size}"] if self.tp_size > 1 else []
        return ", ".join(axes) or "one process"


UNSHARDED = ParallelDims()


def build_dims(sharding: str, tp_size: int, dist_env: DistEnv) -> ParallelDims:
    """Return the mesh of all processes. Raises ConfigError if they do not divide among the axes.

    sharding: any value of machine.sharding but auto.
    """
    world_size = dist_env.world_size
    local_world_size = dist_env.local_world_size
    if world_size % tp_size:
        what = f"a world size of {world_size} does not divide into groups of {tp_size}"
        raise ConfigError(what, "machine.tensor_parallel", f"start a multiple of {tp_size}")
    dp_size = world_size // tp_size
    dp_shard = {"none": 1, "hybrid": max(1, local_world_size // tp_size)}.get(sharding, dp_size)
    if dp_size % dp_shard:
        what = f"{world_size} processes do not fill machines of {local_world_size}"
        raise ConfigError(what, "machine.sharding", "start equally many on each, or use zero3")
    return ParallelDims(
        sharding=sharding if dp_shard > 1 else "none",
        dp_replicate=dp_size // dp_shard,
        dp_shard=dp_shard,
        tp_size=tp_size,
        rank=dist_env.rank,
    )


def fit_batch(config: Config, dist_env: DistEnv, where: str) -> Config:
    """Return the config with a batch ramp whose sizes divide among the data-parallel ranks.

    The first size is rounded up. Raises ConfigError if the full batch does not divide.

    where: option to name in the error.
    """
    machine, budget = config.machine, config.budget
    dp_size = build_dims(machine.sharding, machine.tensor_parallel, dist_env).dp_size
    unit = dp_size * config.model.seq_len
    if budget.batch_tokens % unit:
        what = f"{config.batch_seqs:,} sequences do not divide among {dp_size:,} processes"
        below = budget.batch_tokens // unit * unit
        near = " or ".join(str(tokens) for tokens in (below, below + unit) if tokens)
        raise ConfigError(what, where, f"use another number, or set budget.batch_tokens={near}")
    start = -(-budget.batch_start // unit) * unit
    return replace(config, budget=replace(budget, batch_start=start))


def disable_unsupported(machine: MachineConfig, dims: ParallelDims) -> MachineConfig:
    """Return the settings without those that a sharded model does not support.

    Master weights are turned off, because FSDP itself casts the weights that it gathers. With
    tensor parallelism, native and Triton kernels are turned off, because DTensors work only with
    torch's kernels.
    """
    if dims.is_unsharded:
        return machine
    if dims.tp_size > 1:
        machine = replace(machine, gemm_backend="torch", fused="off")
    return replace(machine, master_weights="off")


def check_dims(dims: ParallelDims, model_config: ModelConfig) -> None:
    """Raise ConfigError unless the number of tensor-parallel ranks divides all split dimensions.

    These are the heads, the MLP's width, the padded vocabulary and the context.
    """
    sizes = {
        "n_head": model_config.n_head,
        "n_kv_head": model_config.kv_heads,
        "width of the MLP": model_config.d_ff,
        "padded vocabulary": model_config.padded_vocab_size,
        "seq_len": model_config.seq_len,
    }
    for name, size in sizes.items():
        if size % dims.tp_size:
            what = f"{dims.tp_size} does not divide the {name} of {size:,}"
            raise ConfigError(what, "machine.tensor_parallel", "choose a number that does")
    is_over_width = model_config.qk_norm and model_config.qk_norm_over == "width"
    if dims.tp_size > 1 and (is_over_width or model_config.smear):
        what = "qk_norm_over=width and smear combine heads and tokens of different ranks"
        raise ConfigError(what, "machine.tensor_parallel", "set it to 1")
