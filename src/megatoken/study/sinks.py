"""Start a process for each metrics sink (W&B, TensorBoard, trackio) that sends it the run's rows.

The process runs cli/sync.py, so a failing sink cannot stop the run.
"""

from importlib.util import find_spec
from pathlib import Path

from megatoken.base.config.schema import split_sinks
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError
from megatoken.base.system.process import Child
from megatoken.distributed.local_launch import COMMAND

LAST_ROWS_SECONDS = 20.0  # to wait for sinks at the end of a run


def check_sinks(names: str) -> None:
    """Raise ConfigError if the package of a sink is not installed. names: separated by commas."""
    for name in split_sinks(names):
        if find_spec(name) is None:
            raise ConfigError(f"log.sinks: {name} is not installed", fix=f"pip install {name}")


class SinkProcesses:
    """One background process per sink.

    They outlive the run, even if it is killed, until they have sent its last rows.
    """

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
        """Wait up to LAST_ROWS_SECONDS for each sink to get the last rows; report failures."""
        for name, process in self._processes.items():
            exit_code = process.wait(LAST_ROWS_SECONDS)
            if exit_code:
                fix = f"megatoken sync {self._run} --to {name} sends the rest"
                self._console.warn(
                    f"{name} failed, see sync-{name}.log; the run has lost nothing: {fix}"
                )
            elif exit_code is None:
                self._console.print(f"{name} is still receiving rows, in the background")
