"""Measure the real train_step on this machine for half a minute, to predict runs from it.

Models of the run's width with few layers are timed interleaved; the time of a layer is their
difference. The result is cached for later plans and for the line that training prints. On a CPU the
micro-batch is that of a run; its memory is measured by one pass.
"""

import statistics
import time
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch

from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import Config
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.errors import ConfigError
from megatoken.estimate.calibration import Calibration
from megatoken.eval.val_loss import validation_loss
from megatoken.model.gpt import GPT
from megatoken.system.device import Device, open_device, with_peak
from megatoken.system.machine import peak_resident_bytes
from megatoken.system.measurement_cache import save_measurement
from megatoken.system.timing import time_once
from megatoken.train.expectation import CALIBRATIONS, calibration_key
from megatoken.train.kernel_autotune import KernelChoice, apply_choice, autotune
from megatoken.train.micro_batch import find_rates, pick_micro_batch
from megatoken.train.state import StepConfig, TrainState, build_state, build_step_config
from megatoken.train.step import forward_backward, train_step

MOST_LAYERS = 4
TIMED_TOKENS = (
    1024  # of the micro-batch that is timed, at most on a CPU, where a larger one is hardly faster
)
FEWEST_ROUNDS = 3


def calibrate(config: Config, model: ModelConfig, seconds: float) -> tuple[Device, Calibration]:
    """Measure for about `seconds`, and keep the result. Raises ConfigError where not even one sequence fits."""
    device = with_peak(open_device(config.machine))
    base_bytes = peak_resident_bytes() if device.type == "cpu" else 0
    start = time.perf_counter()
    timer = StepTimer(config, model, device)
    while time.perf_counter() - start < seconds or timer.rounds < FEWEST_ROUNDS:
        timer.take_turns()
    calibration = timer.result(base_bytes)
    save_measurement(CALIBRATIONS, calibration_key(config, model, device), asdict(calibration))
    return device, calibration


class StepTimer:
    """Models of a run's width with few layers, whose steps are timed in turns."""

    def __init__(self, config: Config, model: ModelConfig, device: Device) -> None:
        from megatoken.measure.memory_tracker import MemoryTracker

        if not config.batch_seqs:
            fix = f"give a multiple of {model.seq_len}"
            raise ConfigError("the batch holds no sequence", "budget.batch_tokens", fix)
        machine = config.machine
        asked = machine.micro_batch if machine.micro_batch != "auto" else config.batch_seqs
        choice = autotune(model, machine, device, micro_batch=asked, dropout=model.dropout)
        self.device = device
        self.layers = [model.n_layer] if model.n_layer <= MOST_LAYERS else [1, MOST_LAYERS]
        self._runs, self._peaks = [], []
        self._backward: list[list[float]] = [[] for _ in self.layers]
        self._update: list[list[float]] = [[] for _ in self.layers]
        self._validation: list[list[float]] = [[] for _ in self.layers]
        models = [replace(model, n_layer=n_layer) for n_layer in self.layers]
        self.micro_batch = choose_micro_batch(config, models[-1], device, choice)
        self.timed_seqs = (
            min(self.micro_batch, count_timed_seqs(model))
            if device.type == "cpu"
            else self.micro_batch
        )
        for each in models:
            with MemoryTracker() as tracker:
                run = build_run(config, each, device, choice, self.timed_seqs)
                take_step_in_one_pass(
                    *run, device, self.micro_batch, accumulates=config.batch_seqs > self.micro_batch
                )
            take_steps(*run, device)
            self._runs.append(run)
            self._peaks.append(tracker.peak_bytes)

    @property
    def rounds(self) -> int:
        return len(self._update[-1])

    def take_turns(self) -> None:
        """One round: a step of each model."""
        for index, run in enumerate(self._runs):
            backward, whole = take_steps(*run, self.device)
            self._backward[index].append(backward)
            self._update[index].append(max(0.0, whole - backward))
            self._validation[index].append(time_validation(*run, self.device))

    def result(self, base_bytes: int) -> Calibration:
        """The medians. base_bytes: memory of the process before."""
        return Calibration(
            layers=self.layers,
            micro_batch=self.micro_batch,
            timed_seqs=self.timed_seqs,
            backward_seconds=[statistics.median(each) for each in self._backward],
            update_seconds=[statistics.median(each) for each in self._update],
            validation_seconds=[statistics.median(each) for each in self._validation],
            step_bytes=self._peaks,
            base_bytes=base_bytes,
        )


def count_timed_seqs(model: ModelConfig) -> int:
    """Sequences of the micro-batch that is timed on a CPU, where that of a run has more."""
    return max(1, TIMED_TOKENS // model.seq_len)


def choose_micro_batch(
    config: Config, model: ModelConfig, device: Device, choice: KernelChoice
) -> int:
    """The config's, else on a CPU that of a run, which this measures where no run did. model: with few layers."""
    if config.machine.micro_batch != "auto":
        return config.machine.micro_batch
    fewest = min(config.batch_seqs, count_timed_seqs(model))
    if device.type != "cpu":  # beside few layers more would fit than beside all
        return next(
            size for size in range(fewest, config.batch_seqs + 1) if config.batch_seqs % size == 0
        )
    state, step_config = build_run(config, model, device, choice, fewest)
    return pick_micro_batch(
        find_rates(state, step_config, config.machine, device, config.batch_seqs)[0]
    )


def build_run(
    config: Config, model: ModelConfig, device: Device, choice: KernelChoice, micro_batch: int
) -> tuple[TrainState, StepConfig]:
    """An initialized model with its optimizer, and steps of two micro-batches."""
    batch_tokens = 2 * micro_batch * model.seq_len
    config = replace(Config(), model=model, machine=config.machine, optim=config.optim)
    config = replace(config, budget=replace(config.budget, steps=1, batch_tokens=batch_tokens))
    state = build_state(GPT(model), config, device)
    apply_choice(state, choice, device)
    sizes = {"epoch_tokens": batch_tokens, "micro_batch": micro_batch}
    return state, build_step_config(config, **sizes, device_type=device.type)


def take_step_in_one_pass(
    state: TrainState,
    step_config: StepConfig,
    device: Device,
    micro_batch: int,
    *,
    accumulates: bool,
) -> None:
    """Need the memory of a step of that micro-batch in little more time than one forward and backward of it.

    accumulates: a step has several, so that gradients lie beside what the last ones need.
    """
    ids = torch.randint(
        state.model.config.vocab_size, (micro_batch + 2, state.model.config.seq_len)
    )
    ids = ids.to(device.torch_device)
    few, most, single = (
        Batch(ids[:2], ids[:2]),
        Batch(ids[2:], ids[2:]),
        replace(step_config, micro_batch=1),
    )
    train_step(
        state, single, device, few if accumulates else few.split(1)[0]
    )  # makes the optimizer's state
    if accumulates:
        forward_backward(state, single, device, few)
    forward_backward(state, replace(step_config, micro_batch=micro_batch), device, most)
    state.compute_model.zero_grad(set_to_none=True)
    state.optimizer.zero_grad(set_to_none=True)


def take_steps(state: TrainState, step_config: StepConfig, device: Device) -> tuple[float, float]:
    """Seconds of forward and backward of one micro-batch, and of a step beyond its second one."""
    shape = 2 * step_config.micro_batch, state.model.config.seq_len
    ids = torch.randint(state.model.config.vocab_size, shape, device=device.torch_device)
    both = Batch(ids, ids)
    one = both.split(step_config.micro_batch)[0]
    backward = time_once(
        partial(forward_backward, state, step_config, device, one), device.synchronize
    )
    state.optimizer.zero_grad(set_to_none=True)
    state.step = 0
    step = time_once(partial(train_step, state, step_config, device, both), device.synchronize)
    return backward, step - backward


def time_validation(state: TrainState, step_config: StepConfig, device: Device) -> float:
    """Seconds of the validation loss of one micro-batch."""
    model = state.model.config
    ids = np.random.default_rng(0).integers(
        model.vocab_size, size=(step_config.micro_batch, model.seq_len + 1)
    )
    validate = partial(
        validation_loss,
        state.model,
        [ids],
        device,
        chunk=step_config.loss_chunk,
        comm=Comm(DistEnv()),
        count_bytes=lambda *_: 0,
        softmax_cross_entropy=state.cross_entropy_fn,
    )
    return time_once(validate, device.synchronize)
