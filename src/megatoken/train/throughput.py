"""Tokens per second, MFU, and the time remaining."""

import time
from dataclasses import dataclass, field

from megatoken.config.model_config import ModelConfig
from megatoken.model.flops import flops_per_token
from megatoken.system.device import Device
from megatoken.train.state import StepConfig


@dataclass(slots=True)
class ThroughputMeter:
    """Times steps alone: call `start` after an evaluation, a sample or a save to leave it out.

    MFU is achieved model FLOP/s over the device's peak (`device.peak_source` says which), in both readings of
    model/flops.py: full attention and causal. None if the peak is unknown, and where `is_dense` is False: then tokens
    are counted as whole contexts, but rows are shorter, and reference models and sampling compute more.
    """

    device: Device
    model_config: ModelConfig
    step_config: StepConfig
    world_size: int = 1
    is_dense: bool = True
    smooth_seconds: float = 0.0  # of a full batch
    total_seconds: float = 0.0  # of all steps that were read
    total_tokens: int = 0
    _start: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """Begin timing the next step."""
        self._start = time.perf_counter()

    @property
    def elapsed_seconds(self) -> float:
        """Since `start`."""
        return time.perf_counter() - self._start

    def read(self, tokens: int, steps: int = 1) -> dict[str, float | None]:
        """`seconds, tokens_per_second, mfu, mfu_causal` of each of the steps since `start`; begins the next one.

        tokens: of all these steps.
        """
        self.device.synchronize()
        elapsed = self.elapsed_seconds
        seconds, rate = elapsed / steps, tokens / elapsed
        self.total_seconds += elapsed
        self.total_tokens += tokens
        # An exponential mean for the remaining time: one slow step must not make the estimate jump.
        full = self.step_config.batch_tokens / rate
        self.smooth_seconds = (
            full if not self.smooth_seconds else 0.9 * self.smooth_seconds + 0.1 * full
        )
        self.start()
        peak = self.device.peak_flops * self.world_size if self.is_dense else 0.0
        mfu, mfu_causal = (
            rate * flops_per_token(self.model_config, causal=causal) / peak if peak else None
            for causal in (False, True)
        )
        return {"seconds": seconds, "tokens_per_second": rate, "mfu": mfu, "mfu_causal": mfu_causal}

    def remaining_seconds(self, step: int) -> float:
        """Time the remaining steps take at the recent pace."""
        steps = self.step_config
        tokens = steps.tokens_before(steps.total_steps) - steps.tokens_before(step)
        return tokens / steps.batch_tokens * self.smooth_seconds
