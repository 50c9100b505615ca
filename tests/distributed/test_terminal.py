"""Runs whose terminal, pipe or output disk disappears: cases of tests/soak/terminal_soak.py."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from megatoken.distributed.local_launch import COMMAND
from tests.soak.tiny_job import write_recipe

if sys.platform != "linux":
    pytest.skip("needs pseudo-terminals", allow_module_level=True)
from tests.soak.terminal_soak import CASES, SAVED, find_end


@pytest.mark.long
@pytest.mark.fault(12, 21)
def test_a_run_goes_on_without_a_reader_and_saves_when_its_terminal_is_closed(tmp_path: Path):
    (case,) = (each for each in CASES if each.name == "| head -1, terminal closed")
    endless = replace(case, arguments=("budget.steps=100000", "sample.every=0", "save.every=0"))
    assert find_end(endless, write_recipe(tmp_path / "job"), tmp_path / "run") == SAVED


def test_an_error_that_cannot_be_printed_keeps_its_code():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "verify", "/nope", "--debug"], stdout=full, stderr=full)
    assert done.returncode == ExitCode.DATA
