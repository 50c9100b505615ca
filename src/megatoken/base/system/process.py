"""Run child processes. All child processes of this package are started here."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO

from megatoken.base.system.environment import given_environment

PR_SET_PDEATHSIG = 1  # Linux's prctl
STOP_SECONDS = 10.0  # from SIGTERM to SIGKILL
DRAIN_SECONDS = 1.0  # for output that a grandchild may hold open
NULL = Path(os.devnull)
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

# None: the parent's. A path: the file, appended to. A function: called on a thread with each line.
Output = Path | Callable[[str], object] | None


class Child:
    """A child process, with the environment that this process started with and an empty stdin."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: Output = None,
        stderr: Output = None,
        env: Mapping[str, str] | None = None,
        death_signal: signal.Signals | None = signal.SIGTERM,
        detached: bool = False,
    ) -> None:
        """Start the process. Raises OSError.

        stdout, stderr: where the child writes; see Output.
        env: variables to add to the environment.
        death_signal: signal that Linux sends to the child when this process dies; None for none.
        detached: whether to start a new session, which gets no signals from the terminal.
        """
        with ExitStack() as files:

            def target(output: Output) -> IO[bytes] | int | None:
                if isinstance(output, Path):
                    return files.enter_context(output.open("ab"))
                return None if output is None else subprocess.PIPE

            merged = stderr is not None and stderr == stdout
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=target(stdout),
                stderr=subprocess.STDOUT if merged else target(stderr),
                env={**given_environment(), **(env or {})},
                preexec_fn=at_parent_death(death_signal) if death_signal else None,
                start_new_session=detached,
                text=True,
                errors="replace",
            )
        self._readers: list[Thread] = []
        for stream, output in ((self._process.stdout, stdout), (self._process.stderr, stderr)):
            if stream is not None and callable(output):
                reader = Thread(target=_read_lines, args=(stream, output), daemon=True)
                reader.start()
                self._readers.append(reader)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs.

        The code is -number if a signal killed the process.
        """
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the process and its output to end, and return the exit code.

        Returns None if the process still runs after `seconds`.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            for reader in self._readers:
                reader.join(DRAIN_SECONDS)
        return self._process.returncode

    def send(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        self._process.send_signal(number)

    def stop(self, seconds: float) -> None:
        """Send SIGTERM, and SIGKILL if the process still runs after `seconds`."""
        self.send(signal.SIGTERM)
        if self.wait(seconds) is None:
            self._process.kill()
            self.wait()


def run_child(
    command: Sequence[str],
    *,
    on_line: Callable[[str], object] | None = None,
    timeout: float | None = None,
) -> int:
    """Run a child process to its end and return its exit code, which is -number for a signal.

    If Ctrl-C or another exception interrupts the wait, the child gets SIGTERM, and SIGKILL after
    STOP_SECONDS. On Linux, it also ends if this process dies. Raises OSError if the child cannot
    be started, and TimeoutError if it runs for more than `timeout` seconds.

    on_line: called on another thread with each line of stdout and stderr.
    """
    child = Child(command, stdout=on_line, stderr=on_line)
    try:
        exit_code = child.wait(timeout)
    finally:
        child.stop(STOP_SECONDS)
    if exit_code is None:
        raise TimeoutError(f"{command[0]} did not end within {timeout:.0f} s")
    return exit_code


def at_parent_death(number: signal.Signals) -> Callable[[], object] | None:
    """Return a function by which a child asks Linux for a signal when its parent dies.

    Returns None on other systems.
    """
    return partial(_PRCTL, PR_SET_PDEATHSIG, number) if _PRCTL else None


def _read_lines(stream: IO[str], on_line: Callable[[str], object]) -> None:
    with stream:
        for line in stream:
            on_line(line)
