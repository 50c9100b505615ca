"""Train without Linux's own calls, as on macOS."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import TINY, newest_step, write_shards

# Python runs a module of this name at the start of each process.
HIDE = """
import mmap, os, platform, sys, sysconfig

for module, names in ((os, "sched_getaffinity posix_fadvise"), (mmap, "MADV_HUGEPAGE")):
    for name in names.split():
        delattr(module, name)
sysconfig.get_config_vars()  # from a file that is named after the platform
sys.platform = "bsd"  # for "darwin", torch loads other files
platform.libc_ver = lambda *_: ("", "")

def hide(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "hidden", arguments[0])
    if event == "ctypes.dlsym" and arguments[1] in ("prctl", "mallopt", "sync_file_range"):
        raise AttributeError(arguments[1])

sys.addaudithook(hide)
"""


@pytest.mark.long
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_needs_no_call_of_linux(nproc: int, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    out = tmp_path / "run"
    data = write_shards(tmp_path / "data")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    for line in (
        f"train {TINY} {data} budget.steps=3 machine.attention=auto --out {out} --nproc {nproc}",
        f"train {out} --extend 2steps --nproc {nproc}",
        f"sample {out} --tokens 4",
        "doctor",
    ):
        command = [sys.executable, "-m", "megatoken", *shlex.split(line)]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert newest_step(out) == 5
