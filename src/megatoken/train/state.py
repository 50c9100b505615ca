"""What a run carries from step to step: weights, moments, the loss scaler, and one integer of position.

Dropout draws from a generator seeded by (seed, step, micro-batch), so no random state has to be carried or saved.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatoken.config import Run
from megatoken.device import Device
from megatoken.knobs import Duration
from megatoken.model.gpt import GPT
from megatoken.model.kernels import LOSS, Lose
from megatoken.optim.groups import build_optimizer
from megatoken.optim.schedule import Schedule
from megatoken.parallel.gradients import GradientSum, collect_gradient
from megatoken.parallel.layout import Layout
from megatoken.parallel.ranks import Ranks
from megatoken.parallel.shard import Placement, place_model
from megatoken.parallel.topology import Topology

Forward = Callable[[Tensor], Tensor]

# Rows of logits at once: on a CPU few enough to stay near its caches, on a GPU enough to fill it.
LOSS_CHUNK = {"cpu": 512, "mps": 4096, "cuda": 4096}


@dataclass(slots=True, kw_only=True)
class State:
    """The live run. `model` always holds the fp32 weights that are evaluated, and sampled where they are whole.

    `placement` says what of them this process keeps: what is stepped and saved. `working` is what is trained through:
    the model itself, or a copy in low precision whose masters the model's weights are. `forward` is `working`, compiled
    or not. `trouble`, on the device: a step was not finite, so neither it nor any after it updates anything.
    """

    model: GPT
    working: GPT
    forward: Forward
    placement: Placement
    optimizer: torch.optim.AdamW
    scaler: torch.amp.GradScaler
    trouble: Tensor
    ranks: Ranks = field(default_factory=lambda: Ranks(Topology()))
    gradient_sum: GradientSum | None = None  # over the ranks, where there are several
    lose: Lose = LOSS["torch"]
    graphs: bool = False  # `forward` replays CUDA graphs, whose results the next one overwrites
    step: int = 0

    @property
    def has_masters(self) -> bool:
        """Whether the weights that compute are low-precision copies of the model's."""
        return self.working is not self.model

    @property
    def layout(self) -> Layout:
        """How the model lies on all processes, and where this one stands."""
        return self.placement.layout

    @property
    def watches_itself(self) -> bool:
        """Whether the optimizer leaves out an update by itself when it is told to on the device."""
        fused = all(group["fused"] for group in self.optimizer.param_groups)
        return fused and not self.scaler.is_enabled() and self.trouble.device.type in ("cpu", "cuda")

    def hold_masters(self, dtype: torch.dtype) -> None:
        """From now on train through a copy of the model in `dtype`; the optimizer goes on stepping the model."""
        self.working = copy.deepcopy(self.model).to(dtype)
        self.forward = self.working
        self.placement = replace(self.placement, trained=dict(self.working.named_parameters()))

    def share(self, ranks: Ranks) -> None:
        """From now on be one of several that train the same model; after everything that replaces `working`."""
        self.ranks = ranks
        if self.layout.replicas > 1 and self.layout.shards == 1:
            self.gradient_sum = GradientSum(self._pairs(), ranks, group=self.placement.replicas)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.placement.trained[name], kept) for name, kept in self.placement.kept.items()]

    def collect_gradients(self) -> None:
        """Add the gradients of what is trained to those of what is kept, and clear them."""
        for worker, kept in self._pairs():
            collect_gradient(worker, kept)

    def spread_weights(self) -> None:
        """Round the masters to the working copy."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.working.parameters()), list(self.model.parameters()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every step of a run needs to know and no step changes. Lengths in steps, sizes in tokens or sequences."""

    seed: int
    schedule: Schedule
    batch_tokens: int
    epoch_tokens: int
    total_steps: int
    micro_batch: int
    clip: float
    loss_chunk: int
    dropout: float
    ordered: bool = False  # gradients are added in an order that 1, 2, 4, ... ranks share

    def steps(self, length: Duration) -> int:
        """A duration of this run in steps."""
        return length.steps(
            batch_tokens=self.batch_tokens, epoch_tokens=self.epoch_tokens, total_steps=self.total_steps
        )

    def with_micro_batch(self, micro_batch: int) -> "Plan":
        """The same plan with another split of the batch into forwards."""
        return replace(self, micro_batch=micro_batch)


def build_state(model: GPT, run: Run, device: Device, layout: Layout | None = None) -> State:
    """Put a model on its device as laid out (all of it unless said otherwise) in training mode; add an optimizer."""
    model.train()
    placement = place_model(model, layout or Layout(), device, recompute=run.machine.recompute)
    return State(
        model=model,
        working=model,
        forward=model,
        placement=placement,
        optimizer=build_optimizer(placement.kept, placement.sizes, run.optim, form=run.machine.adamw),
        scaler=torch.amp.GradScaler(device.place.type, enabled=device.precision == "fp16"),
        trouble=torch.zeros((), dtype=torch.bool, device=device.place),
    )


def whole_model(state: State) -> GPT | None:
    """The model in one piece, for what is not computed together; None where this is not the first rank.

    A split model is put together from all ranks, which all have to ask.
    """
    first = state.ranks.topology.is_first
    if state.layout.is_whole:
        return state.model if first else None
    with torch.device("meta"):
        model = GPT(state.model.shape)
    for name, whole in state.placement.gather(state.ranks):
        if first:
            model.load_state_dict({name: whole}, strict=False, assign=True)
    return model if first else None


def build_plan(run: Run, *, epoch_tokens: int, micro_batch: int = 1, kind: str = "cpu") -> Plan:
    """Resolve the run's durations into steps.

    epoch_tokens: targets in one pass over the training split; kind: type of device, which decides what is left to it.
    """
    total_steps = run.total_steps(epoch_tokens)
    lengths = {"batch_tokens": run.budget.batch_tokens, "epoch_tokens": epoch_tokens, "total_steps": total_steps}
    schedule = Schedule(
        kind=run.optim.schedule,
        peak=run.optim.lr,
        floor=run.optim.floor,
        warmup_steps=run.optim.warmup.steps(**lengths),
        decay_steps=run.optim.decay.steps(**lengths),
        total_steps=total_steps,
    )
    return Plan(
        seed=run.seed,
        schedule=schedule,
        micro_batch=micro_batch,
        clip=run.optim.clip,
        loss_chunk=LOSS_CHUNK[kind] if run.machine.loss_chunk == "auto" else run.machine.loss_chunk,
        dropout=run.model.dropout,
        ordered=run.machine.deterministic,
        **lengths,
    )
