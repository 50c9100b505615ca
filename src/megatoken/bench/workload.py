"""A training step to be measured: the real `train_step` on a model of a given shape and ids drawn from a seed.

In: a shape, a `Machine`, the batch. Out: something to call. The ids are Zipf-distributed, as words are, so that
losses fall and the embedding's gradient is as sparse as on text; the same seed gives the same ids everywhere.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatoken.architecture import Model
from megatoken.config import Budget, Data, Machine, Run
from megatoken.device import Device, open_device
from megatoken.model.gpt import GPT, initialize
from megatoken.parallel.layout import lay_out
from megatoken.parallel.topology import Topology
from megatoken.presets import VOCAB_MULTIPLE, Shape
from megatoken.train.choose import Choice, choose_forms, use_choice
from megatoken.train.state import Plan, State, build_plan, build_state
from megatoken.train.step import Report, train_step

STEPS = 1000  # of the schedule that is never finished
ALONE = Topology()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A live model and the batches it is fed; `step` trains on the next one."""

    state: State
    plan: Plan
    device: Device
    shape: Shape
    choice: Choice

    def step(self) -> Report:
        """One optimizer step on batch number `state.step`."""
        return train_step(self.state, self.plan, self.device, *self.batch(self.state.step))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (batch, seq_len) of a step, on the device."""
        seqs = self.plan.batch_tokens // self.shape.seq_len
        ids = draw_ids(seqs, self.shape.seq_len + 1, self.shape.vocab_size, seed=step).to(self.device.place)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def draw_ids(seqs: int, length: int, vocab_size: int, *, seed: int) -> Tensor:
    """Ids (seqs, length), int64: rank r as often as 1/r."""
    uniform = np.random.default_rng(seed).random((seqs, length))
    return torch.from_numpy(np.minimum(vocab_size**uniform, vocab_size).astype(np.int64) - 1)


def build_workload(
    shape: Shape,
    machine: Machine,
    *,
    batch_seqs: int,
    micro_batch: int,
    seed: int = 0,
    dropout: float = 0.0,
    compiled: bool = False,
    topology: Topology = ALONE,
) -> Workload:
    """A freshly initialized model of `shape` on the machine's device, with the optimizer and the forms of operations
    that a run would give it. compiled: whether the caller compiles it, which may choose other forms. topology: which
    process of those that will share the batch."""
    run = Run(
        seed=seed,
        model=Model(n_layer=shape.n_layer, n_head=shape.n_head, d_model=shape.d_model, dropout=dropout),
        data=Data(),
        budget=Budget(steps=STEPS, batch_tokens=batch_seqs * shape.seq_len),
        machine=machine,
    )
    device = open_device(machine, rank=topology.local_rank, ranks=topology.local_world_size)
    model = build_model(shape, seed, dropout)
    layout = lay_out(
        "none", 1, rank=topology.rank, world_size=topology.world_size, local_world_size=topology.local_world_size
    )
    state = build_state(model, run, device, layout)
    choice = choose_forms(shape, machine, device, micro_batch=micro_batch, dropout=dropout, compiled=compiled)
    use_choice(state, choice, device)
    plan = build_plan(
        run, epoch_tokens=run.budget.batch_tokens * STEPS, micro_batch=micro_batch, kind=device.place.type
    )
    return Workload(state=state, plan=plan, device=device, shape=shape, choice=choice)


def build_model(shape: Shape, seed: int, dropout: float = 0.0) -> GPT:
    """An initialized model whose weights do not depend on how far its vocabulary is padded."""
    standard = replace(shape, vocab_multiple=VOCAB_MULTIPLE)
    model = GPT(standard, dropout=dropout)
    initialize(model, seed)
    if standard == shape:
        return model
    other = GPT(shape, dropout=dropout)
    weights = model.state_dict()
    for name in weights.keys() & {"tokens.weight", "head.weight"}:
        weights[name] = weights[name][: shape.padded_vocab_size]
    other.load_state_dict(weights)
    return other
