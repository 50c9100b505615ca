"""Measures the real train_step on this machine for half a minute, and predicts runs from that.

Models of the run's width with few layers are timed in turns; what a layer takes is their difference. The measurement
is kept in the cache, for a later plan and for the line that training prints.
"""

import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import Config, MachineConfig
from megatoken.data.dataloader import Batch
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.errors import ConfigError
from megatoken.estimate.plan import count_evaluated_tokens
from megatoken.eval.val_loss import validation_loss
from megatoken.model.gpt import GPT
from megatoken.optim.costs import count_saved_bytes
from megatoken.system.device import Device, open_device, with_peak
from megatoken.system.environment import cache_get, cache_put, peak_resident_bytes
from megatoken.train.kernel_autotune import apply_choice, autotune
from megatoken.train.state import StepConfig, TrainState, build_state, build_step_config
from megatoken.train.step import forward_backward, train_step

CALIBRATIONS = "calibrations.json"  # in the cache
MOST_LAYERS = 4
SMALLEST_TOKENS = 1024  # of a micro-batch that is left to `auto`: a larger one is hardly faster on a CPU
FEWEST_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured for each number of `layers`.

    Seconds of forward and backward of a micro-batch, of an update, of a micro-batch's validation loss; bytes of a step
    of several micro-batches beside `base_bytes`, which the process had before.
    """

    layers: list[int]
    micro_batch: int
    backward_seconds: list[float]
    update_seconds: list[float]
    validation_seconds: list[float]
    step_bytes: list[int]
    base_bytes: int

    def step_seconds(self, n_layer: int, micro_steps: float) -> float:
        """One step of a model of that many layers; micro_steps: micro-batches, or the share of one."""
        return micro_steps * self._extend(self.backward_seconds, n_layer) + self._extend(self.update_seconds, n_layer)

    def run_seconds(self, config: Config, model: ModelConfig, tokens: float) -> float:
        """Training on so many tokens, with the smaller first batches and the evaluations of the config."""
        sizes = [*config.budget.ramp.smaller(tokens)] if config.budget.ramp else []
        sizes.append((config.budget.batch_tokens, tokens - sum(trained for _, trained in sizes)))
        steps = [
            trained / size * self.step_seconds(model.n_layer, size / model.seq_len / self.micro_batch)
            for size, trained in sizes
        ]
        evaluated = count_evaluated_tokens(config, tokens) / model.seq_len / self.micro_batch
        return sum(steps) + evaluated * self._extend(self.validation_seconds, model.n_layer)

    def memory_bytes(self, n_layer: int) -> int:
        """Peak memory of the process in a step."""
        return self.base_bytes + round(self._extend(self.step_bytes, n_layer))

    def _extend(self, values: list[float] | list[int], n_layer: int) -> float:
        """The value at `n_layer` on the line through the first and the last."""
        if len(values) == 1:
            return float(values[0])
        slope = (values[-1] - values[0]) / (self.layers[-1] - self.layers[0])
        return values[0] + slope * (n_layer - self.layers[0])


def calibration_key(model: ModelConfig, machine: MachineConfig, device: Device) -> str:
    """Everything that a calibration depends on beside the number of layers."""
    shape = {name: value for name, value in model.architecture().items() if name != "n_layer"}
    threads = f"{torch.get_num_threads()} threads, " if device.type == "cpu" else ""
    others = f"dropout {model.dropout}, recomputed {machine.activation_checkpointing}"
    return f"{device.name}, {threads}{device.precision}, torch {torch.__version__}; {shape}, {others}"


def find_calibration(
    model: ModelConfig, machine: MachineConfig, device: Device, micro_batch: int
) -> Calibration | None:
    """The kept one for a model's width on this device; None if there is none for that micro-batch."""
    kept: Any = cache_get(CALIBRATIONS).get(calibration_key(model, machine, device))
    if not isinstance(kept, dict) or kept.get("micro_batch") != micro_batch or "validation_seconds" not in kept:
        return None
    return Calibration(**kept)


def calibrate(config: Config, model: ModelConfig, seconds: float) -> tuple[Device, Calibration]:
    """Measure for about `seconds`, and keep the result. Raises ConfigError where not even one sequence fits."""
    device = with_peak(open_device(config.machine))
    base_bytes = peak_resident_bytes() if device.type == "cpu" else 0
    start = time.perf_counter()
    timer = StepTimer(config, model, device)
    while time.perf_counter() - start < seconds or timer.rounds < FEWEST_ROUNDS:
        timer.take_turns()
    calibration = timer.result(base_bytes)
    cache_put(CALIBRATIONS, {calibration_key(model, config.machine, device): asdict(calibration)})
    return device, calibration


def count_run_bytes(known: Calibration, config: Config, model: ModelConfig, device: Device) -> int:
    """Peak memory of the process of a run: on a CPU with the copy that is being saved while training goes on."""
    copied = device.type == "cpu" and config.save.every.value
    return known.memory_bytes(model.n_layer) + (count_saved_bytes(config.optim.name, model) if copied else 0)


class StepTimer:
    """Models of a run's width with few layers, whose steps are timed in turns."""

    def __init__(self, config: Config, model: ModelConfig, device: Device) -> None:
        from megatoken.estimate.memory_tracker import MemoryTracker

        machine = config.machine
        self.device, self.micro_batch = device, choose_micro_batch(config, model.seq_len)
        self.layers = [model.n_layer] if model.n_layer <= MOST_LAYERS else [1, MOST_LAYERS]
        self._runs, self._peaks = [], []
        self._backward: list[list[float]] = [[] for _ in self.layers]
        self._update: list[list[float]] = [[] for _ in self.layers]
        self._validation: list[list[float]] = [[] for _ in self.layers]
        choice = autotune(model, machine, device, micro_batch=self.micro_batch, dropout=model.dropout)
        for n_layer in self.layers:
            with MemoryTracker() as tracker:
                run = build_run(replace(model, n_layer=n_layer), machine, device, self.micro_batch)
                apply_choice(run[0], choice, device)
                self._runs.append(run)
                take_steps(*run, device)
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
            backward_seconds=[statistics.median(each) for each in self._backward],
            update_seconds=[statistics.median(each) for each in self._update],
            validation_seconds=[statistics.median(each) for each in self._validation],
            step_bytes=self._peaks,
            base_bytes=base_bytes,
        )


def choose_micro_batch(config: Config, seq_len: int) -> int:
    """The config's, else the smallest divisor of the batch that is long enough. Raises ConfigError if there is none."""
    if config.machine.micro_batch != "auto":
        return config.machine.micro_batch
    fewest = max(1, min(config.batch_seqs, SMALLEST_TOKENS // seq_len))
    divisors = [size for size in range(fewest, config.batch_seqs + 1) if config.batch_seqs % size == 0]
    if not divisors:
        raise ConfigError("the batch holds no sequence", "budget.batch_tokens", f"give a multiple of {seq_len}")
    return divisors[0]


def build_run(
    model: ModelConfig, machine: MachineConfig, device: Device, micro_batch: int
) -> tuple[TrainState, StepConfig]:
    """An initialized model with its optimizer."""
    batch_tokens = 2 * micro_batch * model.seq_len
    config = replace(Config(), model=model, machine=machine)
    config = replace(config, budget=replace(config.budget, steps=1, batch_tokens=batch_tokens))
    state = build_state(GPT(model), config, device)
    sizes = {"epoch_tokens": batch_tokens, "micro_batch": micro_batch}
    return state, build_step_config(config, **sizes, device_type=device.type)


def take_steps(state: TrainState, step_config: StepConfig, device: Device) -> tuple[float, float]:
    """Seconds of forward and backward of one micro-batch, and of a step beyond its second one."""
    shape = 2 * step_config.micro_batch, state.model.config.seq_len
    ids = torch.randint(state.model.config.vocab_size, shape, device=device.torch_device)
    device.synchronize()
    start = time.perf_counter()
    forward_backward(state, step_config, device, Batch(ids[: step_config.micro_batch], ids[: step_config.micro_batch]))
    state.optimizer.zero_grad(set_to_none=True)
    device.synchronize()
    middle = time.perf_counter()
    state.step = 0
    train_step(state, step_config, device, Batch(ids, ids))
    device.synchronize()
    return middle - start, time.perf_counter() - middle - (middle - start)


def time_validation(state: TrainState, step_config: StepConfig, device: Device) -> float:
    """Seconds of the validation loss of one micro-batch."""
    model = state.model.config
    ids = np.random.default_rng(0).integers(model.vocab_size, size=(step_config.micro_batch, model.seq_len + 1))
    device.synchronize()
    start = time.perf_counter()
    validation_loss(
        state.model,
        [ids],
        device,
        chunk=step_config.loss_chunk,
        comm=Comm(DistEnv()),
        byte_lengths=np.ones(model.vocab_size, dtype=np.int64),
        softmax_cross_entropy=state.cross_entropy_fn,
    )
    device.synchronize()
    return time.perf_counter() - start
