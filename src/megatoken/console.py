"""What a person sees: a rendering of what the journal records, and nothing that is not recorded there.

On a terminal the newest step is one line that renews itself; elsewhere (a file, a pipe) a line is printed at most
every few seconds. Everything goes to one stream, so that `--json` can keep stdout for its one line.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console as Rich
from rich.live import Live
from rich.text import Text

QUIET_SECONDS = 5.0  # between step lines where they cannot be renewed in place


def format_duration(seconds: float) -> str:
    """Seconds as a person says them: 42s, 3m05s, 2h07m, 4d03h."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"


def format_quantity(value: float, unit: str = "") -> str:
    """A number with a metric prefix: 854.4 M, 1.20 k."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}".rstrip()


def format_count(number: int, noun: str) -> str:
    """A number of things: 1 document, 2,000 documents."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_step(row: Mapping[str, Any], *, total_steps: int, memory_bytes: int, remaining_seconds: float) -> str:
    """One train row of the journal as the live line."""
    mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    return (
        f"step {row['step']:>{len(str(total_steps))}}/{total_steps} | loss {row['loss']:.4f} | "
        f"norm {row['grad_norm']:.3f} | lr {row['lr']:.2e} | {row['seconds'] * 1e3:.0f} ms/step | "
        f"{row['tokens_per_second']:,.0f} tok/s | MFU {mfu} | {memory_bytes / 2**30:.2f} GiB | "
        f"left {format_duration(remaining_seconds)}"
    )


class Console:
    """Prints to stdout, or to stderr when stdout is kept for JSON."""

    def __init__(self, *, to_stderr: bool = False, quiet: bool = False) -> None:
        """quiet: for a process that is not the one to speak."""
        self.rich = Rich(stderr=to_stderr, highlight=False, soft_wrap=True, quiet=quiet)
        self.rich.on_broken_pipe = self._fall_silent  # type: ignore[method-assign]
        self._live: Live | None = None
        self._last = -QUIET_SECONDS

    def say(self, text: str = "", style: str = "") -> None:
        """Print a line above the live one. A reader that has gone away silences the console, nothing else."""
        try:
            self.rich.print(Text(text, style=style))
            self.rich.file.flush()
        except BrokenPipeError:
            self._fall_silent()

    def _fall_silent(self) -> None:
        """Send what is still to be said nowhere: rich's own answer to a closed pipe is to exit."""
        self.rich.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.rich.file.fileno())

    def warn(self, text: str) -> None:
        """Print something that asks for attention."""
        self.say(f"warning: {text}", "yellow")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print `name  value` lines in two aligned columns."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"{name:<{width}}  {value}")

    def step(self, line: str, *, last: bool = False) -> None:
        """Show the newest step."""
        if self.rich.is_terminal:
            if self._live is None:
                self._live = Live(console=self.rich, auto_refresh=False)
                self._live.start()
            self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)
        elif last or time.monotonic() - self._last >= QUIET_SECONDS:
            self._last = time.monotonic()
            self.say(line)

    def close(self) -> None:
        """Leave the last live line standing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
