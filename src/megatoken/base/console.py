"""Print to the terminal. All output goes to one stream, so that --json can reserve stdout for JSON.

On a terminal, the newest step is shown in a line that is updated in place. In a file, a line is
printed every few seconds.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from megatoken.base.redact import redact

STEP_SECONDS = 5.0  # between step lines in a file
LIVE_SECONDS = 0.1  # between updates of the live line
# 256-color codes, which themes do not change; contrast is at least 4:1 on black and on white.
ACCENT = "color(31)"
MUTED = "color(243)"
WARNING = "color(130)"
SEPARATOR = " | "
FILE_WIDTH = 80  # of rules in a file


def format_duration(seconds: float) -> str:
    """Format seconds, for example as 42s, 3m05s, 2h07m or 4d03h."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if h:
        return f"{h}h{m:02d}m"
    return f"{m}m{s:02d}s" if m else f"{s}s"


def format_quantity(value: float, unit: str = "") -> str:
    """Format a number with a metric prefix, for example as 854.4 M or 1.20 k."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}".rstrip()


def format_memory(number: float) -> str:
    """Format a number of bytes, for example as 1.342 GB or 49.2 MB."""
    return format_quantity(number, "B")


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun, for example as 1 document or 2,000 documents.

    plural: plural of the noun; "" for the noun + s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def format_step(
    row: Mapping[str, Any],
    shown: Sequence[str],
    total_steps: int,
    memory_bytes: int,
    remaining_seconds: float,
) -> str:
    """Format a train row of metrics.jsonl as a line. shown: texts of the most important values."""
    step = row["step"]
    total = f"{total_steps:,}"
    mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    parts = [
        f"{100 * step // total_steps:3d}%",
        f"left {format_duration(remaining_seconds)}",
        f"step {step:>{len(total)},}/{total}",
        *shown,
        f"{row['tokens_per_second']:,.0f} tokens/s",
        f"lr {row['lr']:.2e}",
        f"norm {row['grad_norm']:.3f}",
        f"MFU {mfu}",
        format_memory(memory_bytes),
        f"{row['seconds'] * 1e3:.0f} ms/step",
    ]
    return SEPARATOR.join(parts)


def spell_controls(text: str) -> str:
    """Escape control characters other than newlines and tabs, because terminals act on them."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text
    )


class _Rich(RichConsole):
    """A rich console that stops printing once its stream fails (a closed pipe or a full disk)."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Discard all further and buffered output, whereas rich would exit the process."""
        self.quiet = True
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Console:
    """Prints plain text, without rich markup, to stdout or stderr. NO_COLOR turns off colors.

    Printing raises no errors: if the stream fails, output is dropped, and characters that its
    encoding lacks are escaped.
    """

    def __init__(self, *, to_stderr: bool = False, quiet: bool = False) -> None:
        """Open a console. quiet: print nothing, as on ranks other than 0."""
        self.rich = _Rich(stderr=to_stderr, highlight=False, soft_wrap=True, quiet=quiet)
        self._live = Live(console=self.rich, auto_refresh=False)
        self._next_step_time = 0.0

    @property
    def is_live(self) -> bool:
        """Whether the stream is a terminal on which a line can be updated; ignores FORCE_COLOR."""
        with suppress(ValueError):  # the stream is closed
            return self.rich.file.isatty() and not self.rich.is_dumb_terminal
        return False

    def print(self, text: str = "", style: str = "") -> None:
        """Print text without secrets, above the line that shows the newest step."""
        self._print(redact(text), style)

    def _print(self, text: str, style: str = "") -> None:
        encoding = self.rich.encoding
        encoded = text.encode(encoding, "backslashreplace").decode(encoding)
        self.rich.print(Text(encoded, style=style))

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.print(f"warning: {text}", WARNING)

    def table(self, rows: Sequence[Sequence[str]], left: int = 2) -> None:
        """Print rows in aligned columns.

        left: how many columns, counted from the first, to align on the left; others on the right.
        """
        cells = [[spell_controls(cell).replace("\n", " ") for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            padded = []
            for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
                padding = " " * (width - cell_len(cell))
                padded.append(cell + padding if index < left else padding + cell)
            self.print("  ".join(padded).rstrip())

    def rule(self, title: str = "") -> None:
        """Print a horizontal line that begins with a title."""
        is_plain = not self.is_live or self.rich.options.ascii_only
        line = "-" if is_plain else "─"
        text = f"{line * 2} {title} " if title else ""
        width = self.rich.width if self.is_live else FILE_WIDTH
        self.print(text + line * (width - cell_len(text)), ACCENT)

    def fence(self, title: str, texts: Sequence[str]) -> None:
        """Print generated texts between horizontal lines with a title, numbered if several."""
        for number, text in enumerate(texts, start=1):
            self.rule(f"{title} {number} of {len(texts)}" if len(texts) > 1 else title)
            self._print(spell_controls(text))
        self.rule()

    @property
    def is_step_due(self) -> bool:
        """Whether `step` would show a step now, because it has not shown one very recently."""
        return time.monotonic() >= self._next_step_time

    def step(self, line: str, *, share: float | None = None, last: bool = False) -> None:
        """Show the newest step, unless another one was shown very recently.

        line: values joined by SEPARATOR; a terminal shows as many as fit.
        share: progress of the run from 0 to 1, drawn as a bar.
        last: whether this is the last step, which is always shown.
        """
        if not last and not self.is_step_due:
            return
        self._next_step_time = time.monotonic() + (LIVE_SECONDS if self.is_live else STEP_SECONDS)
        if self.is_live:
            self._live.start()  # no effect after the first time
            self._live.update(self._fit(line, share), refresh=True)
        else:
            self.print(line)

    def _fit(self, line: str, share: float | None) -> Text:
        """Return the progress bar, and as many values of the line as fit on the terminal."""
        text = Text(overflow="ellipsis", no_wrap=True, end="")
        if share is not None and self.rich.width >= 60:
            n_full = int(10 * share)
            full, rest = ("#", "-") if self.rich.options.ascii_only else ("━", "─")
            text.append(full * n_full, ACCENT).append(rest * (10 - n_full) + " ", MUTED)
        while cell_len(line) > self.rich.width - text.cell_len and SEPARATOR in line:
            line = line.rpartition(SEPARATOR)[0]
        return text.append(line)

    def close(self) -> None:
        """Stop updating the line of the newest step, and leave it on the screen."""
        self._live.stop()
