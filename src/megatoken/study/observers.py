"""What a run does with its rows beyond its folder: draw its curves, and send them to sinks.

Each sink (W&B, alerts, ...) has a process that runs study/commands/sync.py, so one that fails or
hangs cannot stop or slow the run.
"""

import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from megatoken.base.config.schema import Config
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError
from megatoken.base.rooms import load_entry
from megatoken.base.system.metrics_log import Row
from megatoken.base.system.process import Child
from megatoken.distributed.local_launch import COMMAND
from megatoken.study.alerts import read_address
from megatoken.study.plots import draw_run
from megatoken.study.settings import ReportConfig
from megatoken.train.run import Observer, Run

LAST_ROWS_SECONDS = 20.0  # to wait for sinks at the end of a run
ALERT_SECONDS = 5.0  # to wait for the alert that a run has failed or was stopped


def open_plots(run: Run) -> Observer | None:
    """Return an observer that draws the run's curves when it is done; None if they are off."""
    settings = run.config.section(ReportConfig)

    def draw(row: Row) -> None:
        if row["kind"] == "end" and row["exit_code"] == 0:
            run.console.print(draw_run(run.out, pictures=settings.pictures))

    return draw if settings.plots and run.is_main else None


def open_sinks(run: Run) -> "SinkProcesses | None":
    """Return the observer of the run's sinks, if any. Raises ConfigError as `check_sinks` does."""
    check_sinks(run.config)
    names = run.config.section(ReportConfig).list_sinks()
    return SinkProcesses(names, run.out, run.console) if names and run.is_main else None


def check_sinks(config: Config) -> None:
    """Raise ConfigError if the package of a sink is not installed, or an alert has no address."""
    log = config.section(ReportConfig)
    for name in log.list_sinks():
        package = load_entry("sink", name).package
        if package and find_spec(package) is None:
            raise ConfigError(
                f"log.sinks: {package} is not installed", fix=f"pip install {package}"
            )
    if log.alert:
        read_address(log.alert)


@dataclass
class SinkProcesses:
    """Observer that has one background process per sink, from the start of the run.

    They outlive the run, even if it is killed, until they have sent its last rows.
    """

    names: list[str]
    run: Path
    console: Console
    processes: dict[str, Child] = field(default_factory=dict)

    def __call__(self, row: Row) -> None:
        if row["kind"] == "start":
            self.start()
        elif row["kind"] == "train":
            self.report_failures()
        elif row["kind"] == "end" and row["exit_code"] == 0:
            self.finish(self.names, LAST_ROWS_SECONDS)
        elif row["kind"] == "end":  # a stopped run has no time to wait for the others
            self.finish(["alert"], ALERT_SECONDS)

    def start(self) -> None:
        for name in self.names:
            command = [*COMMAND, "sync", str(self.run), "--to", name, "--follow"]
            try:
                log = self.run / f"sync-{name}.log"
                self.processes[name] = Child(
                    command, stdout=log, stderr=log, death_signal=None, detached=True
                )
            except OSError as error:
                self.console.warn(f"{name} gets no rows: {error.strerror}")

    def finish(self, names: list[str], seconds: float) -> None:
        """Wait up to `seconds` for sinks to get the last rows; report failures."""
        deadline = time.monotonic() + seconds
        for name in self.processes.keys() & names:
            if self.processes[name].wait(max(0.0, deadline - time.monotonic())) is None:
                self.console.print(f"{name} is still receiving rows, in the background")
        self.report_failures()

    def report_failures(self) -> None:
        """Warn once of each sink whose process has failed."""
        for name, process in [*self.processes.items()]:
            if process.poll():
                del self.processes[name]
                fix = f"megatoken sync {self.run} --to {name} sends the rest"
                self.console.warn(
                    f"{name} failed, see sync-{name}.log; the run has lost nothing: {fix}"
                )
