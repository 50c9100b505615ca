"""The progress bar of `megatoken prepare` and its summary."""

from pathlib import Path
from typing import Self

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from megatoken.console import Console, format_count, format_duration, format_quantity
from megatoken.data.prepare import PrepareResult, Progress


class PrepareBar:
    """Context manager: a progress bar over the bytes read."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = RichProgress(
            *(TextColumn("{task.description}"), BarColumn()),
            *(TextColumn("{task.percentage:>3.0f}%  {task.fields[speed]}"), TimeElapsedColumn()),
            *(TextColumn("left"), TimeRemainingColumn()),
            console=console.rich,
            transient=True,
            disable=not console.is_live,
        )
        self.task = self.bar.add_task("reading", total=None, speed="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, progress: Progress) -> None:
        """Show the progress of `prepare`."""
        seconds = max(self.bar.tasks[0].elapsed or 0.0, 1e-6)
        speed = f"{progress.tokens:,} tokens, {progress.tokens / seconds:,.0f} tokens/s"
        stage = "learning the vocabulary" if progress.stage == "vocabulary" else "tokenizing"
        done_bytes, total_bytes = progress.done_bytes, progress.total_bytes
        self.bar.update(self.task, description=stage, completed=done_bytes, total=total_bytes, speed=speed)

    def finish(self, out: Path | str, result: PrepareResult) -> None:
        """Print the result and the next command."""
        documents, shards = format_count(result.documents, "document"), format_count(result.shards, "shard")
        summary = f"{format_count(result.tokens, 'token')} of {documents} in {shards}"
        if result.unchanged:
            self.console.print(f"{summary}: already prepared, unchanged")
        else:
            rate = f"{format_quantity(result.tokens / max(result.seconds, 1e-9))} tokens/s"
            self.console.print(f"{summary}, {format_duration(result.seconds)} ({rate})")
        for name, number in result.counts.items():
            if number:
                self.console.print(f"  {name.replace('_', ' ')}: {number:,}")
        self.console.print(f"dataset: {out}; next: megatoken train RECIPE data.path={out}")
