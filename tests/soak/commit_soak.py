"""Kill or fail a checkpoint operation at every system call it makes, and check what is left.

    python -m tests.soak.commit_soak                  every point
    python -m tests.soak.commit_soak --sample 20      a random sample

A subprocess runs one operation under strace, which kills it at the n-th call of one kind, or fails
that call with ENOSPC or EIO, or that call and all later ones of its kind ("+"). Afterwards every
checkpoint must be complete and of one step, the newest must be the old or the new one, and
repeating the operation must succeed. The log of an undisturbed save shows the
order that survives a power loss: files and folders synced before the rename, the parent after it.

Prints one JSON line; exits 1 if anything was lost. Needs Linux with strace and ptrace.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy
import yaml
from safetensors.numpy import save_file

from megatoken.base.errors import ExitCode, MegatokenError
from megatoken.store import commit as protocol
from megatoken.store.manifest import verify
from tests.flip import flip_bit
from tests.soak.options import parse_options, report
from tests.soak.strace import Point, run_traced, trace, try_points

REMOVALS = ("unlink", "unlinkat", "rmdir")
BEGIN = "/soak-begins"
END = "/soak-ends"
protocol.RETRY_SECONDS = (0.0, 0.0)


@dataclass(frozen=True)
class Scenario:
    """An operation's checkpoints before and after it; newest: the newest valid before and after."""

    before: list[int]
    damaged: list[int]
    after: list[int]
    newest: list[int]


STEPS = yaml.safe_load("""
save: {before: [10, 20], damaged: [], after: [10, 20, 30], newest: [20, 30]}
replace: {before: [10, 20, 30], damaged: [30], after: [10, 20, 30], newest: [20, 30]}
prune:
  before: [10, 15, 20, 30, 40, 50, 60]
  damaged: [40, 60]
  after: [20, 30, 40, 50, 60]
  newest: [50, 50]
""")
SCENARIOS = {name: Scenario(**steps) for name, steps in STEPS.items()}


def contents(step: int) -> dict[str, bytes]:
    """Return the plain files of a step, which differ from other steps' in every byte range."""
    return {
        "state.json": json.dumps({"step": step, "order": [step] * 50}).encode(),
        "tokenizer/vocab.json": f"vocabulary of {step} ".encode() * 300,
    }


def write_tensors(step: int, path: Path) -> None:
    """Write with safetensors, whose Rust code makes its own system calls."""
    save_file({"weight": numpy.full(3000, step, numpy.uint8)}, path)


def list_writers(step: int) -> dict[str, Callable[[Path], None]]:
    plain = {name: partial(Path.write_bytes, data=data) for name, data in contents(step).items()}
    return {"model.safetensors": partial(write_tensors, step), **plain}


def commit(root: Path, step: int) -> None:
    meta = {"tokens": step * 1000}
    protocol.commit(root, step, list_writers(step), meta=meta, needed_bytes=20_000)


def apply_operation(scenario: str, root: Path) -> None:
    if scenario == "prune":
        protocol.prune(root, keep_last=2, keep_every=20)
    else:
        commit(root, 30)


def run_operation(scenario: str, root: Path) -> None:
    """Run one operation between two marks in the log of system calls, and print its outcome."""
    outcome = {"code": 0, "message": ""}
    mark(BEGIN)
    try:
        apply_operation(scenario, root)
    except MegatokenError as error:
        outcome |= {"code": int(error.code), "message": str(error)}
    mark(END)
    os.writev(1, [json.dumps(outcome).encode()])  # `write` may be the call that fails


def operate(scenario: str, root: Path) -> list[str]:
    """Return the command that runs an operation."""
    return [sys.executable, "-m", "tests.soak.commit_soak", "operate", scenario, str(root)]


def mark(name: str) -> None:
    with contextlib.suppress(OSError):
        os.open(name, os.O_RDONLY)


def prepare(scenario: str, root: Path) -> None:
    """Create the checkpoints before an operation."""
    for step in SCENARIOS[scenario].before:
        commit(root, step)
    for step in SCENARIOS[scenario].damaged:
        flip_bit(protocol.step_folder(root, step) / "state.json", 8 * 9 + 5)


def find_points(scenario: str, template: Path, work: Path) -> tuple[list[Point], list[str]]:
    """Return every point of an undisturbed run, and the lines of its calls."""
    root = work / f"{scenario}-plain"
    shutil.copytree(template, root)
    calls = list(trace(operate(scenario, root), root.with_suffix(".log")))
    assert protocol.list_steps(root) == SCENARIOS[scenario].after
    begin, end = ([mark in line for _, _, line in calls].index(True) for mark in (BEGIN, END))
    calls = calls[begin + 1 : end]
    points = [
        Point(scenario, call, number, fault)
        for call, number, _ in calls
        for fault in ("kill", "ENOSPC", "EIO", "EIO+" if "sync" in call else "ENOSPC+")
    ]
    return points, [line for _, _, line in calls]


def try_point(point: Point, templates: Path, work: Path) -> str:
    """Disturb one run at one point and return its outcome. Raises AssertionError."""
    scenario = SCENARIOS[point.scenario]
    root = work / str(point)
    log = root.with_suffix(".log")
    shutil.copytree(templates / point.scenario, root)
    done = run_traced(operate(point.scenario, root), log, point)
    text = log.read_text(errors="replace")
    assert BEGIN in text, "hit before the operation"
    assert (END in text) == (point.fault != "kill"), "not hit inside the operation"
    newest = check_complete(point.scenario, root)
    if point.fault == "kill":
        outcome = "new" if newest == scenario.newest[1] else "old"
    else:
        outcome = check_report(point, root, newest, json.loads(done.stdout.splitlines()[-1]))
    protocol.remove_leftovers(root)
    assert not list(root.glob(".tmp-*")), "leftovers were not removed"
    apply_operation(point.scenario, root)
    assert protocol.list_steps(root) == scenario.after
    check_complete(point.scenario, root)
    shutil.rmtree(root)
    log.unlink()
    return outcome


def check_complete(scenario: str, root: Path) -> int:
    """Check that every visible checkpoint is complete; return the newest valid step."""
    spec = SCENARIOS[scenario]
    steps = set(protocol.list_steps(root))
    broken = {step for step in steps if not is_valid(protocol.step_folder(root, step), step)}
    assert broken <= set(spec.damaged), f"visible but broken: {broken}"
    newest = protocol.find_newest(root, lambda *_: None)
    assert newest is not None, "no valid checkpoint left"
    needed = set(spec.before) & set(spec.after) - set(spec.damaged)
    assert needed <= steps, f"lost {needed - steps}"
    assert newest[1].step in spec.newest, f"newest is {newest[1].step}"
    return newest[1].step


def is_valid(folder: Path, step: int) -> bool:
    """Return whether a checkpoint verifies, and if it does, check that its files are of its step."""
    try:
        manifest = verify(folder)
    except MegatokenError:
        return False
    assert (manifest.step, manifest.meta) == (step, {"tokens": step * 1000}), manifest
    for name, data in contents(step).items():
        assert (folder / name).read_bytes() == data, f"{folder / name} is of another step"
    assert (folder / "model.safetensors").read_bytes().endswith(bytes([step]) * 3000)
    return True


def check_report(point: Point, root: Path, newest: int, answer: dict[str, object]) -> str:
    """Check that a failed call had no effect, or was reported and left nothing behind."""
    scenario = SCENARIOS[point.scenario]
    assert answer["code"] in (ExitCode.DONE, ExitCode.STORAGE), answer
    if answer["code"] == ExitCode.DONE:
        assert newest == scenario.newest[1], "reported as a success"
        return "done"
    assert str(root.parent) in str(answer["message"]), answer  # its name is made durable there
    if point.scenario != "prune":
        assert newest == scenario.newest[0], "reported as a failure"
        assert " free" in str(answer["message"]), answer
    drafts = [path.name for path in root.glob(".tmp-step-*")]
    cannot_remove = point.call in REMOVALS or (point.call == "openat" and point.fault[-1] == "+")
    assert not drafts or cannot_remove, f"left behind: {drafts}"
    return "refused"


def read_power_loss(lines: list[str], root: str) -> dict[str, int | bool]:
    """Return what would survive a power loss, from the calls of one save."""
    pattern = r'rename.*"([^"]*\.tmp-step-[^"/]*)".*/step-00000030"'
    [(rename, draft)] = [
        (index, match[1]) for index, line in enumerate(lines) if (match := re.search(pattern, line))
    ]
    before = lines[:rename]
    moves = dict(re.findall(rf'"({draft}/[^"]*)".*"({draft}/[^"]*)"', "\n".join(before)))
    last_write, last_sync = (
        {
            moves.get(path, path): index
            for index, line in enumerate(before)
            for path in re.findall(call, line)
        }
        for call in (rf"write\([0-9]+<({draft}/[^>]*)>", r"fsync\([0-9]+<([^>]*)>\) += 0")
    )
    files = last_write.keys()
    folders = {str(Path(path).parent) for path in files}
    last_file_sync = max(last_sync[path] for path in files)
    parent_sync = re.compile(rf"fsync\([0-9]+<{root}>\) += 0")
    return {
        "files": len(files),
        "folders": len(folders),
        "all_synced_before_rename": files | folders <= last_sync.keys(),
        "no_file_written_after_sync": all(last_write[path] < last_sync[path] for path in files),
        "manifest_synced_last_of_files": last_sync[f"{draft}/manifest.json"] == last_file_sync,
        "folder_synced_after_manifest": last_sync[draft] > last_file_sync,
        "parent_synced_after_rename": any(map(parent_sync.search, lines[rename + 1 :])),
    }


def soak(options: Namespace) -> dict[str, object]:
    """Try every point, or a random sample of them, and return the report."""
    with tempfile.TemporaryDirectory(prefix="commit-soak-") as folder:
        work = Path(folder).resolve()
        templates = work / "templates"
        points = []
        logs = {}
        for scenario in SCENARIOS:
            prepare(scenario, templates / scenario)
            found, logs[scenario] = find_points(scenario, templates / scenario, work)
            points += found

        return {
            **try_points(points, partial(try_point, templates=templates, work=work), options),
            "points_by_operation": Counter(point.scenario for point in points),
            "power_loss": read_power_loss(logs["save"], f"{work}/save-plain"),
        }


def main() -> int:
    if sys.argv[1:2] == ["operate"]:
        run_operation(sys.argv[2], Path(sys.argv[3]))
        return 0
    options = parse_options(__doc__, sample=0, seed=1, jobs=2)
    result = soak(options)
    return report("commit", not result["failures"], **result)


if __name__ == "__main__":
    sys.exit(main())
