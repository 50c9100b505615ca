"""Start one process per sink, which sends it the run's metrics (cli/sync.py).

A sink can never stop a run.
"""

from importlib.util import find_spec
from pathlib import Path

from megatoken.config.schema import split_sinks
from megatoken.console import Console
from megatoken.errors import ConfigError
from megatoken.launch.local import COMMAND
from megatoken.system.process import Child

LAST_ROWS_SECONDS = 20.0  # to wait for sinks at the end of a run


def check_sinks(names: str) -> None:
    """Raise ConfigError for a sink whose package is not installed."""
    for name in split_sinks(names):
        if find_spec(name) is None:
            raise ConfigError(f"log.sinks: {name} is not installed", fix=f"pip install {name}")


class SinkProcesses:
    """One process per sink. After the run, even a killed one, it sends the last rows and ends."""

    def __init__(self, names: str, run: Path, console: Console) -> None:
        self._console = console
        self._run = run
        self._processes: dict[str, Child] = {}
        for name in split_sinks(names):
            command = [*COMMAND, "sync", str(run), "--to", name, "--follow"]
            try:
                log = run / f"sync-{name}.log"
                self._processes[name] = Child(
                    command, stdout=log, stderr=log, death_signal=None, detached=True
                )
            except OSError as error:
                console.warn(f"{name} gets no rows: {error.strerror}")

    def finish(self) -> None:
        """Wait until the last rows are sent, or print how to send them later."""
        for name, process in self._processes.items():
            exit_code = process.wait(LAST_ROWS_SECONDS)
            if exit_code:
                fix = f"megatoken sync {self._run} --to {name} sends the rest"
                self._console.warn(
                    f"{name} failed, see sync-{name}.log; the run has lost nothing: {fix}"
                )
            elif exit_code is None:
                self._console.print(f"{name} is still receiving rows, in the background")
