"""Terminal output. Everything goes to one stream, so that `--json` can keep stdout for its one line.

On a terminal the newest step is one line updated in place; in a file or pipe a step is printed every few seconds.
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

from megatoken.redact import redact

STEP_SECONDS = 5.0  # between step lines that are not updated in place
LIVE_SECONDS = 0.1  # between updates of the line that is
# Of the 256 colors, whose values no theme changes; each has a contrast of 4:1 or more to black and to white.
ACCENT, MUTED, WARNING = "color(31)", "color(243)", "color(130)"
SEPARATOR = " | "
SHOWN_FIRST = {  # of a train row: what matters more than the loss
    "reward": "reward",
    "groups_without_difference": "no difference",
    "accuracy": "in order",
    "stopped": "stopped",
}
PLAIN_WIDTH = 80  # of rules in a file or pipe


def format_duration(seconds: float) -> str:
    """Seconds as 42s, 3m05s, 2h07m or 4d03h."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    return (
        f"{s // 3600}h{s % 3600 // 60:02d}m"
        if s < 86400
        else f"{s // 86400}d{s % 86400 // 3600:02d}h"
    )


def format_quantity(value: float, unit: str = "") -> str:
    """A number with a metric prefix: 854.4 M, 1.20 k."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}".rstrip()


def format_memory(number: float) -> str:
    """Bytes as 1.25 GiB, or 49.2 MiB."""
    return f"{number / 2**30:.2f} GiB" if number >= 0.1 * 2**30 else f"{number / 2**20:.1f} MiB"


def format_count(number: int, noun: str, nouns: str = "") -> str:
    """A count with its noun: 1 document, 2,000 documents. nouns: the plural where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def format_step(
    row: Mapping[str, Any], total_steps: int, memory_bytes: int, remaining_seconds: float
) -> str:
    """The line of a train row of metrics.jsonl, the most important first: a narrow terminal shows its beginning.

    Without the loss where no group of answers had a difference in rewards: GRPO's is 0 then, which is no success.
    """
    step, mfu = row["step"], "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    parts = (
        f"{100 * step // total_steps:3d}%",
        f"left {format_duration(remaining_seconds)}",
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        *(f"{name} {row[key]:.3f}" for key, name in SHOWN_FIRST.items() if key in row),
        *([f"loss {row['loss']:.4f}"] if row.get("groups_without_difference") != 1 else []),
        f"{row['tokens_per_second']:,.0f} tok/s",
        f"lr {row['lr']:.2e}",
        f"norm {row['grad_norm']:.3f}",
        f"MFU {mfu}",
        format_memory(memory_bytes),
        f"{row['seconds'] * 1e3:.0f} ms/step",
    )
    return SEPARATOR.join(parts)


def spell_controls(text: str) -> str:
    """The text with control characters but line ends and tabs spelled out: a model may write any, terminals obey."""
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else ascii(sign)[1:-1] for sign in text
    )


class _Rich(RichConsole):
    """Falls silent when its stream fails in any way: a closed pipe or terminal, a full disk."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except (OSError, ValueError):  # ValueError: of a stream that is closed
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Discard all further output, also what the stream still holds; rich itself exits here."""
        self.quiet = True
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Console:
    """Prints plain text (never parsed as rich markup) to stdout, or to stderr when stdout is kept for JSON.

    A stream that cannot be written, or not in its encoding, raises nothing. Colors follow NO_COLOR and FORCE_COLOR.
    """

    def __init__(self, *, to_stderr: bool = False, quiet: bool = False) -> None:
        """quiet: print nothing, for processes other than the main one."""
        self.rich = _Rich(stderr=to_stderr, highlight=False, soft_wrap=True, quiet=quiet)
        self._live = Live(console=self.rich, auto_refresh=False)
        self._next_step_time = 0.0

    @property
    def is_live(self) -> bool:
        """Whether the stream is a terminal on which lines can be replaced, whatever FORCE_COLOR says of a pipe."""
        with suppress(ValueError):  # of a stream that is closed
            return self.rich.file.isatty() and not self.rich.is_dumb_terminal
        return False

    def print(self, text: str = "", style: str = "") -> None:
        """Print a line, without secrets, above the live one."""
        self._print(redact(text), style)

    def _print(self, text: str, style: str = "") -> None:
        encoding = self.rich.encoding
        self.rich.print(
            Text(text.encode(encoding, "backslashreplace").decode(encoding), style=style)
        )

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.print(f"warning: {text}", WARNING)

    def table(self, rows: Sequence[Sequence[str]], left: int = 2) -> None:
        """Print rows in aligned columns. left: number of left-aligned columns."""
        for line in self.align(rows, left):
            self.print(line)

    def align(self, rows: Sequence[Sequence[str]], left: int) -> list[str]:
        """Lines of a table. left: number of columns that are aligned to the left; the others are to the right."""
        rows = [[spell_controls(cell).replace("\n", " ") for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        return [
            "  ".join(
                cell + pad if index < left else pad + cell
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
                for pad in [" " * (width - cell_len(cell))]
            ).rstrip()
            for row in rows
        ]

    def rule(self, title: str = "") -> None:
        """Print a line across the terminal, or of PLAIN_WIDTH hyphens, that begins with a title."""
        sign, width = (
            ("─", self.rich.width)
            if self.is_live and not self.rich.options.ascii_only
            else ("-", PLAIN_WIDTH)
        )
        text = f"{sign * 2} {title} " if title else ""
        self.print(text + sign * (width - cell_len(text)), ACCENT)

    def fence(self, title: str, texts: Sequence[str]) -> None:
        """Print texts of a model, each below a rule with the title (and `2 of 3`), and a rule at the end."""
        for number, text in enumerate(texts, start=1):
            self.rule(f"{title} {number} of {len(texts)}" if len(texts) > 1 else title)
            self._print(spell_controls(text))
        self.rule()

    def step(self, line: str, *, share: float | None = None, last: bool = False) -> None:
        """Show the newest step. line: parts joined by SEPARATOR, of which a terminal shows as many as fit; share: of
        the run that is done, drawn as a bar in front. last: show it however soon after the one before."""
        if not last and time.monotonic() < self._next_step_time:
            return
        self._next_step_time = time.monotonic() + (LIVE_SECONDS if self.is_live else STEP_SECONDS)
        if self.is_live:
            self._live.start()  # nothing if it has started
            self._live.update(self._fit(line, share), refresh=True)
        else:
            self.print(line)

    def _fit(self, line: str, share: float | None) -> Text:
        """The line in one row of the terminal."""
        width = self.rich.width
        bar = 0 if share is None or width < 60 else 10 if width < 100 else 20
        room = width - (bar + 1 if bar else 0)
        while cell_len(line) > room and SEPARATOR in line:
            line = line.rpartition(SEPARATOR)[0]
        text = Text(overflow="ellipsis", no_wrap=True, end="")
        if share is not None and bar:
            done = int(share * bar)
            full, rest = ("#", "-") if self.rich.options.ascii_only else ("━", "─")
            text.append(full * done, ACCENT).append(rest * (bar - done) + " ", MUTED)
        return text.append(line)

    def close(self) -> None:
        """Stop updating the live line; it stays on the screen."""
        self._live.stop()
