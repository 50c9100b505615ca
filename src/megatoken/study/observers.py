"""What a run does with its rows beyond its folder: draw its curves, and send them to sinks.

Each metrics sink (W&B, TensorBoard, trackio) has a process that runs study/commands/sync.py, so a
failing sink cannot stop the run.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from megatoken.base.console import Console
from megatoken.base.errors import ConfigError
from megatoken.base.system.metrics_log import Row
from megatoken.base.system.process import Child
from megatoken.distributed.local_launch import COMMAND
from megatoken.study.plots import draw_run
from megatoken.study.settings import ReportConfig, split_sinks
from megatoken.train.run import Observer, Run

LAST_ROWS_SECONDS = 20.0  # to wait for sinks at the end of a run


def open_plots(run: Run) -> Observer | None:
    """Return an observer that draws the run's curves when it is done; None if they are off."""
    settings = run.config.section(ReportConfig)

    def draw(row: Row) -> None:
        if row["kind"] == "end" and row["exit_code"] == 0:
            run.console.print(draw_run(run.out, pictures=settings.pictures))

    return draw if settings.plots and run.is_main else None


def open_sinks(run: Run) -> "SinkProcesses | None":
    """Return the observer of `log.sinks`, if any. Raises ConfigError as `check_sinks` does."""
    names = run.config.section(ReportConfig).sinks
    check_sinks(names)
    return SinkProcesses(names, run.out, run.console) if names and run.is_main else None


def check_sinks(names: str) -> None:
    """Raise ConfigError if the package of a sink is not installed. names: separated by commas."""
    for name in split_sinks(names):
        if find_spec(name) is None:
            raise ConfigError(f"log.sinks: {name} is not installed", fix=f"pip install {name}")


@dataclass
class SinkProcesses:
    """Observer that has one background process per sink, from the start of the run.

    They outlive the run, even if it is killed, until they have sent its last rows.
    """

    names: str
    run: Path
    console: Console
    processes: dict[str, Child] = field(default_factory=dict)

    def __call__(self, row: Row) -> None:
        if row["kind"] == "start":
            self.start()
        elif row["kind"] == "end" and row["exit_code"] == 0:  # a stopped run has no time to wait
            self.finish()

    def start(self) -> None:
        for name in split_sinks(self.names):
            command = [*COMMAND, "sync", str(self.run), "--to", name, "--follow"]
            try:
                log = self.run / f"sync-{name}.log"
                self.processes[name] = Child(
                    command, stdout=log, stderr=log, death_signal=None, detached=True
                )
            except OSError as error:
                self.console.warn(f"{name} gets no rows: {error.strerror}")

    def finish(self) -> None:
        """Wait up to LAST_ROWS_SECONDS for each sink to get the last rows; report failures."""
        for name, process in self.processes.items():
            exit_code = process.wait(LAST_ROWS_SECONDS)
            if exit_code:
                fix = f"megatoken sync {self.run} --to {name} sends the rest"
                self.console.warn(
                    f"{name} failed, see sync-{name}.log; the run has lost nothing: {fix}"
                )
            elif exit_code is None:
                self.console.print(f"{name} is still receiving rows, in the background")
