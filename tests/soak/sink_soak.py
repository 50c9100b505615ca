"""Train with sinks whose disk is full, and without a network.

    python -m tests.soak.sink_soak [--only WORD]

Each case trains the tiny job with log.sinks=tensorboard,wandb,trackio, whose files are on a file
system in memory. The run must end with the weights and rows of a run without sinks, bit for bit.
The disk then gets room, and `megatoken sync` sends the rest; the record counts the rows that each
sink has. Needs the three packages, and the right to mount or user namespaces. Three minutes. Linux.
"""

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.soak.options import parse_options, report
from tests.soak.tiny_job import Layout, command, run_quietly, write_recipe
from tests.tiny_run import fingerprint, read_rows

SINKS = ("tensorboard", "wandb", "trackio")
DISK_BYTES = 512 << 10
# Bytes free on the sinks' disk when the run starts, and whether W&B has a key, so that it connects.
CASES = {
    "no network": (DISK_BYTES, False),
    "no network, logged in": (DISK_BYTES, True),
    "no network, disk full": (0, False),
    "no network, disk fills": (16 << 10, False),
}


@contextmanager
def mount_disk(folder: Path, free_bytes: int) -> Iterator[None]:
    """Mount a file system in memory with a file that leaves `free_bytes`."""
    size = f"size={DISK_BYTES if free_bytes < DISK_BYTES else 64 << 20}"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(folder)], check=True)
    try:
        for name in ("tensorboard", "wandb"):
            (folder / name).mkdir()
        (folder / "filler").write_bytes(b"\0" * (DISK_BYTES - free_bytes))
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def make_environment(disk: Path, has_key: bool) -> dict[str, str]:
    """Return variables with which all sinks write to `disk`."""
    env = {"NETRC": os.devnull, "TRACKIO_DIR": str(disk / "trackio")}
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "ARTIFACT_DIR"):
        env[f"WANDB_{name}"] = str(disk / "wandb-files")
    if has_key:
        env["WANDB_API_KEY"] = "0" * 40
    return {**os.environ, **env}


def stop_sinks(out: Path) -> int:
    """Kill the sinks of a run that still try, and return their number."""
    n_stopped = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().split(b"\0")
            if b"sync" in words and os.fsencode(out) in words:
                os.kill(int(file.parent.name), signal.SIGKILL)
                n_stopped += 1
    return n_stopped


def count_rows(out: Path, disk: Path) -> dict[str, int]:
    """Return the train rows of each sink; of W&B, how often its files name the loss."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    steps = {
        event.step
        for path in (out / "tensorboard").glob("events.*")
        for event in EventFileLoader(str(path)).Load()
        if any(value.tag == "train/loss" for value in event.summary.value)
    }
    logs = [path.read_bytes() for path in (out / "wandb").glob("*run-*/*.wandb")]
    counts = {"tensorboard": len(steps), "wandb": sum(log.count(b"train/loss") for log in logs)}
    query = (
        "select count(distinct step) from metrics where cast(metrics as text) like '%train/loss%'"
    )
    for path in (disk / "trackio").glob("*.db"):
        with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as database:
            counts["trackio"] = database.execute(query).fetchone()[0]
    return counts


def run_case(name: str, recipe: Path, out: Path, clean: dict[str, Any]) -> dict[str, Any]:
    """Train with sinks, send the rest, and compare the run with the clean one."""
    free_bytes, has_key = CASES[name]
    disk = out.with_name(f"{out.name}-disk")
    with mount_disk(disk, free_bytes):
        out.mkdir()
        (out / "provenance.json").write_text('{"megatoken": "0.1.0"}')  # a run folder
        for sink in ("tensorboard", "wandb"):
            (out / sink).symlink_to(disk / sink)
        env = make_environment(disk, has_key)
        words = command(recipe, out, Layout(1, "none"), [f"log.sinks={','.join(SINKS)}"])
        train = subprocess.run(["unshare", "-n", *words], env=env, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = {
            "exit": train.returncode,
            "still_trying": stop_sinks(out),
            "identical": fingerprint(out) == clean,
            "rows": len(read_rows(out, "train")),
        }
        (disk / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        sync = [sys.executable, "-P", "-m", "megatoken", "sync", str(out), "--to"]
        env.pop("WANDB_API_KEY", None)
        codes = [subprocess.run([*sync, sink], env=env).returncode for sink in SINKS]
        return {**result, "sync_exits": codes, "rows_of_sinks": count_rows(out, disk)}


def main() -> int:
    options = parse_options(__doc__, only="")
    if os.geteuid():
        words = [sys.executable, "-P", "-m", "tests.soak.sink_soak", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "-rm", *words])
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_recipe(folder / "job")
        words = command(recipe, folder / "clean", Layout(1, "none"))
        run_quietly(words, check=True)
        clean = fingerprint(folder / "clean")
        for number, case in enumerate(CASES):
            if options.only in case:
                results[case] = run_case(case, recipe, folder / f"run-{number}", clean)
                print(f"{case}: {results[case]}", flush=True)
    n_identical = sum(not result["exit"] and result["identical"] for result in results.values())
    return report("sinks", n_identical == len(results), identical=n_identical, ends=results)


if __name__ == "__main__":
    sys.exit(main())
