"""The progress bar of `megatoken prepare`: tokens, tokens/s and the time left."""

from pathlib import Path
from typing import Self

from rich.console import Console as Rich
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatoken.console import format_count, format_duration, format_quantity
from megatoken.data.corpus_writer import Progress as Amount
from megatoken.data.prepare import Prepared


class PrepareBar:
    """A bar over the bytes read; context manager."""

    def __init__(self, *, to_stderr: bool) -> None:
        self.rich = Rich(stderr=to_stderr, highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[said]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.rich,
            transient=True,
            disable=not self.rich.is_terminal,
        )
        self.task = self.bar.add_task("reading", total=None, said="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, amount: Amount) -> None:
        """Show how far preparing has come."""
        seconds = max(self.bar.tasks[0].elapsed or 0.0, 1e-6)
        said = f"{amount.tokens:,} tokens, {amount.tokens / seconds:,.0f} tokens/s"
        what = "learning the vocabulary" if amount.stage == "vocabulary" else "tokenizing"
        self.bar.update(self.task, description=what, completed=amount.done_bytes, total=amount.total_bytes, said=said)

    def finish(self, out: Path, done: Prepared, part: tuple[int, int] | None = None) -> None:
        """Say what was made, and what to type next."""
        of = format_count(done.documents, "document")
        made = f"{format_count(done.tokens, 'token')} of {of} in {format_count(done.shards, 'shard')}"
        if done.unchanged:
            self.rich.print(f"{made}: already prepared, unchanged")
        else:
            rate = f"{format_quantity(done.tokens / max(done.seconds, 1e-9))} tokens/s"
            self.rich.print(f"{made}, {format_duration(done.seconds)} ({rate})")
        for what, number in done.counts.items():
            if number:
                self.rich.print(f"  {what.replace('_', ' ')}: {number:,}")
        if part:
            self.rich.print(f"part {part[0]} of {part[1]}; when all are done: the same command without --part")
            return
        self.rich.print(f"dataset: {out}; next: megatoken train RECIPE data.path={out}")
