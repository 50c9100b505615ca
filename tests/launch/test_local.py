"""A signal before training starts ends the process as stopped."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatoken.errors import ExitCode
from megatoken.launch.local import stop_at_once

PROGRAM = """
import sys, time
from pathlib import Path
from megatoken.launch.local import stop_at_once
with stop_at_once(*map(Path, sys.argv[1:])):
    print("ready", flush=True)
    time.sleep(20)
"""


@pytest.mark.parametrize("with_marker", [False, True])
def test_an_early_signal_is_a_stop(with_marker: bool, tmp_path: Path) -> None:
    marker = tmp_path / "ending"
    command = [sys.executable, "-c", PROGRAM, *([str(marker)] if with_marker else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
    assert process.returncode == (ExitCode.DONE if with_marker else ExitCode.STOPPED)
    assert with_marker == marker.exists()
    if with_marker:
        assert marker.read_text() == "75"


def test_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_at_once():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
