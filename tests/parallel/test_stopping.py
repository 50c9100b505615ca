"""A signal before a run has begun is a stop like any other."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatoken.errors import Exit
from megatoken.parallel.stopping import stopping_at_once

BEGINNING = """
import sys, time
from pathlib import Path
from megatoken.parallel.stopping import stopping_at_once
with stopping_at_once(*map(Path, sys.argv[1:])):
    print("ready", flush=True)
    time.sleep(20)
"""


@pytest.mark.parametrize("noted", [False, True])
def test_a_warning_that_comes_early_is_a_stop(noted: bool, tmp_path: Path) -> None:
    note = tmp_path / "ending"
    command = [sys.executable, "-c", BEGINNING, *([str(note)] if noted else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
    assert process.returncode == (Exit.DONE if noted else Exit.STOPPED)
    assert noted == note.exists()
    if noted:
        assert note.read_text() == "75"


def test_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopping_at_once():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
