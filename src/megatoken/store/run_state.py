"""Read the state of runs from their folders: progress, losses, settings. Does not import torch."""

import glob
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatoken.base.config.load import RUN_CONFIG, format_value, resolve_run
from megatoken.base.config.schema import FIELDS, Config, flatten
from megatoken.base.errors import ConfigError, MegatokenError
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.metrics_log import METRICS, STATUS, Row, find_last_rows
from megatoken.store.run_folder import is_copy

RUN_FILES = {METRICS, STATUS, "checkpoints"}  # a folder with one of these is a run


def is_run(folder: Path) -> bool:
    """Return whether a folder looks like a run folder."""
    return any((folder / name).exists() for name in RUN_FILES)


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the run folders in `root`, sorted by name, and `root` itself if it is one.

    Hidden folders are skipped.
    """
    for folder, names, files in os.walk(root):
        if not RUN_FILES.isdisjoint([*names, *files]):
            yield Path(folder)
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith("."))


def read_run(run: Path) -> Row:
    """Return the state, progress, losses and size of a run, as --json prints them.

    The row's `message` is the error of a failed run, or why a file cannot be read.
    """
    status = read_object(run / STATUS)
    last = find_last_rows(run, ("train", "val"))
    train = last.get("train", {})
    state = find_state(run, status)
    message = status.get("message", "") if state == "failed" else ""
    try:
        settings = flatten(read_config(run))
    except ConfigError as error:
        settings = {}
        message = message or str(error)
    return {
        "run": str(run),
        "state": state,
        "objective": settings.get("objective.name", ""),
        "tags": settings.get("log.tags", ""),
        "phase": status.get("phase", ""),
        "step": status.get("step", train.get("step")),
        "total_steps": status.get("total_steps"),
        "loss": read_loss(train),
        "val_loss": read_loss(last.get("val", {})),
        "tokens_per_second": average_rate(train),
        "eta_seconds": 0.0 if state == "done" else status.get("eta_seconds"),
        "bytes": count_bytes(run),
        "updated": status.get("updated"),
        "host": status.get("host", ""),
        "message": message,
    }


def find_state(run: Path, status: Row) -> str:
    """Return the state of a run: the one in status.json, or `dead`, `copy` or `broken`.

    status.json holds `running`, `done`, `stopped` or `failed`. A run is `dead` if its status says
    running but its process is gone from this machine, `copy` if the folder is a copy made by
    save.mirror, and `broken` if status.json cannot be read.

    status: the content of status.json.
    """
    state = "copy" if is_copy(run) else str(status.get("state", "broken"))
    if state == "running" and status.get("host") == socket.gethostname():
        return "running" if is_alive(status["pid"]) else "dead"
    return state


def is_alive(pid: int) -> bool:
    """Return whether a process with this id runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def read_loss(row: Row) -> float | None:
    """Return the loss in a row of the log, or None if it is missing or not finite."""
    loss = row.get("loss")
    return None if isinstance(loss, str) else loss


def average_rate(last: Row) -> float | None:
    """Return the average tokens/s up to a run's last train row, or None if unknown.

    The time includes evaluations and saves.
    """
    seconds = last.get("elapsed_seconds")
    return last["tokens"] / seconds if seconds else None


def read_config(run: Path) -> Config:
    """Return the settings of a run. Raises ConfigError if config.yaml is missing or damaged."""
    if not (run / RUN_CONFIG).is_file():
        raise ConfigError("no such file", run / RUN_CONFIG)
    return resolve_run(run, run / RUN_CONFIG).config


def find_own_data(models: Sequence[str]) -> str:
    """Return the data.path that all runs share; "" if one of the models is not a run.

    Raises ConfigError if the paths differ, or if nothing is there.
    """
    if not all(is_run(Path(name)) for name in models):
        return ""
    paths = {name: read_config(Path(name)).data.path for name in models}
    if len(set(paths.values())) > 1:
        raise ConfigError(f"the runs have different data: {paths}", "megatoken eval", "give --data")
    path = paths[models[0]]
    is_local = ":" not in path  # neither an address nor a mixture
    if is_local and not glob.glob(path):  # noqa: PTH207 (absolute patterns)
        fix = "it is relative to where the run began: evaluate there, or give --data PATH"
        raise ConfigError(f"no dataset at {path}", models[0], fix)
    return path


def count_bytes(folder: Path) -> int:
    """Return the total size in bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # a checkpoint that was just replaced
            total += path.lstat().st_size if path.is_file() else 0
    return total


def list_differences(runs: Sequence[Path]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, each with its value in every run."""
    settings: list[dict[str, Any]] = []
    for run in runs:
        settings.append({})
        with suppress(MegatokenError):
            settings[-1] = flatten(read_config(run))
    table = {
        key: [format_value(values[key]) if values else "-" for values in settings] for key in FIELDS
    }
    return {key: values for key, values in table.items() if len(set(values) - {"-"}) > 1}
