"""A model, a device and a plan small enough to train in milliseconds: what many tests start from."""

from dataclasses import replace

import torch

from megatoken.config import Optim, Run, build
from megatoken.device import Device
from megatoken.model.gpt import GPT, initialize
from megatoken.parallel.layout import Layout
from megatoken.presets import Shape
from megatoken.train.state import Plan, State, build_plan, build_state

SHAPE = Shape(n_layer=2, n_head=2, d_model=32, d_ff=64, vocab_size=97, seq_len=16)
LLAMA = replace(
    SHAPE, n_kv_head=1, d_ff=96, norm="rmsnorm", positions="rotary", mlp="swiglu", bias=False, rope_theta=100.0
)
CPU = Device(place=torch.device("cpu"), name="cpu", precision="fp32", peak_flops=0.0, peak_source="unknown")


def tiny_run(**values: object) -> Run:
    keys = {"budget.steps": 10, "budget.batch_tokens": 8 * 16, "model.seq_len": 16}
    return build(keys | {key.replace("__", "."): value for key, value in values.items()})


def tiny_state(
    *,
    dropout: float = 0.0,
    seed: int = 1,
    optim: Optim | None = None,
    form: str = "auto",
    shape: Shape = SHAPE,
    layout: Layout | None = None,
) -> State:
    model = GPT(shape, dropout=dropout)
    initialize(model, seed)
    return build_state(model, replace(tiny_run(machine__adamw=form), optim=optim or Optim()), CPU, layout)


def tiny_plan(micro_batch: int = 8, **values: object) -> Plan:
    return build_plan(tiny_run(**values), epoch_tokens=1280, micro_batch=micro_batch)


def tiny_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(0, SHAPE.vocab_size, (8, 17), generator=torch.Generator().manual_seed(seed))
    return rows[:, :-1], rows[:, 1:]
