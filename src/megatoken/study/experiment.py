"""Experiments: many runs of `megatoken train`, which a repeated command continues.

`sweep` and `race` choose the next run. When the command is stopped, the runs save and stop as well.
"""

import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console
from megatoken.base.errors import ExitCode, error_from_code
from megatoken.base.system.atomic_write import read_object, storage_errors
from megatoken.base.system.environment import VISIBLE_GPUS
from megatoken.base.system.file_lock import LockedError, lock_folder
from megatoken.base.system.machine import cpu_count
from megatoken.base.system.metrics_log import STATUS, Row
from megatoken.base.system.process import Child
from megatoken.distributed.local_launch import COMMAND
from megatoken.distributed.signals import handle_signals

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Slots:
    """Where runs train side by side, spread over GPUs.

    wanted: number of slots; 0 for one per GPU. gpus: as in CUDA_VISIBLE_DEVICES; empty if the runs
    choose their device themselves.
    """

    wanted: int
    gpus: Sequence[str] = ()

    @property
    def jobs(self) -> int:
        """The number of slots."""
        return self.wanted or len(self.gpus) or 1

    def environment(self, job: int) -> dict[str, str]:
        """Return the variables of the runs in a slot."""
        return {VISIBLE_GPUS: self.gpus[job % len(self.gpus)]} if self.gpus else {}

    def share_cores(self, machine: MachineConfig) -> list[str]:
        """Return the setting that divides the cores among the slots, unless the recipe sets it."""
        share = max(1, cpu_count() // self.jobs)
        return [] if machine.threads or self.jobs == 1 else [f"machine.threads={share}"]


@dataclass
class Run:
    """A run of an experiment.

    arguments: its recipe and overrides. name: as it is printed. turn_seconds: seconds after which
    training stops until the run's next turn; 0 for no limit, None to leave the setting.
    """

    folder: Path
    arguments: list[str]
    console: Console
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

    def train(self, stopping: threading.Event, environment: dict[str, str]) -> None:
        """Train until the run's end, the end of its turn, or until `stopping` is set.

        environment: variables of the run's process.
        """
        self.wait_for_folder(stopping)
        limit = self.turn_seconds
        limits = [] if limit is None else [f"save.time_limit={limit or ''}"]
        command = [*COMMAND, "train", "--out", str(self.folder), *self.arguments, *limits]
        with storage_errors(self.folder):
            # Detached, so that Ctrl-C here becomes SIGTERM there.
            child = Child(command, stdout=self.log, stderr=self.log, env=environment, detached=True)
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

    def wait_for_folder(self, stopping: threading.Event) -> None:
        """Wait while the run of a killed command still saves. Raises LockedError on a stop."""

        def report() -> None:
            if stopping.is_set():
                raise LockedError("another run is using this folder", self.folder)
            self.console.print(f"waiting for another run in {self.folder}")

        with lock_folder(self.folder, "run", on_wait=report):
            pass


def train_all(ask: Callable[[], Run | None], slots: Slots, console: Console) -> bool:
    """Train the runs that `ask` returns, one per slot at once.

    A slot whose run has ended asks for the next one, until it gets None. An error stops all runs.
    Returns whether SIGTERM or SIGINT has stopped the command.
    """
    stopping = threading.Event()
    asking = threading.Lock()

    def work(job: int) -> None:
        try:
            while not stopping.is_set():
                with asking:
                    run = ask()
                if run is None:
                    return
                run.train(stopping, slots.environment(job))
        except BaseException:
            stopping.set()
            raise

    with (
        ThreadPoolExecutor(slots.jobs) as pool,
        handle_signals(("SIGTERM", "SIGINT"), lambda *_: stopping.set()),
    ):
        list(pool.map(work, range(slots.jobs)))  # raises what a thread raised
    if stopping.is_set():
        console.print("stopped, all saved; the same command resumes")
    return stopping.is_set()
