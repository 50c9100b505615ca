"""Terminal output. Everything goes to one stream, so that `--json` can keep stdout for its one line.

On a terminal the newest step is one line updated in place; in a file or pipe a step is printed every few seconds.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

STEP_SECONDS = 5.0  # between step lines that are not updated in place


def format_duration(seconds: float) -> str:
    """Seconds as 42s, 3m05s, 2h07m or 4d03h."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    return f"{s // 3600}h{s % 3600 // 60:02d}m" if s < 86400 else f"{s // 86400}d{s % 86400 // 3600:02d}h"


def format_quantity(value: float, unit: str = "") -> str:
    """A number with a metric prefix: 854.4 M, 1.20 k."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}".rstrip()


def format_count(number: int, noun: str) -> str:
    """A count with its noun: 1 document, 2,000 documents."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_step(row: Mapping[str, Any], total_steps: int, memory_bytes: int, remaining_seconds: float) -> str:
    """The live line of a train row of metrics.jsonl."""
    mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    return (
        f"step {row['step']:>{len(str(total_steps))}}/{total_steps} | loss {row['loss']:.4f} | "
        f"norm {row['grad_norm']:.3f} | lr {row['lr']:.2e} | {row['seconds'] * 1e3:.0f} ms/step | "
        f"{row['tokens_per_second']:,.0f} tok/s | MFU {mfu} | {memory_bytes / 2**30:.2f} GiB | "
        f"left {format_duration(remaining_seconds)}"
    )


class _Rich(RichConsole):
    """Falls silent when its stream fails in any way: a closed pipe or terminal, a full disk."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Discard all further output, also what the stream still holds; rich itself exits here."""
        self.quiet = True
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Console:
    """Prints plain text (never parsed as rich markup) to stdout, or to stderr when stdout is kept for JSON.

    A stream that cannot be written, or not in its encoding, raises nothing.
    """

    def __init__(self, *, to_stderr: bool = False, quiet: bool = False) -> None:
        """quiet: print nothing, for processes other than the main one."""
        self.rich = _Rich(stderr=to_stderr, highlight=False, soft_wrap=True, quiet=quiet)
        self._live = Live(console=self.rich, auto_refresh=False)
        self._last_step_time = -STEP_SECONDS

    def print(self, text: str = "", style: str = "") -> None:
        """Print a line above the live one."""
        encoding = self.rich.encoding
        self.rich.print(Text(text.encode(encoding, "backslashreplace").decode(encoding), style=style))

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.print(f"warning: {text}", "yellow")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print `name  value` lines in two aligned columns."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.print(f"{name:<{width}}  {value}")

    def step(self, line: str, *, last: bool = False) -> None:
        """Show the newest step. last: print it however soon after the one before."""
        if self.rich.is_terminal:
            self._live.start()  # nothing if it has started
            self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)
        elif last or time.monotonic() - self._last_step_time >= STEP_SECONDS:
            self._last_step_time = time.monotonic()
            self.print(line)

    def close(self) -> None:
        """Stop updating the live line; it stays on the screen."""
        self._live.stop()
