"""Starts the process that sends a run's rows to other programs (cli/sync.py). A sink can never stop a run."""

import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from megatoken.config.schema import split_sinks
from megatoken.console import Console
from megatoken.errors import ConfigError
from megatoken.launch.local import COMMAND

LAST_ROWS_SECONDS = 20.0  # that the end of a run waits for its sinks


def check_sinks(names: str) -> None:
    """Raise ConfigError for a sink whose package is not installed."""
    for name in split_sinks(names):
        if find_spec(name) is None:
            raise ConfigError(f"log.sinks: {name} is not installed", fix=f"pip install {name}")


class SinkProcesses:
    """A process for each sink. It outlives a run that is killed, sends the last rows and ends."""

    def __init__(self, names: str, run: Path, console: Console) -> None:
        self._console, self._run = console, run
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in split_sinks(names):
            command = [*COMMAND, "sync", str(run), "--to", name, "--follow"]
            try:
                with (run / f"sync-{name}.log").open("wb") as output:
                    # A session of its own: Ctrl-C and a closed terminal are for the run.
                    self._processes[name] = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
            except OSError as error:
                console.warn(f"{name} gets no rows: {error.strerror}")

    def finish(self) -> None:
        """Wait a while for the last rows, once the status says that the run has ended; say how to send the rest."""
        for name, process in self._processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_ROWS_SECONDS)
            if process.returncode:
                fix = f"megatoken sync {self._run} --to {name} sends the rest"
                self._console.warn(
                    f"{name} failed, see sync-{name}.log; the run has lost nothing: {fix}"
                )
            elif process.returncode is None:
                self._console.print(f"{name} is still receiving rows, in the background")
