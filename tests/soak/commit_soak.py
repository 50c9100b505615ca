"""Kill or fail a save, a replacement and a pruning at every system call they make, and check what is left.

A subprocess runs one operation under strace, which at the n-th call of one kind (open, write, fsync, rename, unlink,
mkdir, chmod, ...) kills it, makes that call fail with ENOSPC or EIO, or that call and all later ones of its kind
(`ENOSPC+`; `EIO+` of an fsync). Afterwards every checkpoint must be whole and of one step, the newest must be the old
or the new one, and repeating the operation must succeed. In `ranks` two processes write into one draft, as those of a
sharded model do; each is disturbed at each of its calls. Files are written again without a pause here. Also checked:
bit flips in every file of a checkpoint, each bit of the manifest, and, from the log of an undisturbed save, the order
that survives a power loss (files and folders synced before the rename, the parent after it).

    python tests/soak/commit_soak.py                  every point; the last line of stdout is one JSON object
    python tests/soak/commit_soak.py --sample 20      a random sample of the points

Needs Linux with strace and ptrace. Exits 1 if anything was lost.
"""

import argparse
import contextlib
import dataclasses
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
from megatoken.checkpoint.manifest import FileEntry, verify
from megatoken.errors import ExitCode, MegatokenError, PeerError, error_from_code

CALLS = (
    "?open,openat,?creat,write,?pwrite64,?writev,fsync,?fdatasync,?rename,?renameat,?renameat2,?unlink,unlinkat,"
    "?rmdir,?mkdir,?mkdirat,ftruncate,?chmod,?fchmod,?fchmodat,?link,?linkat"
)
REMOVALS = ("unlink", "unlinkat", "rmdir")
BEGIN, END = "/soak-begins", "/soak-ends"
KEEP = {"keep_last": 2, "keep_every": 20}
RANK1 = "SOAK_RANK1"  # variable with the words before the command of rank 1
protocol.RETRY_SECONDS = (0.0, 0.0)


@dataclass(frozen=True)
class Scenario:
    """An operation, the checkpoints before it, and what must and may be there after it."""

    before: tuple[int, ...]
    damaged: tuple[int, ...]
    after: tuple[int, ...]
    newest: tuple[int, int]  # old, new


SCENARIOS = {
    "save": Scenario((10, 20), (), (10, 20, 30), (20, 30)),
    "replace": Scenario((10, 20, 30), (30,), (10, 20, 30), (20, 30)),
    "prune": Scenario((10, 15, 20, 30, 40, 50, 60), (40, 60), (20, 30, 40, 50, 60), (50, 50)),
    "ranks": Scenario((10, 20), (), (10, 20, 30), (20, 30)),
}


@dataclass(frozen=True)
class Point:
    """The n-th call of one kind in the subprocess, and what is done to it."""

    scenario: str
    call: str
    n: int
    injected: str  # "kill", or the name of an error, with a + when it stays
    rank: int = 0


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
    outcome: dict[str, object] = {"code": 0, "message": "", "entries": {}}
    call = partial(apply_operation, scenario, root)
    if scenario == "ranks":
        words = [*json.loads(os.environ[RANK1]), *operate("rank 1", root)]
        call = partial(
            commit_on_ranks,
            root,
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE),
        )
    elif scenario == "rank 1":
        draft = sys.stdin.readline().strip()
        if not draft:
            return  # rank 0 has died
        call = partial(write_part, Path(draft), 1)
    mark(BEGIN)
    try:
        outcome["entries"] = call()
    except MegatokenError as error:
        outcome |= {"code": int(error.code), "message": str(error)}
    mark(END)
    os.writev(1, [json.dumps(outcome).encode()])  # no `write`, which may fail


def commit_on_ranks(root: Path, rank1: "subprocess.Popen[bytes]") -> None:
    """`commit` by rank 0 of two, as AsyncSave does it: the other writes its files into the same draft meanwhile."""
    draft = protocol.open_draft(root, 30, 20_000)
    error: MegatokenError | None = None
    files: dict[str, FileEntry] = {}
    assert draft is not None
    assert rank1.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died
        os.writev(rank1.stdin.fileno(), [f"{draft}\n".encode()])
    try:
        files = write_part(draft, 0)
    except MegatokenError as own:
        error = own
    answer = rank1.communicate()[0]
    if not answer:
        raise PeerError("rank 1 is lost", root)  # rank 0 ends without a commit
    try:
        report = json.loads(answer)
        for found in filter(
            None, (error, report["code"] and error_from_code(report["code"], report["message"]))
        ):
            raise found
        others = {name: FileEntry(*entry) for name, entry in report["entries"].items()}
        protocol.publish(draft, 30, {**files, **others}, meta={"tokens": 30_000})
    finally:
        protocol.discard(draft)


def write_part(draft: Path, rank: int) -> dict[str, FileEntry]:
    """Write the files of a rank of two: the tensors are rank 1's."""
    files = {
        name: writer
        for name, writer in writers(30).items()
        if name.endswith(".safetensors") == bool(rank)
    }
    entries = protocol.write_files(draft, 30, files, 20_000)
    return (
        {name: dataclasses.astuple(entry) for name, entry in entries.items()} if rank else entries
    )  # type: ignore[misc]


def operate(scenario: str, root: Path) -> list[str]:
    """The command that runs an operation."""
    return [sys.executable, str(Path(__file__).resolve()), "--operate", scenario, str(root)]


def mark(name: str) -> None:
    with contextlib.suppress(OSError):
        os.open(name, os.O_RDONLY)


def prepare(scenario: str, root: Path) -> None:
    """Create the checkpoints before the operation."""
    for step in SCENARIOS[scenario].before:
        commit(root, step)
    for damaged in SCENARIOS[scenario].damaged:
        flip(protocol.step_folder(root, damaged) / "state.json", 77)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def trace(
    scenario: str, rank: int, root: Path, log: Path, *injection: str
) -> subprocess.CompletedProcess[str]:
    """Run an operation with the calls of one rank's main thread traced; other threads read only."""
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    strace = [
        "strace",
        "-y",
        "-s",
        "64",
        "-o",
        str(log),
        "-e",
        f"trace={CALLS}",
        "-e",
        "signal=none",
    ]
    prefix: list[str] = [*strace, *injection]
    environment[RANK1] = json.dumps(prefix if rank else [])
    command = operate(scenario, root) if rank else [*prefix, *operate(scenario, root)]
    # Rank 1 shares stderr: this also waits for its end.
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def window(log: Path) -> list[tuple[str, int, str]]:
    """(call, its number among calls of its kind since the process started, line) of every call between the marks."""
    counts: Counter[str] = Counter()
    calls = []
    inside = False
    for line in log.read_text(errors="replace").splitlines():
        match = re.match(r"([a-z0-9_]+)\(", line)
        if match is None:
            continue
        counts[match[1]] += 1
        if BEGIN in line or END in line:
            inside = BEGIN in line
        elif inside and "<pipe:" not in line:
            calls.append((match[1], counts[match[1]], line))
    return calls


def find_points(
    scenario: str, rank: int, template: Path, work: Path
) -> tuple[list[Point], list[str]]:
    """Every point of an undisturbed run, and the run's log."""
    root, log = work / f"{scenario}-{rank}-plain", work / f"{scenario}-{rank}-plain.log"
    shutil.copytree(template, root)
    done = trace(scenario, rank, root, log)
    assert done.returncode == 0, done.stderr
    assert tuple(protocol.list_steps(root)) == SCENARIOS[scenario].after
    calls = window(log)
    points = [
        Point(scenario, call, n, injected, rank)
        for call, n, _ in calls
        for injected in ("kill", "ENOSPC", "EIO", "EIO+" if "sync" in call else "ENOSPC+")
    ]
    return points, [line for *_, line in calls]


def try_point(point: Point, template: Path, work: Path) -> str:
    """Disturb one run at one point; return the outcome or raise AssertionError."""
    scenario = SCENARIOS[point.scenario]
    name = f"{point.scenario}-{point.rank}-{point.call}-{point.n}-{point.injected}"
    root, log = work / name, work / f"{name}.log"
    shutil.copytree(template, root)
    action = "signal=SIGKILL" if point.injected == "kill" else f"error={point.injected.rstrip('+')}"
    when = f"{point.n}{'+' * point.injected.endswith('+')}"
    done = trace(
        point.scenario, point.rank, root, log, "-e", f"inject={point.call}:{action}:when={when}"
    )
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
    assert tuple(protocol.list_steps(root)) == scenario.after, (
        f"repeating it gives {protocol.list_steps(root)}"
    )
    check_whole(point.scenario, root)
    shutil.rmtree(root)
    log.unlink()
    return outcome


def check_whole(scenario: str, root: Path) -> int:
    """Every checkpoint that is visible must be whole and of one step; return the newest valid step."""
    spec = SCENARIOS[scenario]
    bad = [
        step
        for step in protocol.list_steps(root)
        if not is_whole(protocol.step_folder(root, step), step)
    ]
    assert set(bad) <= set(spec.damaged), f"visible but broken: {bad}"
    newest = protocol.find_newest(root, lambda *_: None)
    assert newest is not None, "no valid checkpoint left"
    kept = set(spec.before) & set(spec.after) - set(spec.damaged)
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
    assert str(root.parent) in str(report["message"]), report  # its name is made durable there
    if point.scenario != "prune":
        assert newest == scenario.newest[0], "reported as a failure"
        assert " free" in str(report["message"]), report
    drafts = [path.name for path in root.glob(".tmp-step-*")]
    stays = (
        point.injected.endswith("+") and point.call == "openat"
    )  # no folder can be opened to empty it
    assert not drafts or point.call in REMOVALS or stays, f"left behind: {drafts}"
    return "refused"


def read_power_loss(lines: list[str], root: str) -> dict[str, int | bool]:
    """What would survive a power loss, from the log of one save: see the keys."""
    rename = next(
        i
        for i, line in enumerate(lines)
        if re.search(r"rename.*\.tmp-step.*/step-00000030\"", line)
    )
    before, after = lines[:rename], lines[rename + 1 :]
    target = re.search(r'"([^"]*\.tmp-step-[^"/]*)"', lines[rename])
    assert target is not None
    temporary = target[1]
    written = {
        path for line in before for path in re.findall(rf"write\([0-9]+<({temporary}/[^>]*)>", line)
    }
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
        "parent_synced_after_rename": any(
            re.search(rf"fsync\([0-9]+<{root}>\) += 0", line) for line in after
        ),
    }


def flip_bits(root: Path, count: int, choose: random.Random) -> dict[str, int]:
    """Flip one bit at a time in the newest of three checkpoints: it must be reported and the one before used."""
    for step in (10, 20, 30):
        commit(root, step)
    folder = protocol.step_folder(root, 30)
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    bits = {name: (folder / name).stat().st_size * 8 for name in names}
    targets = [(name, choose.randrange(bits[name])) for name in choose.choices(names, k=count)]
    targets += (
        [("manifest.json", bit) for bit in range(bits["manifest.json"])] if count >= 200 else []
    )
    detected = 0
    for name, bit in targets:
        flip(folder / name, bit)
        errors: list[str] = []
        newest = protocol.find_newest(
            root, lambda _, error, errors=errors: errors.append(str(error))
        )  # type: ignore[misc]
        hashes = len(set(re.findall(r"\b[0-9a-f]{32}\b", " ".join(errors))))
        reported = (
            len(errors) == 1
            and str(folder / name) in errors[0]
            and (hashes == 2 or name == "manifest.json")
        )
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
        for scenario, rank in (*((scenario, 0) for scenario in SCENARIOS), ("ranks", 1)):
            if not rank:
                prepare(scenario, work / "templates" / scenario)
            found_points, logs[scenario, rank] = find_points(
                scenario, rank, work / "templates" / scenario, work
            )
            points += found_points
        total, by_operation = (
            len(points),
            Counter(f"{point.scenario} rank {point.rank}" for point in points),
        )
        points = choose.sample(points, sample) if 0 < sample < total else points
        outcomes: Counter[str] = Counter()
        failures = []
        with ThreadPoolExecutor(jobs) as pool:
            tries = [
                pool.submit(try_point, point, work / "templates" / point.scenario, work)
                for point in points
            ]
            for point, attempt in zip(points, tries, strict=True):
                try:
                    outcomes[f"{point.scenario} {point.injected} {attempt.result()}"] += 1
                except (AssertionError, MegatokenError) as error:
                    failures.append(f"{point}: {error}")
        return {
            "soak": "commit",
            "points": total,
            "points_by_operation": dict(by_operation),
            "tried": len(points),
            "outcomes": dict(sorted(outcomes.items())),
            "failures": failures,
            "bit_flips": flip_bits(work / "flips", flips, choose),
            "power_loss": read_power_loss(logs["save", 0], str(work / "save-0-plain")),
            "seed": seed,
            "seconds": round(time.monotonic() - start, 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="kill and fail saves at every system call")
    parser.add_argument("--sample", type=int, default=0, help="points to try; 0: all")
    parser.add_argument(
        "--flips",
        type=int,
        default=400,
        help="random bit flips; from 200 on also each manifest bit",
    )
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
