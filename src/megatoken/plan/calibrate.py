"""Measure the real train_step on this machine for half a minute, to predict runs.

Two models with the run's width but few layers are timed in turn; the time per layer follows from
their difference. The result is cached for later plans and for the prediction that training prints.
On a CPU, the run's own micro-batch size is used, and its memory is measured in one forward and
backward.
"""

import time
from dataclasses import asdict, replace
from functools import partial
from statistics import median

import torch

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import Config
from megatoken.base.system.device import Device, open_device, restored_settings
from megatoken.base.system.machine import peak_resident_bytes
from megatoken.base.system.measurement_cache import save_measurement
from megatoken.base.system.timing import time_once
from megatoken.data.dataloader import Batch
from megatoken.model.gpt import GPT
from megatoken.plan.calibration import Calibration
from megatoken.plan.expectation import CALIBRATIONS
from megatoken.plan.memory_tracker import MemoryTracker
from megatoken.plan.tuning.kernels import step_key
from megatoken.plan.tuning.peak import with_peak
from megatoken.plan.tuning.prepare import Tuning, build_step
from megatoken.train.state import Position, StepConfig, TrainState
from megatoken.train.step import forward_backward, train_step

MOST_LAYERS = 4
TIMED_TOKENS = 1024  # of a timed micro-batch on a CPU, where a larger one is hardly faster
FEWEST_ROUNDS = 3


@restored_settings()
def calibrate(config: Config, seconds: float) -> tuple[Device, Calibration]:
    """Measure for about `seconds`; cache the result and return (device, calibration).

    Raises ConfigError if not even one sequence fits in memory.
    """
    device = with_peak(open_device(config.machine))
    start = time.perf_counter()
    timer = StepTimer(config, device)
    while time.perf_counter() - start < seconds or len(timer.rounds) < FEWEST_ROUNDS:
        timer.run_interleaved()
    calibration = timer.result()
    save_measurement(CALIBRATIONS, step_key(config, config.model, device), asdict(calibration))
    return device, calibration


class StepTimer:
    """Times training steps of several models in turn; they have the run's width but few layers.

    rounds: for each round and model, the seconds of a micro-batch's forward and backward, and of an
    update. base_bytes: memory that the process used before the models were built.
    """

    def __init__(self, config: Config, device: Device) -> None:
        config = replace(config, machine=replace(config.machine, compile="off"))
        self.device = device
        self.base_bytes = peak_resident_bytes() if device.type == "cpu" else 0
        model = config.model
        self.layers = [model.n_layer] if model.n_layer <= MOST_LAYERS else [1, MOST_LAYERS]
        models = [replace(model, n_layer=n_layer) for n_layer in self.layers]
        *_, tuning = build_run(config, models[-1], device)
        self.micro_batch = tuning.micro_batch
        if device.type != "cpu" and config.machine.micro_batch == "auto":
            # What fits with few layers may not fit with all.
            smallest = min(config.batch_seqs, count_timed_seqs(model))
            divisors = range(smallest, config.batch_seqs + 1)
            self.micro_batch = next(n for n in divisors if config.batch_seqs % n == 0)
        self.timed_seqs = self.micro_batch
        if device.type == "cpu":
            self.timed_seqs = min(self.micro_batch, count_timed_seqs(model))
        accumulates = config.batch_seqs > self.micro_batch
        self.rounds: list[list[tuple[float, float]]] = []
        self._runs = []
        self._step_bytes = []
        for small_model in models:
            with MemoryTracker() as tracker:
                state, steps, _ = build_run(config, small_model, device, self.timed_seqs, tuning)
                run = state, steps
                take_largest_step(*run, device, self.micro_batch, accumulates=accumulates)
            time_step(*run, device)  # warm up
            self._runs.append(run)
            self._step_bytes.append(tracker.peak_bytes)

    def run_interleaved(self) -> None:
        """Time one step of each model."""
        self.rounds.append([time_step(*run, self.device) for run in self._runs])

    def result(self) -> Calibration:
        """Return the median measurements."""
        by_model = list(zip(*self.rounds, strict=True))
        return Calibration(
            layers=self.layers,
            micro_batch=self.micro_batch,
            timed_seqs=self.timed_seqs,
            backward_seconds=[median(s[0] for s in model) for model in by_model],
            update_seconds=[median(s[1] for s in model) for model in by_model],
            step_bytes=self._step_bytes,
            base_bytes=self.base_bytes,
        )


def count_timed_seqs(model: ModelConfig) -> int:
    """Return the largest number of sequences in a micro-batch that is timed on a CPU."""
    return max(1, TIMED_TOKENS // model.seq_len)


def build_run(
    config: Config,
    model: ModelConfig,
    device: Device,
    seqs: int | None = None,
    saved: Tuning | None = None,
) -> tuple[TrainState, StepConfig, Tuning]:
    """Build a model with its optimizer, and settings for steps of two micro-batches.

    seqs: sequences of a micro-batch; None for what a run would choose on a CPU. saved: choices of
        another model.
    """
    if seqs is not None:
        config = replace(config, machine=replace(config.machine, micro_batch=seqs))
    is_measured = device.type == "cpu"
    return build_step(GPT(model), config, device, saved=saved, measures_sizes=is_measured)


def draw_batch(state: TrainState, device: Device, seqs: int) -> Batch:
    """Draw a batch of random token ids."""
    model = state.model.config
    ids = torch.randint(model.vocab_size, (seqs, model.seq_len), device=device.torch_device)
    return Batch(ids, ids)


def take_largest_step(
    state: TrainState,
    step_config: StepConfig,
    device: Device,
    micro_batch: int,
    *,
    accumulates: bool,
) -> None:
    """Reach the peak memory of a step with this micro-batch size, in less time than a step.

    Computes one micro-batch of that size after smaller ones, which create the other tensors.
    accumulates: whether a step has several micro-batches. Gradients of earlier micro-batches then
    exist while the last one is computed.
    """
    single = replace(step_config, micro_batch=1)
    batch = draw_batch(state, device, 2 if accumulates else 1)
    train_step(state, single, device, batch)  # creates the optimizer's state
    if accumulates:
        forward_backward(state, single, device, batch)
    largest = replace(step_config, micro_batch=micro_batch)
    forward_backward(state, largest, device, draw_batch(state, device, micro_batch))
    state.zero_grad()


def time_step(state: TrainState, step_config: StepConfig, device: Device) -> tuple[float, float]:
    """Return the seconds of one micro-batch's forward and backward, and of one update."""
    batch = draw_batch(state, device, 2 * step_config.micro_batch)
    half = batch.split(step_config.micro_batch)[0]
    run_backward = partial(forward_backward, state, step_config, device, half)
    backward = time_once(run_backward, device.synchronize)
    state.zero_grad()
    state.position = Position()
    step = time_once(partial(train_step, state, step_config, device, batch), device.synchronize)
    return backward, max(0.0, step - 2 * backward)
