"""The progress line of `megatoken prepare` and its summary."""

import shlex
import time
from pathlib import Path
from typing import Self

from megatoken.console import SEPARATOR, Console, format_count, format_duration, format_quantity
from megatoken.data.prepare import PrepareResult, Progress
from megatoken.data.sources import describe_skipped


class PrepareBar:
    """Context manager: on a terminal, how much of the bytes is read and how long the rest takes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._stage, self._start = "", 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.console.close()

    def update(self, progress: Progress) -> None:
        """Show the progress of `prepare`."""
        if not self.console.is_live:
            return
        if progress.stage != self._stage:
            self._stage, self._start = progress.stage, time.monotonic()
        seconds = max(time.monotonic() - self._start, 1e-6)
        share = min(progress.done_bytes / max(progress.total_bytes, 1), 1.0)
        parts = (
            f"{100 * share:3.0f}%",
            f"left {format_duration(seconds / share - seconds) if share else 'unknown'}",
            "learning the vocabulary" if progress.stage == "vocabulary" else "tokenizing",
            f"{progress.tokens:,} tokens",
            f"{progress.tokens / seconds:,.0f} tokens/s",
        )
        self.console.step(SEPARATOR.join(parts), share=share)

    def finish(self, out: Path | str, result: PrepareResult, train: str = "RECIPE") -> None:
        """Print the result and the next command. train: its words behind `megatoken train`."""
        documents, shards = (
            format_count(result.documents, "document"),
            format_count(result.shards, "shard"),
        )
        summary = f"{format_count(result.tokens, 'token')} of {documents} in {shards}"
        if result.unchanged:
            self.console.print(f"{summary}: already prepared, unchanged")
        else:
            rate = f"{format_quantity(result.tokens / max(result.seconds, 1e-9))} tokens/s"
            self.console.print(f"{summary}, {format_duration(result.seconds)} ({rate})")
        for name, number in result.counts.items():
            if number:
                self.console.print(f"  {name.replace('_', ' ')}: {number:,}")
        if result.skipped_files:
            self.console.print(f"  files skipped: {describe_skipped(result.skipped_files)}")
        self.console.print(
            f"dataset: {out}; next: megatoken train {train} {shlex.quote(f'data.path={out}')}"
        )
