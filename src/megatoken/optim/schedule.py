"""Learning rate as a pure function of the step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak`, then a decay that ends at `floor * peak`. Lengths in steps.

    kind: cosine and linear decay from the end of warm-up (Loshchilov & Hutter 2017; GPT-3); wsd stays at the peak
    and decays linearly over the last `decay_steps` (Hu et al. 2024, warmup-stable-decay), wsd-sqrt as 1 - sqrt
    (Hägele et al. 2024); constant stays.
    """

    kind: str
    peak: float
    floor: float
    warmup_steps: int
    decay_steps: int
    total_steps: int

    def lr(self, step: int) -> float:
        """The rate used by step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        begin = self.warmup_steps
        if self.kind in ("wsd", "wsd-sqrt"):
            begin = max(begin, self.total_steps - self.decay_steps)
        done = min(max((step - begin) / max(self.total_steps - begin, 1), 0.0), 1.0)
        shapes = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "wsd-sqrt": 1 - math.sqrt(done)}
        left = shapes.get(self.kind, 1 - done)
        return self.peak * (self.floor + (1 - self.floor) * left)
