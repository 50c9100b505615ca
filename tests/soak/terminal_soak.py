"""Runs whose terminal, pipe or disk for output goes away: each must end whole ("ran on") or stop saved ("saved").

    python -m tests.soak.terminal_soak [--only WORD]

A terminal that is closed sends SIGHUP: the run saves, exits 75, and the same command goes on. Whatever cannot be
written otherwise is lost, and the run goes on. Either way the end is that of an undisturbed run, bit for bit. Prints a
line for each case and a JSON line at the end. Linux; needs no rights.
"""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatoken.errors import ExitCode
from megatoken.system.atomic_write import read_object
from tests.soak.options import parse_options, report
from tests.soak.tiny_job import (
    STUCK_SECONDS,
    Layout,
    Process,
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
    """What a run's stdin, stdout and stderr are, and what happens to them.

    hang_up: when the terminal is closed: in this phase of the run, "draft": while a checkpoint is written, "": never.
    controls: the terminal sends SIGHUP when it is closed, which `nohup` ignores. has_blocked_files: status, samples
    and plots cannot be written. Of a pipe one line is read, then it is closed.
    """

    name: str
    end: str
    streams: Sequence[str] = ("terminal",) * 3
    hang_up: str = ""
    controls: bool = True
    nohup: bool = False
    nproc: int = 1
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    has_blocked_files: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(self.nproc, "none", micro_batch=3)


def block_files(out: Path) -> None:
    """Put folders in the place of files that a run writes, and files in the place of folders."""
    out.mkdir()
    (out / "provenance.json").write_text('{"megatoken": "0.1.0"}')
    (out / "samples").write_text("in the way")
    (out / "plots").write_text("in the way")
    (out / "status.json").mkdir()


CASES_OF_ENDS = """
saved:
  terminal closed in a step: {hang_up: step}
  terminal closed in an evaluation: {hang_up: validate}
  terminal closed while a checkpoint is written: {hang_up: draft}
  terminal closed, two processes: {hang_up: step, nproc: 2}
  "| head -1, terminal closed": {streams: [terminal, pipe, terminal], hang_up: step}
ran on:
  nohup, terminal closed: {hang_up: step, nohup: true}
  dead terminal without a signal: {hang_up: step, controls: false}
  dead terminal before the first line: {hang_up: start, controls: false}
  output to /dev/full: {streams: ["null", full, full]}
  output to /dev/full, two processes: {streams: ["null", full, full], nproc: 2}
  2>&1 | head -1, two processes: {streams: [terminal, pipe, pipe], nproc: 2}
  stdin, stdout and stderr closed: {streams: [closed, closed, closed]}
  status, samples and plots cannot be written: {has_blocked_files: true}
  a locale without UTF-8, a dumb terminal:
    environment: {LC_ALL: C, PYTHONUTF8: "0", PYTHONIOENCODING: ascii, PYTHONCOERCECLOCALE: "0", TERM: dumb}
"""
CASES = [
    Case(name, end, **options)
    for end, cases in yaml.safe_load(CASES_OF_ENDS).items()
    for name, options in cases.items()
]


class Terminal:
    """A pseudo-terminal whose output somebody reads until it is closed."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self._is_open = True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # no process has it open any more
            while self._is_open:
                if select.select([self._master], [], [], 0.01)[0]:
                    os.read(self._master, 1 << 16)

    def close(self) -> None:
        """Hang up."""
        if self._is_open:
            self._is_open = False
            self._reader.join()
            os.close(self._master)


@contextmanager
def open_streams(case: Case, terminal: Terminal) -> Iterator[list[int]]:
    """Descriptors for stdin, stdout and stderr; -1 for one that is to be closed."""
    descriptors: dict[str, int] = {"terminal": terminal.slave, "closed": -1}
    with ExitStack() as stack:
        for stream in {*case.streams} - descriptors.keys():
            if stream == "pipe":
                reader, descriptor = os.pipe()
                threading.Thread(target=read_line, args=(reader,), daemon=True).start()
            else:
                descriptor = os.open(f"/dev/{stream}", os.O_RDWR)
            stack.callback(os.close, descriptor)
            descriptors[stream] = descriptor
        yield [descriptors[stream] for stream in case.streams]


def read_line(descriptor: int) -> None:
    """`head -1`."""
    while (byte := os.read(descriptor, 1)) and byte != b"\n":
        pass
    os.close(descriptor)


def start(case: Case, words: Sequence[str], streams: Sequence[int], terminal: Terminal) -> Process:
    slave = os.ttyname(terminal.slave)

    def prepare() -> None:
        if case.controls and "terminal" in case.streams:
            tty = os.open(slave, os.O_RDWR)
            fcntl.ioctl(tty, termios.TIOCSCTTY, 0)
            os.close(tty)
        if case.nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number, descriptor in enumerate(streams):
            if descriptor < 0:
                os.close(number)

    opened = (subprocess.DEVNULL if descriptor < 0 else descriptor for descriptor in streams)
    options = dict(zip(("stdin", "stdout", "stderr"), opened, strict=True))
    environment = {**os.environ, "TERM": "xterm-256color", **case.environment}
    return start_session(words, prepare, env=environment, **options)


def disturb(case: Case, recipe: Path, out: Path) -> int:
    """Run a case to its end; return the exit code."""
    words = command(recipe, out, case.layout, case.words)
    if case.has_blocked_files:
        block_files(out)
        words.append("log.plots=true")
    terminal = Terminal()
    try:
        with open_streams(case, terminal) as streams:
            process = start(case, words, streams, terminal)
        os.close(terminal.slave)
        if case.hang_up:
            wait_for(lambda: is_in(out, case.hang_up), process, or_end=True)
            terminal.close()
        return process.wait(timeout=STUCK_SECONDS)
    finally:
        terminal.close()


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
        code = run_quietly(command(recipe, out, case.layout, case.words))
    found = fingerprint(out)
    return end, code == ExitCode.DONE and found == clean


def main() -> int:
    options = parse_options(__doc__, only="")
    cases = [case for case in CASES if options.only in case.name]
    ends: dict[str, str] = {}
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
