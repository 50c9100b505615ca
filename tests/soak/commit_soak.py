"""Kill or fail a save, a replacement and a pruning at every system call they make, and look at what is left.

A victim process does one operation under strace, which at the n-th call of one kind (open, write, fsync, rename,
unlink, mkdir, chmod, ...) either kills it or makes that call fail with ENOSPC or EIO. Afterwards every checkpoint
there must be whole and of one step, the newest must be the old or the new one, and the operation, done again, must
succeed. Besides: bit flips in every file of a checkpoint, each bit of the manifest, and the power-loss rule read
off the log of an undisturbed save (files and folders synced before the rename, the parent after it).

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

from megatoken.checkpoint import store
from megatoken.errors import Exit, Fault

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
    """The n-th call of one kind in the victim, and what is done to it."""

    scenario: str
    call: str
    n: int
    fault: str  # "kill" or the name of an error


def contents(step: int) -> dict[str, bytes]:
    """What the plain files of a step hold: different in every byte range from other steps."""
    return {
        "state.json": json.dumps({"step": step, "order": [step] * 50}).encode(),
        "tokenizer/vocab.json": f"vocabulary of {step} ".encode() * 300,
    }


def write_tensors(step: int, path: Path) -> None:
    """The writer whose calls are not ours: Rust, with a temporary file and a rename of its own."""
    save_file({"weight": numpy.full(3000, step, numpy.uint8)}, path)


def writers(step: int) -> dict[str, Callable[[Path], None]]:
    plain = {name: partial(Path.write_bytes, data=data) for name, data in contents(step).items()}
    return {"model.safetensors": partial(write_tensors, step), **plain}


def commit(root: Path, step: int) -> None:
    store.commit(root, step, writers(step), meta={"tokens": step * 1000}, needed_bytes=20_000)


def operate(scenario: str, root: Path) -> None:
    if scenario == "prune":
        store.prune(root, **KEEP)
    else:
        commit(root, 30)


def be_victim(scenario: str, root: Path) -> None:
    """One operation between two marks in the log of system calls; its outcome on stdout."""
    outcome = {"code": 0, "message": ""}
    mark(BEGIN)
    try:
        operate(scenario, root)
    except Fault as fault:
        outcome = {"code": int(fault.code), "message": str(fault)}
    mark(END)
    print(json.dumps(outcome))


def mark(name: str) -> None:
    with contextlib.suppress(OSError):
        os.open(name, os.O_RDONLY)


def prepare(scenario: str, root: Path) -> None:
    """The state before the operation."""
    for step in SCENARIOS[scenario].before:
        commit(root, step)
    if damaged := SCENARIOS[scenario].damaged:
        flip(store.step_folder(root, damaged) / "state.json", 77)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def trace(scenario: str, root: Path, log: Path, *injection: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    strace = ["strace", "-f", "-y", "-s", "64", "-o", str(log), "-e", f"trace={CALLS}", "-e", "signal=none"]
    victim = [sys.executable, str(Path(__file__).resolve()), "--victim", scenario, str(root)]
    return subprocess.run([*strace, *injection, *victim], env=environment, capture_output=True, text=True, check=False)


def window(log: Path) -> list[tuple[str, int, str]]:
    """(call, how manieth of its kind since the process began, line) of every call between the marks."""
    seen: Counter[str] = Counter()
    found = []
    inside = False
    for line in log.read_text(errors="replace").splitlines():
        match = re.match(r"[0-9]+ +([a-z0-9_]+)\(", line)
        if match is None:
            continue
        seen[match[1]] += 1
        if BEGIN in line or END in line:
            inside = BEGIN in line
        elif inside:
            found.append((match[1], seen[match[1]], line))
    return found


def find_points(scenario: str, template: Path, work: Path) -> tuple[list[Point], list[str]]:
    """Every point of one undisturbed run, and its log."""
    root, log = work / f"{scenario}-plain", work / f"{scenario}-plain.log"
    shutil.copytree(template, root)
    done = trace(scenario, root, log)
    assert done.returncode == 0, done.stderr
    assert tuple(store.steps(root)) == SCENARIOS[scenario].after
    calls = window(log)
    points = [Point(scenario, call, n, fault) for call, n, _ in calls for fault in ("kill", "ENOSPC", "EIO")]
    return points, [line for *_, line in calls]


def try_point(point: Point, template: Path, work: Path) -> str:
    """Disturb one run at one point; return what became of it, or raise AssertionError."""
    scenario = SCENARIOS[point.scenario]
    name = f"{point.scenario}-{point.call}-{point.n}-{point.fault}"
    root, log = work / name, work / f"{name}.log"
    shutil.copytree(template, root)
    how = "signal=SIGKILL" if point.fault == "kill" else f"error={point.fault}"
    done = trace(point.scenario, root, log, "-e", f"inject={point.call}:{how}:when={point.n}")
    text = log.read_text(errors="replace")
    assert BEGIN in text, "hit before the operation"
    assert (END in text) == (point.fault != "kill"), "not hit inside the operation"
    newest = check_whole(point.scenario, root)
    if point.fault == "kill":
        outcome = "new" if newest == scenario.newest[1] else "old"
    else:
        outcome = check_report(point, root, newest, json.loads(done.stdout.splitlines()[-1]))
    store.sweep(root)
    assert not list(root.glob(".tmp-*")), "sweep left something"
    operate(point.scenario, root)
    assert tuple(store.steps(root)) == scenario.after, f"doing it again gives {store.steps(root)}"
    check_whole(point.scenario, root)
    shutil.rmtree(root)
    log.unlink()
    return outcome


def check_whole(scenario: str, root: Path) -> int:
    """Every checkpoint that is visible must be whole and of one step; return the newest valid step."""
    facts = SCENARIOS[scenario]
    bad = [step for step in store.steps(root) if not is_whole(store.step_folder(root, step), step)]
    assert set(bad) <= {facts.damaged}, f"visible but broken: {bad}"
    found = store.newest_valid(root, lambda *_: None)
    assert found is not None, "no valid checkpoint left"
    kept = set(facts.before) & set(facts.after) - {facts.damaged}
    assert kept <= set(store.steps(root)), f"lost one of {kept}"
    assert found[1].step in facts.newest, f"newest is {found[1].step}"
    return found[1].step


def is_whole(folder: Path, step: int) -> bool:
    """Whether a checkpoint verifies; if it does, it must hold what was written for that step and nothing else."""
    try:
        manifest = store.verify(folder)
    except Fault:
        return False
    assert (manifest.step, manifest.meta) == (step, {"tokens": step * 1000}), manifest
    for name, data in contents(step).items():
        assert (folder / name).read_bytes() == data, f"{folder / name} is of another step"
    assert (folder / "model.safetensors").read_bytes().endswith(bytes([step]) * 3000)
    return True


def check_report(point: Point, root: Path, newest: int, report: dict[str, object]) -> str:
    """A failed call is either reported as Fault(STORAGE), with nothing left behind, or did no harm."""
    scenario = SCENARIOS[point.scenario]
    assert report["code"] in (Exit.DONE, Exit.STORAGE), report
    if report["code"] == Exit.DONE:
        assert newest == scenario.newest[1], "called a success"
        return "done"
    assert str(root) in str(report["message"]), report
    if point.scenario != "prune":
        assert newest == scenario.newest[0], "called a failure"
        assert "20,000 bytes needed" in str(report["message"]), report
        assert " free" in str(report["message"]), report
    mine = [path.name for path in root.glob(".tmp-step-*")]
    assert not mine or point.call in REMOVALS, f"left behind: {mine}"
    return "refused"


def read_power_loss(lines: list[str], root: str) -> dict[str, int | bool]:
    """What would survive a power cut, from the log of one save: see the keys."""
    published = next(i for i, line in enumerate(lines) if re.search(r"rename.*\.tmp-step.*/step-00000030\"", line))
    before, after = lines[:published], lines[published + 1 :]
    target = re.search(r'"([^"]*\.tmp-step-[^"/]*)"', lines[published])
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
    """Flip one bit at a time in the newest of three checkpoints: it must be named and the one before used."""
    for step in (10, 20, 30):
        commit(root, step)
    folder = store.step_folder(root, 30)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    bits = {name: (folder / name).stat().st_size * 8 for name in names}
    targets = [(name, choose.randrange(bits[name])) for name in choose.choices(names, k=count)]
    targets += [("manifest.json", bit) for bit in range(bits["manifest.json"])] if count >= 200 else []
    found = 0
    for name, bit in targets:
        flip(folder / name, bit)
        told: list[str] = []
        newest = store.newest_valid(root, lambda _, fault, told=told: told.append(str(fault)))  # type: ignore[misc]
        hashes = len(set(re.findall(r"\b[0-9a-f]{32}\b", " ".join(told))))
        named = len(told) == 1 and str(folder / name) in told[0] and (hashes == 2 or name == "manifest.json")
        found += named and newest is not None and newest[1].step == 20
        flip(folder / name, bit)
        assert store.verify(folder).step == 30, "false alarm"
    return {"flips": len(targets), "found_named_and_passed_over": found}


def soak(sample: int, flips: int, seed: int, jobs: int) -> dict[str, object]:
    """Every point, or a sample, and the flips; the report."""
    choose = random.Random(seed)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="commit-soak-") as folder:
        work = Path(folder).resolve()
        points: list[Point] = []
        logs = {}
        for scenario in SCENARIOS:
            prepare(scenario, work / "templates" / scenario)
            found, logs[scenario] = find_points(scenario, work / "templates" / scenario, work)
            points += found
        total = len(points)
        points = choose.sample(points, sample) if 0 < sample < total else points
        outcomes: Counter[str] = Counter()
        failures = []
        with ThreadPoolExecutor(jobs) as pool:
            tries = [pool.submit(try_point, point, work / "templates" / point.scenario, work) for point in points]
            for point, attempt in zip(points, tries, strict=True):
                try:
                    outcomes[f"{point.scenario} {point.fault} {attempt.result()}"] += 1
                except (AssertionError, Fault) as failure:
                    failures.append(f"{point}: {failure}")
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
    parser.add_argument("--victim", nargs=2, metavar=("SCENARIO", "ROOT"))
    given = parser.parse_args()
    if given.victim:
        be_victim(given.victim[0], Path(given.victim[1]))
        return 0
    report = soak(given.sample, given.flips, given.seed, given.jobs)
    print(json.dumps(report))
    flips = report["bit_flips"]
    assert isinstance(flips, dict)
    return int(bool(report["failures"]) or flips["flips"] != flips["found_named_and_passed_over"])


if __name__ == "__main__":
    sys.exit(main())
