"""The real training step on random ids, and its speed and memory for the record.

Ids follow Zipf's law, so that losses fall and the embedding's gradient is as sparse as on text.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatoken.base.config.model_config import VOCAB_MULTIPLE, ModelConfig
from megatoken.base.config.schema import BudgetConfig, Config, MachineConfig
from megatoken.base.console import format_quantity
from megatoken.base.errors import ConfigError
from megatoken.base.system.device import Device, open_device
from megatoken.base.system.metrics_log import Row
from megatoken.base.system.timing import Timing
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.model.gpt import GPT
from megatoken.plan.tuning.prepare import Tuning, build_step
from megatoken.train.state import StepConfig, TrainState
from megatoken.train.step import StepMetrics, train_step

STEPS = 1000  # length of the schedule; no benchmark finishes it
ONE_PROCESS = Comm(DistEnv())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model being trained on random ids."""

    state: TrainState
    step_config: StepConfig
    device: Device
    tuning: Tuning

    def step(self) -> StepMetrics:
        """Train on batch number `state.step`.

        If memory runs out, free the gradients before raising the error.
        """
        config = self.state.model.config
        seqs = self.step_config.batch_tokens // config.seq_len
        try:
            batch = draw_batch(config, seqs, self.state.step, self.device)
            return train_step(self.state, self.step_config, self.device, batch)
        except torch.OutOfMemoryError:
            self.state.zero_grad()
            raise


def draw_ids(seqs: int, length: int, vocab_size: int, *, seed: int) -> Tensor:
    """Draw int64 ids (seqs, length); id r - 1 has a probability roughly proportional to 1/r."""
    uniform = np.random.default_rng(seed).random((seqs, length))
    return torch.from_numpy(np.minimum(vocab_size**uniform, vocab_size).astype(np.int64) - 1)


def draw_batch(
    config: ModelConfig, seqs: int, number: int, device: Device, *, rank: int = 0, nproc: int = 1
) -> Batch:
    """Draw batch `number` and return a rank's share of it, on the device."""
    ids = draw_ids(seqs, config.seq_len + 1, config.vocab_size, seed=number)
    ids = ids.to(device.torch_device).chunk(nproc)[rank]
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def build_workload(
    model_config: ModelConfig,
    machine: MachineConfig,
    *,
    batch_seqs: int,
    micro_batch: int | Literal["auto"],
    comm: Comm = ONE_PROCESS,
) -> Workload:
    """Build a model with its optimizer and prepare its step, as a training run does."""
    budget = BudgetConfig(steps=STEPS, batch_tokens=batch_seqs * model_config.seq_len)
    machine = replace(machine, micro_batch=micro_batch)
    config = Config(seed=0, model=model_config, budget=budget, machine=machine)
    env = comm.dist_env
    device = open_device(machine, local_rank=env.local_rank, local_world_size=env.local_world_size)
    dims = ParallelDims(dp_replicate=env.world_size, rank=env.rank)
    state, step_config, tuning = build_step(build_model(model_config), config, device, dims, comm)
    return Workload(state=state, step_config=step_config, device=device, tuning=tuning)


def build_model(model_config: ModelConfig) -> GPT:
    """Build a model whose initial weights do not depend on the padding of its vocabulary."""
    if model_config.vocab_multiple == VOCAB_MULTIPLE:
        return GPT(model_config)
    weights = GPT(replace(model_config, vocab_multiple=VOCAB_MULTIPLE)).state_dict()
    for name in weights.keys() & {"tokens.weight", "head.weight"}:
        weights[name] = weights[name][: model_config.padded_vocab_size]
    model = GPT(model_config, seed=None)
    model.load_state_dict(weights)
    return model


def count_seqs(tokens: int, seq_len: int) -> int:
    """Return the number of sequences in a batch of `tokens`.

    Raises ConfigError if `tokens` is not a multiple of `seq_len`.
    """
    if tokens % seq_len:
        what = f"{tokens} tokens is not a multiple of the context"
        raise ConfigError(what, "--batch-tokens", f"give a multiple of {seq_len}")
    return tokens // seq_len


def describe_peak(device: Device) -> Row:
    """Return the record's entries for the device and its peak FLOP/s."""
    return {
        "device": device.name,
        "precision": device.precision,
        "peak_flops": device.peak_flops,
        "peak_source": device.peak_source,
    }


def format_peak(device: Device) -> str:
    """Format the device and its peak FLOP/s for display."""
    peak = f"{format_quantity(device.peak_flops, 'FLOP/s')} ({device.peak_source})"
    return f"{device.precision} on {device.name}; MFU against {peak}"


def describe_seconds(timing: Timing) -> Row:
    """Convert a timing to a figure: median, low and high quartile, and number of repeats."""
    low, high = timing.quartiles
    return {"median": timing.median, "low": low, "high": high, "repeats": len(timing.seconds)}
