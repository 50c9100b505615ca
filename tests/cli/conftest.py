"""Train the runs of `sweep` and `race` in forks of a process that has loaded torch."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatoken.cli import child_runs
from megatoken.cli.main import main
from megatoken.launch.local import COMMAND
from tests.ranks import start_process


class ForkedChild:
    """A `megatoken.system.process.Child` that starts in milliseconds."""

    def __init__(
        self, command: Sequence[str], *, stdout: Path, stderr: Path, detached: bool
    ) -> None:
        self._process = start_process(run_command, command[len(COMMAND) :], stdout)

    def wait(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def send(self, number: int) -> None:
        assert self._process.pid
        os.kill(self._process.pid, number)


def run_command(words: Sequence[str], log: Path) -> None:
    """Run `megatoken WORDS` and append its output to a file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(words))


def run_forked(words: Sequence[str], log: Path) -> None:
    """Run `megatoken WORDS`, whose runs are forks."""
    child_runs.Child = ForkedChild
    run_command(words, log)


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_runs, "Child", ForkedChild)
