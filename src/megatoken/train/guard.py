"""The guard: says in time that the run has to stop, so that the loop can finish its step and save.

In: SIGTERM, SIGINT, SIGUSR1 (the warning of batch schedulers), SIGHUP (a closed terminal) and a wall-clock limit.
Out: a reason, asked for once a step. Handlers only set a flag: nothing is saved, printed or raised in them.
A second SIGTERM or SIGINT ends the process at once with Exit.STOPPED; a commit under way is lost, what was committed
before is intact. Copies of a signal within half a second count as one, because launchers that signal the
process as well as its group deliver two.
Absent on purpose: agreeing between ranks (the loop reduces the flag), saving, torch.
"""

import os
import signal
import threading
import time
from collections import deque
from types import FrameType
from typing import Any, Self

from megatoken.errors import Exit

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")  # Windows has only the first two
_IMPATIENT = ("SIGTERM", "SIGINT")
_SAME_REQUEST_SECONDS = 0.5
_REMEMBERED_STEPS = 16  # long enough for an evaluation to be among them, short enough to forget compilation
_SAFETY = 1.5


class Guard:
    """Context manager around the loop; `stop_requested` is "" or the reason, and stays once it is set."""

    def __init__(self, time_limit_seconds: float | None = None) -> None:
        """The limit runs from here, by the monotonic clock; None: no limit."""
        self._limit = time_limit_seconds
        self._start = time.monotonic()
        self._reason = ""
        self._hard_signal_at: float | None = None
        self._steps: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._save_seconds: float | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers; outside the main thread, where Python allows none, only the limit works."""
        if threading.current_thread() is threading.main_thread():
            for name in _SIGNALS:
                if hasattr(signal, name):
                    number = int(getattr(signal, name))
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    @property
    def stop_requested(self) -> str:
        """Why the loop has to save and stop now: "SIGTERM", "time limit 2h", ...; "" to go on."""
        if not self._reason and self._limit is not None and self.remaining_seconds <= self.reserve_seconds:
            self._reason = f"time limit {_spell(self._limit)}"
        return self._reason

    @property
    def remaining_seconds(self) -> float:
        """Until the limit; infinite without one."""
        if self._limit is None:
            return float("inf")
        return self._start + self._limit - time.monotonic()

    @property
    def reserve_seconds(self) -> float:
        """What one more step and the save after it need: half as much again as the longest seen lately.

        Before the first save is seen, a save counts as 5% of the limit, at most 30 s.
        """
        save = self._save_seconds
        if save is None:
            save = min(30.0, 0.05 * (self._limit or 0.0))
        return _SAFETY * (max(self._steps, default=0.0) + save)

    def observe(self, step_seconds: float | None = None, *, save_seconds: float | None = None) -> None:
        """Tell how long a step (with all that happens between two questions) and a save took."""
        if step_seconds is not None:
            self._steps.append(step_seconds)
        if save_seconds is not None:
            self._save_seconds = max(save_seconds, self._save_seconds or 0.0)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._reason = self._reason or name
        if name not in _IMPATIENT:
            return
        now = time.monotonic()
        if self._hard_signal_at is None:
            self._hard_signal_at = now
        elif now - self._hard_signal_at >= _SAME_REQUEST_SECONDS:
            os._exit(Exit.STOPPED)


def _spell(seconds: float) -> str:
    """A duration as people say it: 7200 -> 2h, 5400 -> 1h30m, 0.5 -> 0.5s."""
    if seconds < 60 or seconds != int(seconds):
        return f"{seconds:g}s"
    hours, rest = divmod(int(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return "".join(f"{n}{unit}" for n, unit in ((hours, "h"), (minutes, "m"), (left, "s")) if n)
