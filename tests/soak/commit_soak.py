"""Kill or fail a save, a replacement and a pruning at every system call they make, and check what is left.

A subprocess runs one operation under strace, which at the n-th call of one kind (open, write, fsync, rename, unlink,
mkdir, chmod, ...) either kills it or makes that call fail with ENOSPC or EIO. Afterwards every checkpoint must be whole
and of one step, the newest must be the old or the new one, and repeating the operation must succeed. Also checked: bit
flips in every file of a checkpoint, each bit of the manifest, and, from the log of an undisturbed save, the order that
survives a power loss (files and folders synced before the rename, the parent after it).

    python tests/soak/commit_soak.py                  every point; the last line of stdout is one JSON object
    python tests/soak/commit_soak.py --sample 20      a random sample of the points

Needs Linux with strace and ptrace. Exits 1 if anything was lost.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from megatoken.checkpoint import commit as protocol
from megatoken.checkpoint.manifest import verify
from megatoken.errors import ExitCode, MegatokenError

CALLS = (
    "?open,openat,?creat,write,?pwrite64,?writev,fsync,?fdatasync,?rename,?renameat,?renameat2,?unlink,unlinkat,"
    "?rmdir,?mkdir,?mkdirat,ftruncate,?chmod,?fchmod,?fchmodat,?link,?linkat"
)
REMOVALS = ("unlink", "unlinkat", "rmdir")
BEGIN, END = "/soak-begins", "/soak-ends"
KEEP = {"keep_last": 2, "keep_every": 20}


@dataclass(frozen=True)
class Scenario:
    """An operation, the checkpoints before it, and what must and may be there after it."""

    before: tuple[int, ...]
    damaged: int | None
    after: tuple[int, ...]
    newest: tuple[int, int]  # old, new


SCENARIOS = {
    "save": Scenario((10, 20), None, (10, 20, 30), (20, 30)),
    "replace": Scenario((10, 20, 30), 30, (10, 20, 30), (20, 30)),
    "prune": Scenario((10, 15, 20, 30, 40, 50), 40, (20, 30, 40, 50), (50, 50)),
}


@dataclass(frozen=True)
class Point:
    """The n-th call of one kind in the subprocess, and what is done to it."""

    scenario: str
    call: str
    n: int
    injected: str  # "kill" or the name of an error


def contents(step: int) -> dict[str, bytes]:
    """The plain files of a step, different from those of other steps in every byte range."""
    return {
        "state.json": json.dumps({"step": step, "order": [step] * 50}).encode(),
        "tokenizer/vocab.json": f"vocabulary of {step} ".encode() * 300,
    }


def write_tensors(step: int, path: Path) -> None:
    """Write with safetensors: its Rust code makes system calls of its own, with a temporary file and a rename."""
    save_file({"weight": numpy.full(3000, step, numpy.uint8)}, path)


def writers(step: int) -> dict[str, Callable[[Path], None]]:
    plain = {name: partial(Path.write_bytes, data=data) for name, data in contents(step).items()}
    return {"model.safetensors": partial(write_tensors, step), **plain}


def commit(root: Path, step: int) -> None:
    protocol.commit(root, step, writers(step), meta={"tokens": step * 1000}, needed_bytes=20_000)


def apply_operation(scenario: str, root: Path) -> None:
    if scenario == "prune":
        protocol.prune(root, **KEEP)
    else:
        commit(root, 30)


def run_operation(scenario: str, root: Path) -> None:
    """Run one operation between two marks in the log of system calls; print its outcome."""
    outcome = {"code": 0, "message": ""}
    mark(BEGIN)
    try:
        apply_operation(scenario, root)
    except MegatokenError as error:
        outcome = {"code": int(error.code), "message": str(error)}
    mark(END)
    print(json.dumps(outcome))


def mark(name: str) -> None:
    with contextlib.suppress(OSError):
        os.open(name, os.O_RDONLY)


def prepare(scenario: str, root: Path) -> None:
    """Create the checkpoints before the operation."""
    for step in SCENARIOS[scenario].before:
        commit(root, step)
    if damaged := SCENARIOS[scenario].damaged:
        flip(protocol.step_folder(root, damaged) / "state.json", 77)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def trace(scenario: str, root: Path, log: Path, *injection: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    strace = ["strace", "-f", "-y", "-s", "64", "-o", str(log), "-e", f"trace={CALLS}", "-e", "signal=none"]
    command = [sys.executable, str(Path(__file__).resolve()), "--operate", scenario, str(root)]
    return subprocess.run([*strace, *injection, *command], env=environment, capture_output=True, text=True, check=False)


def window(log: Path) -> list[tuple[str, int, str]]:
    """(call, its number among calls of its kind since the process started, line) of every call between the marks."""
    counts: Counter[str] = Counter()
    calls = []
    inside = False
    for line in log.read_text(errors="replace").splitlines():
        match = re.match(r"[0-9]+ +([a-z0-9_]+)\(", line)
        if match is None:
            continue
        counts[match[1]] += 1
        if BEGIN in line or END in line:
            inside = BEGIN in line
        elif inside:
            calls.append((match[1], counts[match[1]], line))
    return calls


def find_points(scenario: str, template: Path, work: Path) -> tuple[list[Point], list[str]]:
    """Every point of an undisturbed run, and the run's log."""
    root, log = work / f"{scenario}-plain", work / f"{scenario}-plain.log"
    shutil.copytree(template, root)
    done = trace(scenario, root, log)
    assert done.returncode == 0, done.stderr
    assert tuple(protocol.list_steps(root)) == SCENARIOS[scenario].after
    calls = window(log)
    points = [Point(scenario, call, n, injected) for call, n, _ in calls for injected in ("kill", "ENOSPC", "EIO")]
    return points, [line for *_, line in calls]


def try_point(point: Point, template: Path, work: Path) -> str:
    """Disturb one run at one point; return the outcome or raise AssertionError."""
    scenario = SCENARIOS[point.scenario]
    name = f"{point.scenario}-{point.call}-{point.n}-{point.injected}"
    root, log = work / name, work / f"{name}.log"
    shutil.copytree(template, root)
    action = "signal=SIGKILL" if point.injected == "kill" else f"error={point.injected}"
    done = trace(point.scenario, root, log, "-e", f"inject={point.call}:{action}:when={point.n}")
    text = log.read_text(errors="replace")
    assert BEGIN in text, "hit before the operation"
    assert (END in text) == (point.injected != "kill"), "not hit inside the operation"
    newest = check_whole(point.scenario, root)
    if point.injected == "kill":
        outcome = "new" if newest == scenario.newest[1] else "old"
    else:
        outcome = check_report(point, root, newest, json.loads(done.stdout.splitlines()[-1]))
    protocol.remove_leftovers(root)
    assert not list(root.glob(".tmp-*")), "leftovers were not removed"
    apply_operation(point.scenario, root)
    assert tuple(protocol.list_steps(root)) == scenario.after, f"repeating it gives {protocol.list_steps(root)}"
    check_whole(point.scenario, root)
    shutil.rmtree(root)
    log.unlink()
    return outcome


def check_whole(scenario: str, root: Path) -> int:
    """Every checkpoint that is visible must be whole and of one step; return the newest valid step."""
    spec = SCENARIOS[scenario]
    bad = [step for step in protocol.list_steps(root) if not is_whole(protocol.step_folder(root, step), step)]
    assert set(bad) <= {spec.damaged}, f"visible but broken: {bad}"
    newest = protocol.find_newest(root, lambda *_: None)
    assert newest is not None, "no valid checkpoint left"
    kept = set(spec.before) & set(spec.after) - {spec.damaged}
    assert kept <= set(protocol.list_steps(root)), f"lost one of {kept}"
    assert newest[1].step in spec.newest, f"newest is {newest[1].step}"
    return newest[1].step


def is_whole(folder: Path, step: int) -> bool:
    """Whether a checkpoint verifies; if it does, its files must be those written for that step."""
    try:
        manifest = verify(folder)
    except MegatokenError:
        return False
    assert (manifest.step, manifest.meta) == (step, {"tokens": step * 1000}), manifest
    for name, data in contents(step).items():
        assert (folder / name).read_bytes() == data, f"{folder / name} is of another step"
    assert (folder / "model.safetensors").read_bytes().endswith(bytes([step]) * 3000)
    return True


def check_report(point: Point, root: Path, newest: int, report: dict[str, object]) -> str:
    """A failed call must either be reported as StorageError, with nothing left behind, or have no effect."""
    scenario = SCENARIOS[point.scenario]
    assert report["code"] in (ExitCode.DONE, ExitCode.STORAGE), report
    if report["code"] == ExitCode.DONE:
        assert newest == scenario.newest[1], "reported as a success"
        return "done"
    assert str(root) in str(report["message"]), report
    if point.scenario != "prune":
        assert newest == scenario.newest[0], "reported as a failure"
        assert " free" in str(report["message"]), report
    drafts = [path.name for path in root.glob(".tmp-step-*")]
    assert not drafts or point.call in REMOVALS, f"left behind: {drafts}"
    return "refused"


def read_power_loss(lines: list[str], root: str) -> dict[str, int | bool]:
    """What would survive a power loss, from the log of one save: see the keys."""
    rename = next(i for i, line in enumerate(lines) if re.search(r"rename.*\.tmp-step.*/step-00000030\"", line))
    before, after = lines[:rename], lines[rename + 1 :]
    target = re.search(r'"([^"]*\.tmp-step-[^"/]*)"', lines[rename])
    assert target is not None
    temporary = target[1]
    written = {path for line in before for path in re.findall(rf"write\([0-9]+<({temporary}/[^>]*)>", line)}
    moved = dict(re.findall(rf'"({temporary}/[^"]*)".*"({temporary}/[^"]*)"', "\n".join(before)))
    synced = {
        moved.get(path, path): i
        for i, line in enumerate(before)
        for path in re.findall(r"fsync\([0-9]+<([^>]*)>\) += 0", line)
    }
    files = {moved.get(path, path) for path in written}
    late = [
        path
        for path in files
        if any(re.search(rf"write\([0-9]+<{path}>", line) for line in before[synced.get(path, 0) :])
    ]
    folders = {str(Path(path).parent) for path in files}
    last_file_sync = max(synced.get(path, 0) for path in files)
    return {
        "files": len(files),
        "files_synced_before_rename": len(files & synced.keys()),
        "files_written_after_sync": len(late),
        "folders": len(folders),
        "folders_synced_before_rename": len(folders & synced.keys()),
        "manifest_synced_last_of_files": synced.get(f"{temporary}/manifest.json") == last_file_sync,
        "folder_synced_after_manifest": synced.get(temporary, -1) > last_file_sync,
        "parent_synced_after_rename": any(re.search(rf"fsync\([0-9]+<{root}>\) += 0", line) for line in after),
    }


def flip_bits(root: Path, count: int, choose: random.Random) -> dict[str, int]:
    """Flip one bit at a time in the newest of three checkpoints: it must be reported and the one before used."""
    for step in (10, 20, 30):
        commit(root, step)
    folder = protocol.step_folder(root, 30)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    bits = {name: (folder / name).stat().st_size * 8 for name in names}
    targets = [(name, choose.randrange(bits[name])) for name in choose.choices(names, k=count)]
    targets += [("manifest.json", bit) for bit in range(bits["manifest.json"])] if count >= 200 else []
    detected = 0
    for name, bit in targets:
        flip(folder / name, bit)
        errors: list[str] = []
        newest = protocol.find_newest(root, lambda _, error, errors=errors: errors.append(str(error)))  # type: ignore[misc]
        hashes = len(set(re.findall(r"\b[0-9a-f]{32}\b", " ".join(errors))))
        reported = len(errors) == 1 and str(folder / name) in errors[0] and (hashes == 2 or name == "manifest.json")
        detected += reported and newest is not None and newest[1].step == 20
        flip(folder / name, bit)
        assert verify(folder).step == 30, "false alarm"
    return {"flips": len(targets), "found_named_and_passed_over": detected}


def soak(sample: int, flips: int, seed: int, jobs: int) -> dict[str, object]:
    """Try every point, or a sample, and the bit flips; return the report."""
    choose = random.Random(seed)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="commit-soak-") as folder:
        work = Path(folder).resolve()
        points: list[Point] = []
        logs = {}
        for scenario in SCENARIOS:
            prepare(scenario, work / "templates" / scenario)
            found_points, logs[scenario] = find_points(scenario, work / "templates" / scenario, work)
            points += found_points
        total = len(points)
        points = choose.sample(points, sample) if 0 < sample < total else points
        outcomes: Counter[str] = Counter()
        failures = []
        with ThreadPoolExecutor(jobs) as pool:
            tries = [pool.submit(try_point, point, work / "templates" / point.scenario, work) for point in points]
            for point, attempt in zip(points, tries, strict=True):
                try:
                    outcomes[f"{point.scenario} {point.injected} {attempt.result()}"] += 1
                except (AssertionError, MegatokenError) as error:
                    failures.append(f"{point}: {error}")
        return {
            "soak": "commit",
            "points": total,
            "tried": len(points),
            "outcomes": dict(sorted(outcomes.items())),
            "failures": failures,
            "bit_flips": flip_bits(work / "flips", flips, choose),
            "power_loss": read_power_loss(logs["save"], str(work / "save-plain")),
            "seed": seed,
            "seconds": round(time.monotonic() - start, 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="kill and fail saves at every system call")
    parser.add_argument("--sample", type=int, default=0, help="points to try; 0: all")
    parser.add_argument("--flips", type=int, default=400, help="random bit flips; from 200 on also each manifest bit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--operate", nargs=2, metavar=("SCENARIO", "ROOT"))
    given = parser.parse_args()
    if given.operate:
        run_operation(given.operate[0], Path(given.operate[1]))
        return 0
    report = soak(given.sample, given.flips, given.seed, given.jobs)
    print(json.dumps(report))
    flips = report["bit_flips"]
    assert isinstance(flips, dict)
    return int(bool(report["failures"]) or flips["flips"] != flips["found_named_and_passed_over"])


if __name__ == "__main__":
    sys.exit(main())
