"""Predict a run on this machine from the measurements of `megatoken plan --calibrate`."""

from dataclasses import dataclass

from megatoken.base.config.schema import Config
from megatoken.base.system.device import Device
from megatoken.optim.costs import count_saved_bytes
from megatoken.plan.estimate import VAL_COST, count_evaluated_tokens


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured times and memory of steps, one value for each number of layers in `layers`.

    backward_seconds: forward and backward of a micro-batch of `timed_seqs` sequences.
    update_seconds: an optimizer update. step_bytes: peak memory of a step with micro-batches of
    `micro_batch` sequences, in addition to the process's `base_bytes`.
    """

    layers: list[int]
    micro_batch: int
    timed_seqs: int
    backward_seconds: list[float]
    update_seconds: list[float]
    step_bytes: list[int]
    base_bytes: int

    def step_seconds(self, n_layer: int, seqs: float) -> float:
        """Predict the seconds of one step on `seqs` sequences."""
        backward = self._extrapolate(self.backward_seconds, n_layer)
        return seqs / self.timed_seqs * backward + self._extrapolate(self.update_seconds, n_layer)

    def run_seconds(self, config: Config, tokens: float) -> float:
        """Predict the seconds to train on `tokens`, including the batch ramp and evaluations."""
        model = config.model
        parts = list(config.budget.ramp.smaller(tokens)) if config.budget.ramp else []
        rest = tokens - sum(size_tokens for _, size_tokens in parts)
        seconds = 0.0
        for size, size_tokens in [*parts, (config.budget.batch_tokens, rest)]:
            seconds += size_tokens / size * self.step_seconds(model.n_layer, size / model.seq_len)
        evaluated = count_evaluated_tokens(config, tokens) / model.seq_len / self.timed_seqs
        backward = self._extrapolate(self.backward_seconds, model.n_layer)
        return seconds + evaluated * VAL_COST * backward

    def memory_bytes(self, n_layer: int) -> int:
        """Predict the peak memory of the process during a step."""
        return self.base_bytes + round(self._extrapolate(self.step_bytes, n_layer))

    def _extrapolate(self, values: list[float] | list[int], n_layer: int) -> float:
        """Return the value at `n_layer` on the line through the first and last measured values."""
        if len(values) == 1:
            return float(values[0])
        slope = (values[-1] - values[0]) / (self.layers[-1] - self.layers[0])
        return values[0] + slope * (n_layer - self.layers[0])


def count_run_bytes(calibration: Calibration, config: Config, device: Device) -> int:
    """Predict the peak memory of a run's process.

    On a CPU, it includes the copy of the state that a background save writes.
    """
    n_bytes = calibration.memory_bytes(config.model.n_layer)
    if device.type == "cpu" and config.save.every.value:
        n_bytes += count_saved_bytes(config.optim.name, config.model)
    return n_bytes
