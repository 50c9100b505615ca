"""Predict a run on this machine from the measurements of `megatoken plan --calibrate`."""

from dataclasses import dataclass

from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import Config
from megatoken.estimate.plan import count_evaluated_tokens
from megatoken.optim.costs import count_saved_bytes
from megatoken.system.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured for each number of `layers`.

    Seconds of forward and backward of a micro-batch of `timed_seqs` sequences, of an update, of the validation loss of
    such a micro-batch; bytes of a step in micro-batches of `micro_batch` beside `base_bytes`, which the process had
    before.
    """

    layers: list[int]
    micro_batch: int
    timed_seqs: int
    backward_seconds: list[float]
    update_seconds: list[float]
    validation_seconds: list[float]
    step_bytes: list[int]
    base_bytes: int

    def step_seconds(self, n_layer: int, seqs: float) -> float:
        """One step on `seqs` sequences of a model of that many layers."""
        backward, update = (
            self._extend(each, n_layer) for each in (self.backward_seconds, self.update_seconds)
        )
        return seqs / self.timed_seqs * backward + update

    def run_seconds(self, config: Config, model: ModelConfig, tokens: float) -> float:
        """Training on so many tokens, with the smaller first batches and the evaluations of the config."""
        sizes = [*config.budget.ramp.smaller(tokens)] if config.budget.ramp else []
        sizes.append((config.budget.batch_tokens, tokens - sum(trained for _, trained in sizes)))
        steps = [
            trained / size * self.step_seconds(model.n_layer, size / model.seq_len)
            for size, trained in sizes
        ]
        evaluated = count_evaluated_tokens(config, tokens) / model.seq_len / self.timed_seqs
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


def count_run_bytes(known: Calibration, config: Config, model: ModelConfig, device: Device) -> int:
    """Peak memory of the process of a run: on a CPU with the copy that is being saved while training goes on."""
    copied = device.type == "cpu" and config.save.every.value
    return known.memory_bytes(model.n_layer) + (
        count_saved_bytes(config.optim.name, model) if copied else 0
    )
