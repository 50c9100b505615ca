"""Learning rate as a pure function of the step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """Linear warm-up to `peak_lr`, then a decay that ends at `min_lr_ratio * peak_lr`. Lengths in steps.

    decay: cosine and linear start at the end of warm-up (Loshchilov & Hutter 2017; GPT-3); wsd stays at the peak
    and decays linearly over the last `decay_steps` (Hu et al. 2024, warmup-stable-decay), wsd-sqrt as 1 - sqrt
    (Hägele et al. 2024); constant stays.
    """

    decay: str
    peak_lr: float
    min_lr_ratio: float
    warmup_steps: int
    decay_steps: int
    total_steps: int

    def lr(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.peak_lr
        decay_begin = self.warmup_steps
        if self.decay in ("wsd", "wsd-sqrt"):
            decay_begin = max(decay_begin, self.total_steps - self.decay_steps)
        done = min(max((step - decay_begin) / max(self.total_steps - decay_begin, 1), 0.0), 1.0)
        curves = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "wsd-sqrt": 1 - math.sqrt(done)}
        left = curves.get(self.decay, 1 - done)
        return self.peak_lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)
