"""Tokens per second, MFU, and the time remaining."""

import time
from dataclasses import dataclass, field

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.system.device import Device
from megatoken.model.flops import describe_mfu
from megatoken.train.state import StepConfig


@dataclass
class ThroughputMeter:
    """Times steps. To exclude an evaluation, sample or save, call `start` after it.

    MFU is the model's FLOP/s divided by the devices' peak, once with FLOPs counted for full
    attention and once for causal attention (model/flops.py). It is None if the peak is unknown.

    is_dense: whether every row fills the context, as the FLOP count assumes. If not, as for rows of
    conversations, MFU is None.
    """

    device: Device
    model_config: ModelConfig
    step_config: StepConfig
    world_size: int = 1
    is_dense: bool = True
    smooth_seconds: float = 0.0  # of a full batch
    _start: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """Start timing the next step."""
        self._start = time.perf_counter()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since `start` or the last `read`."""
        return time.perf_counter() - self._start

    def read(self, tokens: int, steps: int = 1) -> dict[str, float | None]:
        """Return the speed since `start` or the last `read`, and restart the timing.

        The keys of the dict are seconds (per step), tokens_per_second, mfu and mfu_causal.

        tokens, steps: number of tokens and steps trained in this time.
        """
        self.device.synchronize()
        elapsed = self.elapsed_seconds
        rate = tokens / elapsed
        # An exponential moving average, so that one slow step does not make the estimate jump.
        full = self.step_config.batch_tokens / rate
        self.smooth_seconds = 0.9 * (self.smooth_seconds or full) + 0.1 * full
        self.start()
        peak = self.device.peak_flops * self.world_size * self.is_dense
        return {
            "seconds": elapsed / steps,
            "tokens_per_second": rate,
            **describe_mfu(rate, self.model_config, peak),
        }

    def remaining_seconds(self, step: int) -> float:
        """Return the estimated seconds from `step` to the end of the run at the recent speed."""
        steps = self.step_config
        tokens = steps.tokens_before(steps.total_steps) - steps.tokens_before(step)
        return tokens / steps.batch_tokens * self.smooth_seconds
