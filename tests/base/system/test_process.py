"""Child processes, folder locks and sealed JSON."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatoken.base.system.environment import python_command
from megatoken.base.system.file_lock import LockedError, lock_folder
from megatoken.base.system.process import Child, run_child
from megatoken.base.system.sealed_json import parse_sealed, seal
from tests.processes import group_members, wait_for_group, wait_until


def test_a_child_returns_its_exit_code_and_lines():
    lines = []
    program = "print(1, flush=True); sys.stderr.write('2'); sys.exit(3)"
    assert run_child(python_command(program), on_line=lines.append) == 3
    assert lines == ["1\n", "2"]
    with pytest.raises(FileNotFoundError):
        run_child(["/no/such/program"])


def test_a_child_that_ignores_sigterm_is_killed_after_its_time(tmp_path: Path):
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    program += "print(1, flush=True); time.sleep(100)"
    log = tmp_path / "log"
    child = Child(python_command(program), stdout=log)
    wait_until(log.read_text, child)
    assert child.poll() is None
    child.stop(0.1)
    assert child.poll() == -signal.SIGKILL
    with pytest.raises(TimeoutError):
        run_child(python_command("import time; time.sleep(100)"), timeout=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
def test_a_child_dies_with_its_parent(tmp_path: Path):
    log = tmp_path / "pid"
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(9999)"
    parent = (
        "import time; from pathlib import Path; from megatoken.base.system.process import Child; "
    )
    parent += f"Child({python_command(child)!r}, stdout=Path({str(log)!r})); time.sleep(100)"
    with subprocess.Popen(python_command(parent), start_new_session=True) as process:
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), process)
        assert {*group_members(process.pid)} == {process.pid, int(log.read_text())}
        process.kill()
    assert wait_for_group(process.pid) == 0


def test_one_process_at_a_time_holds_a_folder(tmp_path: Path):
    folder = tmp_path / "new"
    with lock_folder(folder, "run"):
        with pytest.raises(LockedError, match=f"pid {os.getpid()} "), lock_folder(folder, "run"):
            pass
        assert (folder / ".owner.json").exists()
    assert not (folder / ".owner.json").exists()
    with lock_folder(folder, "run", on_wait=pytest.fail):
        pass


@pytest.mark.parametrize("bits", [64, 128])
def test_any_flipped_bit_breaks_a_seal(bits: int):
    sealed = seal(b'{"a": 1', bits=bits)
    assert parse_sealed(sealed)["a"] == 1
    for bit in range(8 * len(sealed)):
        damaged = bytearray(sealed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="hash"):
            parse_sealed(bytes(damaged))
