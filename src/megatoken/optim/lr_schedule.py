"""Learning rate as a pure function of the step."""

import math
from bisect import bisect_left
from dataclasses import dataclass

from megatoken.base.config.batch_ramp import BatchRamp
from megatoken.base.config.fields import Duration
from megatoken.base.config.schema import END_DECAYS, Config
from megatoken.base.rooms import load_entry


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """Linear warm-up to `peak_lr`, then a decay to `min_lr_ratio * peak_lr`.

    decay: an entry of the kind "schedule", a function of the share of the decay that is over, from
        0 to 1, and of min_lr_ratio, which returns a multiple of `peak_lr`. The decay starts after
        warm-up and lasts `decay_length`, or the rest of the run if that is None. Those in
        END_DECAYS start when `decay_length` is left.

    warmup, decay_length and total are in steps, or with a batch ramp in tokens.
    """

    decay: str
    peak_lr: float
    min_lr_ratio: float
    warmup: int
    decay_length: int | None
    total: int
    ramp: BatchRamp | None = None

    @property
    def decay_begin(self) -> int:
        """Where the decay begins, in the unit of `total`."""
        if self.decay in END_DECAYS and self.decay_length is not None:
            return max(self.warmup, self.total - self.decay_length)
        return self.warmup

    def is_before_decay(self, step: int) -> bool:
        """Return True if the decay has not yet begun after `step` steps."""
        return self._begin(step) <= self.decay_begin

    def _begin(self, step: int) -> int:
        """Return where a step begins, in the unit of `total`."""
        return self.ramp.before(step) if self.ramp else step

    def lr(self, step: int) -> float:
        """Return the learning rate of a step. Steps count from 0."""
        start = self._begin(step)
        if start < self.warmup:
            return self.peak_lr * min(self._begin(step + 1), self.warmup) / self.warmup
        begin = self.decay_begin
        if start < begin:
            return self.peak_lr
        end = self.total
        if self.decay_length is not None and self.decay not in END_DECAYS:
            end = begin + self.decay_length
        share = min(max((start - begin) / max(end - begin, 1), 0.0), 1.0)  # of the decay
        multiple: float = load_entry("schedule", self.decay)(share, self.min_lr_ratio)
        return self.peak_lr * multiple


def cosine(share: float, floor: float) -> float:
    """Return half a cosine wave from 1 to `floor` (Loshchilov & Hutter 2017; GPT-3)."""
    return floor + (1 - floor) * (0.5 * (1 + math.cos(math.pi * share)))


def linear(share: float, floor: float) -> float:
    """Return a line from 1 to `floor`; wsd is one at the end of the run (Hu et al. 2024)."""
    return floor + (1 - floor) * (1 - share)


def square_root(share: float, floor: float) -> float:
    """Return 1 - sqrt(share), scaled to end at `floor` (Hägele et al. 2024)."""
    return floor + (1 - floor) * (1 - math.sqrt(share))


def multi_step(share: float, floor: float) -> float:
    """Return sqrt(floor) in the first half of the decay, then `floor` (DeepSeek-AI 2024)."""
    return math.sqrt(floor) if share < 0.5 else floor


def constant(share: float, floor: float) -> float:
    """Return 1."""
    return 1.0


def build_schedule(
    config: Config, *, batch_tokens: int, epoch_tokens: int, total_steps: int
) -> LRSchedule:
    """Return the learning-rate schedule, in steps or, with a batch ramp, in tokens."""
    optim = config.optim
    ramp = config.budget.ramp
    total = ramp.before(total_steps) if ramp else total_steps

    def measure(length: Duration) -> int:
        sizes = {"batch_tokens": batch_tokens, "epoch_tokens": epoch_tokens}
        if ramp:
            return length.tokens(**sizes, total_tokens=total)
        return length.steps(**sizes, total_steps=total)

    if ramp and optim.warmup.unit == "steps":
        warmup = ramp.before(round(optim.warmup.value))
    else:
        warmup = measure(optim.warmup)
    return LRSchedule(
        decay=optim.schedule,
        peak_lr=optim.lr,
        min_lr_ratio=optim.min_lr_ratio,
        warmup=warmup,
        decay_length=None if optim.decay_length is None else measure(optim.decay_length),
        total=total,
        ramp=ramp,
    )


def describe_rates(schedule: LRSchedule, step: int, total_steps: int, old_lr: float) -> str:
    """Describe the learning rate from `step` to the end. old_lr: the rate at the previous step."""
    lr = schedule.lr(step)
    end = schedule.lr(total_steps - 1)
    if abs(lr - old_lr) <= 0.01 * old_lr:
        text = f"learning rate stays {lr:.2e} at step {step:,}"
    else:
        verb = "rises" if lr > old_lr else "falls"
        text = f"learning rate {verb} from {old_lr:.2e} to {lr:.2e} at step {step:,}"
    turn = bisect_left(range(total_steps), True, lo=step, key=lambda s: schedule.lr(s) < lr)
    if turn > step + 1 and schedule.lr(step + 1) == lr:
        text += f", constant until step {min(turn, total_steps):,}"
    if end < lr:
        text += f", ends at {end:.2e} at step {total_steps:,}"
    return f"{schedule.decay}: {text}"
