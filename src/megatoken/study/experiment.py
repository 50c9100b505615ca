"""Experiments: many runs of `megatoken train`, which a repeated command continues.

`sweep` and `race` say which run is next. When the command is stopped, the runs save and stop too.
"""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatoken.base.errors import ExitCode, error_from_code
from megatoken.base.system.atomic_write import read_object, storage_errors
from megatoken.base.system.metrics_log import STATUS, Row
from megatoken.base.system.process import Child
from megatoken.distributed.local_launch import COMMAND
from megatoken.distributed.signals import handle_signals

POLL_SECONDS = 0.5


@dataclass
class Run:
    """A run of an experiment.

    arguments: its recipe and overrides. name: as it is printed. turn_seconds: seconds after which
    training stops until the run's next turn; 0 for no limit, None to leave the setting.
    """

    folder: Path
    arguments: list[str]
    name: str = ""
    turn_seconds: int | None = None

    @property
    def status(self) -> Row:
        """The content of status.json; empty before the first start."""
        return read_object(self.folder / STATUS)

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its end, or has failed because its loss was not finite."""
        status = self.status
        return status.get("state") == "done" or status.get("exit_code") == ExitCode.NUMERICS

    @property
    def log(self) -> Path:
        """The file to which the run's output is appended."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def read_error(self) -> str:
        """Return the last error in the output; without an error, say where the output is."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        return errors[-1].removeprefix("error: ") if errors else f"see {self.log}"

    def is_hopeless(self) -> bool:
        """Return whether to stop the run early; called every POLL_SECONDS and at its end."""
        return False

    def end(self, code: int, *, is_stopping: bool) -> None:
        """Handle the exit code. Raises the error of a run that failed by itself.

        is_stopping: whether the run was told to stop with the command.
        """
        expected = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.NUMERICS)
        if code not in expected and not is_stopping:
            raise error_from_code(code, f"{self.name}: {self.read_error()}")

    def train(self, stopping: threading.Event) -> None:
        """Train until the run's end, the end of its turn, or until `stopping` is set."""
        limit = self.turn_seconds
        limits = [] if limit is None else [f"save.time_limit={limit or ''}"]
        command = [*COMMAND, "train", "--out", str(self.folder), *self.arguments, *limits]
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            # Detached, so that Ctrl-C here becomes SIGTERM there.
            child = Child(command, stdout=self.log, stderr=self.log, detached=True)
        is_told = False
        while True:
            code = child.wait(POLL_SECONDS)
            must_stop = self.is_hopeless() or stopping.is_set()
            if code is not None:
                self.end(code, is_stopping=stopping.is_set())
                return
            if must_stop and not is_told:
                is_told = True  # a second SIGTERM would end it before it has saved
                child.send(signal.SIGTERM)


def train_all(runs: Iterator[Run], jobs: int = 1) -> bool:
    """Train the runs that an iterator yields, `jobs` at once.

    The next run is requested when one has ended. Returns whether SIGTERM or SIGINT has stopped the
    command.
    """
    stopping = threading.Event()
    asking = threading.Lock()

    def work(_: int) -> None:
        while not stopping.is_set():
            with asking:
                run = next(runs, None)
            if run is None:
                return
            run.train(stopping)

    with (
        ThreadPoolExecutor(jobs) as pool,
        handle_signals(("SIGTERM", "SIGINT"), lambda *_: stopping.set()),
    ):
        list(pool.map(work, range(jobs)))  # raises what a thread raised
    return stopping.is_set()
