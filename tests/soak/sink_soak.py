"""Runs whose sinks have a full disk, and no network: `python -m tests.soak.sink_soak [--only WORD]`.

Each case trains the tiny job for 100 steps with log.sinks=tensorboard,wandb,trackio, whose files all lie on a file
system of 512 KB in memory. The run must end with exit code 0, with the weights and every row of metrics.jsonl that a
run without sinks has, bit for bit. `full`: no byte is left from the start; `fills`: room for some rows. `no network`:
the run and its sinks see no network interface but a loopback that is down; `logged in`: W&B has a key, so that it
tries. Where the disk had been full, it is then given room and `megatoken sync` sends the rest; the record counts the
rows that each sink has in the end. Needs tensorboard, wandb and trackio beside this package, and the right to mount,
or user namespaces. Three minutes. Prints a line for each case and a JSON line at the end. Linux.
"""

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatoken.system.metrics_log import read_metrics
from tests.soak.tiny_job import Layout, command, write_recipe
from tests.train.test_pretrain import fingerprint

SINKS = ("tensorboard", "wandb", "trackio")
DISK_BYTES = 512 << 10
ROOM_BYTES = 16 << 10  # of a disk that fills


@dataclass(frozen=True, slots=True)
class Case:
    """free_bytes: of the sinks' disk when the run starts, None for enough."""

    name: str
    free_bytes: int | None = None
    has_network: bool = False
    logged_in: bool = False


CASES = (
    Case("network, enough room", has_network=True),
    Case("no network"),
    Case("no network, logged in", logged_in=True),
    Case("no network, disk full", free_bytes=0),
    Case("no network, disk fills", free_bytes=ROOM_BYTES),
)


@contextmanager
def mount_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system in memory, gone at the end with what is on it."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, free_bytes: int) -> None:
    """Leave that many bytes free; what a page holds is the least."""
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - free_bytes)


def make_environment(case: Case, disk: Path) -> dict[str, str]:
    """In which every sink writes to `disk` alone."""
    folders = {
        name: str(disk / name.lower()) for name in ("TRACKIO_DIR", "WANDB_DIR", "WANDB_CACHE_DIR")
    }
    folders |= {
        name: str(disk / name.lower())
        for name in ("WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR")
    }
    known = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("WANDB_", "TRACKIO_"))
    }
    return {**known, **folders, "NETRC": os.devnull} | (
        {"WANDB_API_KEY": "0" * 40} if case.logged_in else {}
    )


def end_sinks(out: Path) -> int:
    """End the processes of a run's sinks that still try; returns how many did."""
    ended = 0
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = line.read_bytes().split(b"\0")
            if b"sync" in words and os.fsencode(out) in words:
                os.kill(int(line.parent.name), signal.SIGKILL)
                ended += 1
    return ended


def count_rows(out: Path, disk: Path) -> dict[str, int]:
    """Training rows that each sink's files hold; of W&B's, whose format is its own, how often they name the loss."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [
        event
        for path in (out / "tensorboard").glob("events.*")
        for event in EventFileLoader(str(path)).Load()
    ]
    steps = {
        event.step for event in events for value in event.summary.value if value.tag == "train/loss"
    }
    found = {"tensorboard": len(steps), "wandb": 0, "trackio": 0}
    for path in (out / "wandb").glob("*run-*/*.wandb"):
        found["wandb"] += path.read_bytes().count(b"train/loss")
    for path in (disk / "trackio_dir").glob("*.db"):
        with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as database:
            query = "select count(distinct step) from metrics where cast(metrics as text) like '%train/loss%'"
            found["trackio"] += database.execute(query).fetchone()[0]
    return found


def judge(case: Case, recipe: Path, out: Path, clean: dict[str, Any]) -> dict[str, Any]:
    """Train beside the sinks of a case; what became of the run and of the sinks."""
    disk = out.parent / f"{out.name}-disk"
    with mount_disk(disk, str(DISK_BYTES if case.free_bytes is not None else "64m")):
        out.mkdir()
        (out / "provenance.json").write_text('{"megatoken": "0.1.0"}')  # a run's folder
        for name in ("tensorboard", "wandb"):
            (disk / name).mkdir()
            (out / name).symlink_to(disk / name)
        if case.free_bytes is not None:
            fill(disk, case.free_bytes)
        environment = make_environment(case, disk)
        words = command(recipe, out, Layout(1, "none"), [f"log.sinks={','.join(SINKS)}"])
        if not case.has_network:
            words = ["unshare", "-n", *words]
        start = time.perf_counter()
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        result: dict[str, Any] = {
            "exit": done.returncode,
            "seconds": round(time.perf_counter() - start, 1),
        }
        result |= {"still_trying": end_sinks(out), "identical": fingerprint(out) == clean}
        result["rows"] = sum(row["kind"] == "train" for row in read_metrics(out))
        result["said"] = [
            line for line in done.stdout.splitlines() if "sync-" in line or "background" in line
        ]
        if case.free_bytes is not None:
            (disk / "filler").unlink()
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            send = [sys.executable, "-P", "-m", "megatoken", "sync", str(out), "--to"]
            codes = {
                name: subprocess.run([*send, name], env=environment).returncode for name in SINKS
            }
            result["sync_after"] = codes
        result["rows_of_sinks"] = count_rows(out, disk)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    if os.geteuid():
        words = [
            "unshare",
            "-rm",
            sys.executable,
            "-P",
            "-m",
            "tests.soak.sink_soak",
            *sys.argv[1:],
        ]
        os.execvp(words[0], words)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_recipe(folder / "job")
        subprocess.run(
            command(recipe, folder / "clean", Layout(1, "none")), capture_output=True, check=True
        )
        clean = fingerprint(folder / "clean")
        for number, case in enumerate(case for case in CASES if options.only in case.name):
            found[case.name] = judge(case, recipe, folder / f"run-{number}", clean)
            print(f"{case.name}: {found[case.name]}", flush=True)
    whole = sum(not case["exit"] and case["identical"] for case in found.values())
    answer = {"soak": "sinks", "cases": len(found), "whole": whole, "ends": found}
    answer["versions"] = {name: version(name) for name in SINKS}
    print(json.dumps(answer), flush=True)
    return int(whole < len(found))


if __name__ == "__main__":
    sys.exit(main())
