"""How fast, how close to the limit, how long still."""

import time
from dataclasses import dataclass, field

from megatoken.device import Device
from megatoken.model.count import flops_per_token
from megatoken.presets import Shape


@dataclass(slots=True, kw_only=True)
class Meter:
    """Times steps alone: evaluation, samples and saves are left out by calling `start` after them.

    MFU is achieved model FLOP/s over the device's peak (`device.peak_source` says whose), in both readings of
    model/count.py: full attention and causal. None if the peak is unknown.
    """

    device: Device
    shape: Shape
    batch_tokens: int
    total_steps: int
    world_size: int = 1
    smooth_seconds: float = 0.0
    _began: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """Begin timing the next step."""
        self._began = time.perf_counter()

    @property
    def waited_seconds(self) -> float:
        """Since `start`."""
        return time.perf_counter() - self._began

    def read(self, steps: int = 1) -> dict[str, float | None]:
        """`seconds, tokens_per_second, mfu, mfu_causal` of each of the steps since `start`; begins the next one."""
        self.device.synchronize()
        seconds = self.waited_seconds / steps
        # An exponential mean for the remaining time: one slow step must not make the estimate jump.
        self.smooth_seconds = seconds if not self.smooth_seconds else 0.9 * self.smooth_seconds + 0.1 * seconds
        rate = self.batch_tokens / seconds
        self.start()
        return {
            "seconds": seconds,
            "tokens_per_second": rate,
            "mfu": self._utilization(rate, causal=False),
            "mfu_causal": self._utilization(rate, causal=True),
        }

    def _utilization(self, tokens_per_second: float, *, causal: bool) -> float | None:
        peak = self.device.peak_flops * self.world_size
        return tokens_per_second * flops_per_token(self.shape, causal=causal) / peak if peak else None

    def remaining_seconds(self, step: int) -> float:
        """Time the remaining steps will take at the present pace."""
        return (self.total_steps - step) * self.smooth_seconds
