"""Runs whose terminal, pipe or disk for output goes away: each must end whole ("ran on") or stop saved ("saved").

    python -m tests.soak.terminal_soak [--only WORD]

A terminal that is closed sends SIGHUP: the run saves, exits 75, and the same command goes on. Whatever cannot be
written otherwise is lost, and the run goes on. Either way the end is that of an undisturbed run, bit for bit. Prints a
line for each case and a JSON line at the end. Linux; needs no rights.
"""

import fcntl
import os
import pty
import shlex
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatoken.base.errors import ExitCode
from megatoken.base.system.atomic_write import read_object
from tests.soak.options import parse_options, report
from tests.soak.tiny_job import (
    STUCK_SECONDS,
    Layout,
    command,
    drafts,
    run_quietly,
    start_session,
    wait_for,
    write_recipe,
)
from tests.tiny_run import fingerprint, newest_step, read_column

SAVED, RAN_ON = "saved", "ran on"


@dataclass(frozen=True, slots=True)
class Case:
    """How a run is started in a terminal, and what happens to it.

    shell: what dash runs (bash would take a terminal that must not control the run); RUN is the
    command, OUT its folder. hang_up: when the terminal is closed: in this phase of the run,
    "draft": while a checkpoint is written, "": never. controls: the terminal sends SIGHUP when it
    is closed.
    """

    name: str
    end: str
    shell: str = "exec RUN"
    hang_up: str = ""
    controls: bool = True
    nproc: int = 1
    arguments: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        return Layout(self.nproc, "none")


CASES_OF_ENDS = r"""
saved:
  terminal closed in a step: {hang_up: step}
  terminal closed in an evaluation: {hang_up: validate}
  terminal closed while a checkpoint is written: {hang_up: draft}
  terminal closed, two processes: {hang_up: step, nproc: 2}
  "| head -1, terminal closed":
    shell: mkfifo OUT.pipe; head -1 OUT.pipe & exec RUN > OUT.pipe
    hang_up: step
ran on:
  nohup, terminal closed: {shell: trap '' HUP; exec RUN, hang_up: step}
  dead terminal without a signal: {hang_up: step, controls: false}
  dead terminal before the first line: {hang_up: start, controls: false}
  output to /dev/full: {shell: exec RUN < /dev/null > /dev/full 2>&1}
  output to /dev/full, two processes: {shell: exec RUN < /dev/null > /dev/full 2>&1, nproc: 2}
  2>&1 | head -1, two processes:
    shell: mkfifo OUT.pipe; head -1 OUT.pipe & exec RUN > OUT.pipe 2>&1
    nproc: 2
  stdin, stdout and stderr closed: {shell: exec RUN <&- >&- 2>&-}
  status, samples and plots cannot be written:
    shell: |
      mkdir -p OUT/status.json
      touch OUT/samples OUT/plots
      echo '{"megatoken": "0.1.0"}' > OUT/provenance.json
      exec RUN log.plots=true
  a locale without UTF-8, a dumb terminal:
    shell: exec env LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii PYTHONCOERCECLOCALE=0 TERM=dumb RUN
"""
CASES = [
    Case(name, end, **options)
    for end, cases in yaml.safe_load(CASES_OF_ENDS).items()
    for name, options in cases.items()
]


def disturb(case: Case, recipe: Path, out: Path) -> int:
    """Run a case to its end; return the exit code."""
    run = shlex.join(command(recipe, out, case.layout, case.arguments))
    shell = case.shell.replace("RUN", run).replace("OUT", shlex.quote(str(out)))
    master, slave = pty.openpty()
    # The only process that has this end open.
    reader = subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL)
    os.close(master)

    def hang_up():
        reader.kill()
        reader.wait()

    def prepare():
        if case.controls:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    try:
        arguments = ["sh", "-c", f"export TERM=xterm-256color; {shell}"]
        process = start_session(arguments, prepare, stdin=slave, stdout=slave, stderr=slave)
        if case.hang_up:
            wait_for(lambda: is_in(out, case.hang_up), process, or_end=True)
            hang_up()
        return process.wait(timeout=STUCK_SECONDS)
    finally:
        hang_up()
        os.close(slave)


def is_in(out: Path, phase: str) -> bool:
    """Whether a run is in a phase, after some steps."""
    status = read_object(out / "status.json")
    if phase == "start":
        return True
    if phase == "draft":
        return bool(drafts(out))
    return status.get("phase") == phase and status.get("step", 0) >= 5


def find_end(case: Case, recipe: Path, out: Path) -> str:
    """How a case ended: SAVED with its last step, RAN_ON, or what there is to say of a run that is lost."""
    code = disturb(case, recipe, out)
    if code == ExitCode.DONE:
        return RAN_ON
    last = max(read_column(out, "loss"), default=0)
    is_saved = code == ExitCode.STOPPED and newest_step(out) == last > 0
    return SAVED if is_saved else f"LOST: exit {code} after step {last}"


def judge(case: Case, recipe: Path, out: Path, clean: Mapping[str, Any]) -> tuple[str, bool]:
    """Return how a case ended and, after the same command again if it was stopped, whether its
    end is the clean run's."""
    end, code = find_end(case, recipe, out), 0
    if end == SAVED:
        code = run_quietly(command(recipe, out, case.layout, case.arguments))
    found = fingerprint(out)
    return end, code == ExitCode.DONE and found == clean


def main() -> int:
    options = parse_options(__doc__, only="")
    cases = [case for case in CASES if options.only in case.name]
    ends = {}
    bad = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_recipe(folder / "job")
        clean = {}
        for nproc in sorted({case.nproc for case in cases}):
            out = folder / f"clean-{nproc}"
            run_quietly(command(recipe, out, Layout(nproc, "none")), check=True)
            clean[nproc] = fingerprint(out)
        for number, case in enumerate(cases):
            ends[case.name], same = judge(case, recipe, folder / f"run-{number}", clean[case.nproc])
            if ends[case.name] != case.end or not same:
                bad.append(case.name)
            print(f"{case.name}: {ends[case.name]}{'' if same else ', ANOTHER END'}", flush=True)
    return report("terminal", not bad, cases=len(cases), bad=bad, ends=ends)


if __name__ == "__main__":
    sys.exit(main())
