"""Training state: weights, optimizer state, loss scaler and step number.

No random state is kept: dropout is a function of seed, step, sequence and position in the model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megatoken.base.config.batch_ramp import BatchRamp
from megatoken.base.config.fields import Duration
from megatoken.base.config.schema import Config
from megatoken.base.rooms import load_entry
from megatoken.base.system.device import Device
from megatoken.base.system.torch_compat import foreach_copy, supports_found_inf
from megatoken.data.dataloader import Batch, batch_of_step
from megatoken.distributed.comm import SINGLE_PROCESS, Comm
from megatoken.distributed.grad_reduce import GradBucketReducer
from megatoken.distributed.parallel_dims import UNSHARDED, ParallelDims
from megatoken.distributed.parallelize import ShardedParams, parallelize
from megatoken.distributed.stragglers import PhaseTimer
from megatoken.distributed.tensor_parallel import gather_lm_head, slice_sequence
from megatoken.model.extensions import count_additions
from megatoken.model.gpt import GPT, copy_kernels
from megatoken.model.kernels.cross_entropy import OutputLayer
from megatoken.model.loss import cross_entropy, sum_terms
from megatoken.model.masks import separate_conversations
from megatoken.model.memory import resolve_loss_chunk
from megatoken.optim.lr_schedule import LRSchedule, build_schedule
from megatoken.optim.optimizer import (
    MatrixOptimizer,
    Update,
    adopt_optimizer,
    build_optimizer,
    find_optimizer,
)
from megatoken.optim.spikes import RecentSteps

MOMENTUM_START = 0.85  # at the start of optim.momentum_warmup (Jordan et al. 2024)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How steps are computed: chosen before the first step, and then constant.

    model: runs forward and backward. It is a low-precision copy of the weights if there are master
        weights, else the model that holds the weights.
    forward: `model`, compiled or not.
    update: applies the gradients.
    threads: number of torch's threads; 0 to leave it as it is.
    cuda_graphs: whether `forward` replays CUDA graphs, whose results the next replay overwrites.
    reducer: sums the gradients of replicas; None if there is one, or if FSDP2 does.
    """

    model: GPT
    forward: Callable[..., Tensor]
    update: Update = Update()
    output_layer: type[OutputLayer] = OutputLayer
    threads: int = 0
    is_compiled: bool = False
    cuda_graphs: bool = False
    reducer: GradBucketReducer | None = None


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run has come.

    step: number of steps taken. skipped_batches: numbers of batches removed from the data order,
    ascending. recent: for finding spikes.
    """

    step: int = 0
    skipped_batches: tuple[int, ...] = ()
    recent: RecentSteps = RecentSteps()

    @property
    def next_batch(self) -> int:
        """The number of the next step's batch in the data order, which counts skipped batches."""
        return batch_of_step(self.step, self.skipped_batches)

    def skip(self, *batches: int) -> "Position":
        """Return the position after removing batches from the data order."""
        return replace(self, skipped_batches=tuple(sorted({*self.skipped_batches, *batches})))


@dataclass(kw_only=True)
class TrainState:
    """What a run trains: weights and optimizer state, how steps are computed, and the position.

    A checkpoint holds the weights, the optimizer state and the position.

    model: the fp32 weights, which are updated, evaluated and saved.
    sharded: this process's slices of the parameters.
    found_bad: 0-d bool on the device, set by a bad step. While it is set, updates are skipped; the
        host reads and clears it.
    """

    model: GPT
    compute: Compute
    sharded: ShardedParams
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    found_bad: Tensor
    comm: Comm = SINGLE_PROCESS
    compute_timer: PhaseTimer = field(default_factory=PhaseTimer)  # off by default
    position: Position = Position()

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self.position.step

    def hidden(self, batch: Batch, dropout_keys_B: Tensor | None) -> Tensor:
        """Return the hidden states (B, T, C) of a micro-batch from the compute model."""
        options: dict[str, Any] = {}
        if dropout_keys_B is not None:
            options["dropout_keys_B"] = dropout_keys_B
        if batch.starts_BT is not None:
            options["tree_mask"] = separate_conversations(batch.starts_BT, batch.inputs_BT.device)
        return self.compute.forward(batch.inputs_BT, **options)

    @property
    def uses_master_weights(self) -> bool:
        """Whether forward and backward run through a low-precision copy of the weights."""
        return self.compute.model is not self.model

    @property
    def dims(self) -> ParallelDims:
        """The axes of the process mesh over which the model is sharded, and this process's rank."""
        return self.sharded.dims

    @property
    def skips_bad_on_device(self) -> bool:
        """Whether the optimizer reads `found_bad` on the device and skips bad updates by itself."""
        if self.scaler.is_enabled() or self.found_bad.device.type not in ("cpu", "cuda"):
            return False
        is_fused = isinstance(self.optimizer, torch.optim.AdamW | MatrixOptimizer)
        return is_fused and supports_found_inf(self.optimizer)

    def enable_master_weights(self, low: GPT) -> None:
        """Run forward and backward with a low-precision copy of the weights.

        The optimizer still updates the fp32 weights, from which the copy is refreshed.
        """
        self.compute = replace(self.compute, model=low, forward=low)
        self.sharded = replace(self.sharded, trained=dict(low.named_parameters()))

    def global_grad_norm(self) -> Tensor:
        """Return the L2 norm of the full gradient, the same on every process."""
        norm = self.compute.update.grad_norm(self.optimizer) if self.dims.is_unsharded else None
        return self.sharded.global_grad_norm(self.comm) if norm is None else norm

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        self.optimizer.zero_grad()
        if self.uses_master_weights:
            self.compute.model.zero_grad()

    def refresh_low_precision_copy(self, *, with_frozen: bool = False) -> None:
        """Overwrite the low-precision copy, if there is one, with the fp32 weights that train."""
        if self.uses_master_weights:
            pairs = zip(self.compute.model.parameters(), self.model.parameters(), strict=True)
            chosen = [pair for pair in pairs if with_frozen or pair[1].requires_grad]
            with torch.no_grad():
                foreach_copy(*zip(*chosen, strict=True))

    def start_grad_reduction(self) -> None:
        """Set up gradient reduction of replicas. Call it again if `compute.model` is replaced."""
        if self.dims.dp_replicate > 1 and self.dims.dp_shard == 1:
            group = self.sharded.replica_group
            reducer = GradBucketReducer(self.grad_pairs(), self.comm, group=group)
            self.compute = replace(self.compute, reducer=reducer)

    def grad_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each trained parameter of the compute model with its fp32 one."""
        return [(self.sharded.trained[name], local) for name, local in self.sharded.updated.items()]


class Loss(Protocol):
    """What a step minimizes: a sum over micro-batches, divided by a count over the global batch."""

    def count(self, state: TrainState, batch: Batch) -> Tensor:
        """Return what this process's batch adds to the divisor, as an int64 scalar."""

    def sums(
        self, state: TrainState, batch: Batch, dropout_keys_B: Tensor | None, loss_chunk: int
    ) -> dict[str, Tensor]:
        """Return sums over a micro-batch, as scalars: `loss`, with gradient, and values to log.

        loss_chunk: tokens whose logits may exist at a time.
        """


@dataclass(frozen=True)
class CrossEntropy:
    """The mean cross-entropy of the targets, in nats, plus terms with these weights, by name."""

    weights: Mapping[str, float] = field(default_factory=dict)

    def count(self, state: TrainState, batch: Batch) -> Tensor:
        return (slice_sequence(state.dims, batch.targets_BT) >= 0).sum()

    def sums(
        self, state: TrainState, batch: Batch, dropout_keys_B: Tensor | None, loss_chunk: int
    ) -> dict[str, Tensor]:
        hidden_BTC = state.hidden(batch, dropout_keys_B)
        lm_head_VC = gather_lm_head(state.compute.model.lm_head_weight)
        config = state.model.config
        options: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "softcap": config.logit_softcap,
            "chunk": loss_chunk,
        }
        loss_sum, _ = cross_entropy(
            hidden_BTC,
            lm_head_VC,
            slice_sequence(state.dims, batch.targets_BT),
            output_layer=state.compute.output_layer,
            **options,
        )
        if not self.weights:
            return {"loss": loss_sum}
        targets_BT = batch.targets_BT
        rows_BT = torch.arange(targets_BT.numel(), device=targets_BT.device).view_as(targets_BT)
        terms = [load_entry("loss_term", name) for name in self.weights]
        rows_BT = slice_sequence(state.dims, rows_BT)
        sums = sum_terms(terms, hidden_BTC, lm_head_VC, targets_BT, rows_BT, **options)
        values = dict(zip(self.weights, sums, strict=True))
        logged = {"cross_entropy": loss_sum} | values
        total = loss_sum + sum(self.weights[name] * value for name, value in values.items())
        return {"loss": total} | {name: value.detach() for name, value in logged.items()}


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The settings of a run's steps, with all durations converted to steps.

    Durations are in steps, batch sizes in tokens, and micro-batch sizes in sequences.
    """

    seed: int
    schedule: LRSchedule
    batch_tokens: int
    epoch_tokens: int
    total_steps: int
    micro_batch: int
    grad_clip: float
    loss_chunk: int
    skip_spikes: bool = False
    deterministic: bool = False  # add gradients in the same order on 1, 2, 4, ... processes
    ramp: BatchRamp | None = None  # for batches that grow to `batch_tokens`
    momentum: float = 0.95  # Muon's
    momentum_warmup: int = 0
    loss: Loss = CrossEntropy()

    def momentum_of(self, step: int) -> float:
        """Return Muon's momentum in a step; the first step is 0."""
        if step >= self.momentum_warmup:
            return self.momentum
        start = min(MOMENTUM_START, self.momentum)
        return start + (self.momentum - start) * step / self.momentum_warmup

    def steps(self, length: Duration) -> int:
        """Convert a duration to steps, as if every batch had its full size."""
        return length.steps(
            batch_tokens=self.batch_tokens,
            epoch_tokens=self.epoch_tokens,
            total_steps=self.total_steps,
        )

    def tokens_before(self, batch: int) -> int:
        """Return the total tokens of batches 0 to `batch` - 1."""
        return self.ramp.before(batch) if self.ramp else batch * self.batch_tokens

    def tokens_trained(self, position: Position) -> int:
        """Return the tokens of the steps before a position, excluding skipped batches."""
        batch = position.next_batch
        skipped = (each for each in position.skipped_batches if each < batch)
        return self.tokens_before(batch) - sum(map(self.batch_size, skipped))

    def batch_size(self, batch: int) -> int:
        """Return the size of batch number `batch` in tokens; it grows during a batch ramp."""
        return self.tokens_before(batch + 1) - self.tokens_before(batch)


def build_state(
    model: GPT,
    config: Config,
    device: Device,
    dims: ParallelDims = UNSHARDED,
    optimizer: torch.optim.Optimizer | None = None,
    comm: Comm = SINGLE_PROCESS,
) -> TrainState:
    """Move a model to the device, shard it, and build the optimizer.

    dims: how to shard the model.
    optimizer: a user's optimizer over the model's parameters, in place of the config's.
    """
    model.train()
    sharded = parallelize(
        model, dims, device, activation_checkpointing=config.machine.activation_checkpointing
    )
    if optimizer is None:
        uses_matrices = find_optimizer(config.optim.name).hidden_group
        optim = config.optim
        if uses_matrices and count_additions(model.config).freezes:  # no hidden matrix trains
            optim, uses_matrices = replace(optim, name="adamw"), False
        matrices = None
        if uses_matrices:
            matrices = load_entry("matrices", "sharded")(model, sharded, device)
        optimizer = build_optimizer(
            sharded.updated,
            optim,
            sizes=sharded.full_shapes,
            implementation=config.machine.adamw,
            matrices=matrices,
        )
    else:
        adopt_optimizer(optimizer, config.optim.lr)
    return TrainState(
        model=model,
        compute=Compute(model=model, forward=model),
        sharded=sharded,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=device.precision == "fp16"),
        found_bad=torch.zeros((), dtype=torch.bool, device=device.torch_device),
        comm=comm,
    )


def gather_model(
    state: TrainState, dtype: torch.dtype = torch.float32, *, on_all: bool = False
) -> GPT | None:
    """Return the unsharded model on rank 0 and None on other ranks. All ranks must call it.

    A sharded model is gathered into a copy, which must fit in memory in addition to the shards.

    dtype: of the gathered copy. on_all: whether every rank gets the model.
    """
    is_here = on_all or state.comm.dist_env.is_main_process
    if state.dims.is_unsharded:
        return state.model if is_here else None
    with torch.device("meta"):
        model = GPT(state.model.config)
    for name, tensor in state.sharded.gather_full(state.comm, dtype, on_all=on_all):
        if is_here:
            model.load_state_dict({name: tensor}, strict=False, assign=True)
    copy_kernels(model, state.model)
    return model if is_here else None


def build_step_config(
    config: Config,
    *,
    epoch_tokens: int,
    micro_batch: int = 1,
    device_type: str = "cpu",
    is_fused: bool = False,
) -> StepConfig:
    """Convert the run's durations to steps.

    epoch_tokens: training tokens in one epoch. is_fused: as in `resolve_loss_chunk`.
    """
    total_steps = config.total_steps(epoch_tokens)
    lengths: dict[str, Any] = {
        "batch_tokens": config.budget.batch_tokens,
        "epoch_tokens": epoch_tokens,
        "total_steps": total_steps,
    }
    optim = config.optim
    loss_chunk = config.machine.loss_chunk
    return StepConfig(
        seed=config.seed,
        schedule=build_schedule(config, **lengths),
        micro_batch=micro_batch,
        grad_clip=optim.grad_clip,
        loss_chunk=resolve_loss_chunk(loss_chunk, device_type, is_fused=is_fused),
        skip_spikes=optim.spike == "skip",
        deterministic=config.machine.deterministic,
        ramp=config.budget.ramp,
        momentum=optim.momentum,
        momentum_warmup=optim.momentum_warmup.steps(**lengths),
        **lengths,
    )
