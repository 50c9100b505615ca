"""Turn signals and a time limit into stop requests, which the training loop polls.

SIGTERM, SIGINT, SIGUSR1, SIGUSR2 (warnings of batch schedulers) and SIGHUP (a closed terminal) only
set a flag; the loop then saves. A second SIGTERM or SIGINT ends the process at once with
ExitCode.STOPPED. Ranks started by a launcher ignore a second signal, because it may be a copy of
the first. The launcher kills them instead, which works even during a long matmul, when Python
cannot run the handler.
"""

import math
import os
import time
from collections import deque
from types import FrameType
from typing import Self

from megatoken.base.console import format_duration
from megatoken.base.errors import ExitCode
from megatoken.base.system.environment import heartbeat_file
from megatoken.distributed.signals import FORWARDED, RepeatedSignal, handle_signals, name_cause

_RECENT_STEPS = 16  # few enough to forget compilation soon
_MARGIN = 1.5


class StopRequested(Exception):
    """Raised on all ranks when one of them has to save and stop."""


class PreemptionHandler:
    """Context manager around the training loop that records requests to stop.

    The loop polls `stop_reason`, which holds the reason.
    """

    def __init__(self, time_limit_seconds: float | None = None, steps: int = 1) -> None:
        """Start the clock of the time limit; None for no limit.

        steps: the loop can stop only at step numbers that are multiples of this.
        """
        self.steps = steps
        self._limit = time_limit_seconds or 0.0
        self._deadline = (
            math.inf if time_limit_seconds is None else time.monotonic() + time_limit_seconds
        )
        self._reason = ""
        self._signal = 0  # the first
        self._repeated = RepeatedSignal()
        self._step_seconds: deque[float] = deque(maxlen=max(_RECENT_STEPS, steps))
        self._save_seconds: float | None = None
        self._handlers = handle_signals(FORWARDED, self._on_signal)

    def __enter__(self) -> Self:
        """Install the handlers. Outside the main thread only the time limit works."""
        self._handlers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        self._handlers.__exit__(None, None, None)

    @property
    def stop_reason(self) -> str:
        """The reason to save and stop now, such as "SIGTERM" or "time limit 2h"; "" to continue."""
        return self.stop_before(0.0)

    def stop_before(self, seconds: float) -> str:
        """Return the reason to stop before an action that takes `seconds`, or "" to go on.

        The time limit is a reason if the action no longer fits in it.
        """
        if not self._reason and (cause := name_cause(self._signal)):
            return cause  # may change: a dying launcher takes a moment
        if (
            not self._reason
            and time.monotonic() + self.reserve_seconds + _MARGIN * seconds >= self._deadline
        ):
            self._reason = f"time limit {format_duration(self._limit)}"
        return self._reason

    def request_stop(self, reason: str) -> None:
        """Ask the loop to save and stop. Only the first reason is recorded."""
        if not self._signal:
            self._reason = self._reason or reason

    @property
    def reserve_seconds(self) -> float:
        """Seconds before the time limit at which the loop must stop, to have time to save.

        The loop must first train to a step at which it can stop, and then save. Each step is
        assumed to take as long as the longest recent one, and the save as long as the longest so
        far. The sum is multiplied by 1.5. Until a save has been timed, it is assumed to take 5% of
        the limit, but at most 30 s.
        """
        expected = min(30.0, 0.05 * self._limit)
        save = expected if self._save_seconds is None else self._save_seconds
        return _MARGIN * (self.steps * max(self._step_seconds, default=0.0) + save)

    def observe(
        self, step_seconds: float | None = None, *, save_seconds: float | None = None
    ) -> None:
        """Record how long a step or a save took."""
        if step_seconds is not None:
            self._step_seconds.append(step_seconds)
        if save_seconds is not None:
            self._save_seconds = max(save_seconds, self._save_seconds or 0.0)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or number
        if self._repeated.is_repeated(number) and heartbeat_file() is None:
            os._exit(ExitCode.STOPPED)
