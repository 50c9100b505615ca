"""`megatoken runs`: run folders with their state, progress and losses, and what differs between some. No torch.

A folder counts as a run when it holds two or more of MARKS. One that cannot be read is a row with the reason.
"""

import os
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatoken.checkpoint.commit import is_copy
from megatoken.cli import Result
from megatoken.config.load import format_value, resolve
from megatoken.config.schema import Config, flatten
from megatoken.console import WARNING, Console, format_duration, format_quantity
from megatoken.errors import ConfigError, DataError, ExitCode, MegatokenError
from megatoken.system.atomic_write import local_path, read_json
from megatoken.system.metrics_log import METRICS, STATUS, find_last_rows

HELP = "list runs, or compare their settings and losses"
EXAMPLE = "megatoken runs --sort val_loss"
MARKS = {"config.yaml", "provenance.json", METRICS, STATUS, "checkpoints"}
# Keys of --sort: the key of a row, and whether the largest is the best.
SORT_KEYS = {
    "name": ("run", False),
    "state": ("state", False),
    "step": ("step", True),
    "loss": ("loss", False),
    "val_loss": ("val_loss", False),
    "speed": ("tokens_per_second", True),
    "left": ("eta_seconds", False),
    "size": ("bytes", True),
    "updated": ("updated", True),
}
PRETRAIN = "pretrain"  # the objective that is not shown
DEFAULT = Path("runs")  # where `train` puts them; it need not be there yet
COLUMNS = ("run", "state", "step", "loss", "val loss", "tokens/s", "left", "size")
OBJECTIVE = 2  # the column before which the objectives stand, where there is another than PRETRAIN
Row = dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    doc = "folder with runs at any depth (default runs); two or more RUNs are compared"
    parser.add_argument("folders", metavar="DIR", nargs="*", type=local_path, help=doc)
    doc = f"column to sort by, best first: {', '.join(SORT_KEYS)} (default: by folder)"
    parser.add_argument("--sort", metavar="COLUMN", choices=list(SORT_KEYS), help=doc)


def run(options: Namespace, console: Console) -> Result:
    rows, differences = show_runs(options.folders or [DEFAULT], options.sort, console)
    return Result(ExitCode.DONE, {"runs": rows, "differences": differences})


def show_runs(
    folders: Sequence[Path], sort: str | None, console: Console
) -> tuple[list[Row], dict[str, list[str]]]:
    """Print the runs in folders; where two or more folders are runs themselves, also the settings that differ.

    Returns the rows, and the values of each such setting in the order of the rows. Raises DataError for a folder that
    is not there.
    """
    if missing := [folder for folder in folders if not folder.is_dir() and folder != DEFAULT]:
        raise DataError("no such folder", str(missing[0]), "name a folder that holds runs")
    is_comparison = len(folders) > 1 and all(is_run(folder) for folder in folders)
    rows = [
        read_run(run)
        for run in dict.fromkeys(run for folder in folders for run in find_runs(folder))
    ]
    if sort:
        key, largest_first = SORT_KEYS[sort]
        known = sorted(
            (row for row in rows if row[key] is not None),
            key=lambda row: row[key],
            reverse=largest_first,
        )
        rows = known + [row for row in rows if row[key] is None]
    cells = add_objectives([COLUMNS, *(format_row(row) for row in rows)], rows)
    if not rows:
        console.print(f"no runs below {', '.join(map(str, folders))}; next: megatoken train RECIPE")
    elif not is_comparison:
        left = 2 + len(cells[0]) - len(COLUMNS)
        for row, line in zip([None, *rows], console.align(cells, left=left), strict=True):
            lost = row is not None and row["state"] in ("dead", "failed", "broken")
            reason = f"  {row['message']}" if row and row["message"] else ""
            console.print(line + reason, WARNING if lost else "")
    differences: dict[str, list[str]] = {}
    if is_comparison:
        differences = list_differences([Path(row["run"]) for row in rows])
        columns = zip(*cells, strict=True)
        for line in console.align(
            [*columns, *((key, *values) for key, values in differences.items())], left=1
        ):
            console.print(line)
    return rows, differences


def is_run(folder: Path) -> bool:
    """Whether a folder holds what a run leaves."""
    with suppress(OSError):
        return len(MARKS.intersection(path.name for path in folder.iterdir())) >= 2
    return False


def find_runs(root: Path) -> Iterator[Path]:
    """Run folders below a folder, itself included, by name, and folders that cannot be read. Links to folders and
    hidden folders are passed over."""
    closed: list[Path] = []

    def keep(error: OSError) -> None:
        closed.extend([Path(error.filename)] if isinstance(error, PermissionError) else [])

    for folder, names, files in os.walk(root, onerror=keep):
        if len(MARKS.intersection((*names, *files))) >= 2:
            yield Path(folder)
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith("."))
    yield from closed


def read_run(run: Path) -> Row:
    """What status.json, config.yaml and the end of metrics.jsonl say of a run; `message` says what cannot be read.

    state: running, done, stopped, failed; dead: it says running on this machine, and its process is gone; broken:
    status.json cannot be read; copy: of save.mirror, which has none.
    """
    status, config, problems = dict[str, Any](), None, list[str]()
    try:
        content = read_json(run / STATUS)
        status = content if isinstance(content, dict) else {}
        if not isinstance(status.get("state"), str):
            problems.append(f"{STATUS}: holds no state")
    except (OSError, ValueError) as error:
        problems.append(f"{STATUS}: {getattr(error, 'strerror', None) or 'not JSON'}")
    try:
        config = read_config(run)
    except MegatokenError as error:
        problems.append(f"config.yaml: {error}")
    last = find_last_rows(run, ("train", "val"))
    train, val = last.get("train", {}), last.get("val", {})
    state = "broken" if not isinstance(status.get("state"), str) else status["state"]
    if (
        state == "running"
        and status.get("host") == socket.gethostname()
        and not _is_alive(status.get("pid"))
    ):
        state = "dead"
    if is_copy(run):
        state, problems = (
            "copy",
            [problem for problem in problems if not problem.startswith(STATUS)],
        )
    total = _number(status.get("total_steps")) or (_count_steps(config) if config else None)
    message = str(status.get("message") or "") if state == "failed" else ""
    return {
        "run": str(run),
        "state": state,
        "objective": config.objective.name if config else "",
        "phase": str(status.get("phase") or ""),
        "step": _number(status.get("step", train.get("step"))),
        "total_steps": total,
        "loss": _number(train.get("loss")),
        "val_loss": _number(val.get("loss")),
        "tokens_per_second": average_rate(train),
        "eta_seconds": _number(status.get("eta_seconds")) if state != "done" else 0.0,
        "bytes": _count_bytes(run),
        "updated": str(status.get("updated") or "") or None,
        "host": str(status.get("host") or ""),
        "message": "; ".join(filter(None, (message, *problems))),
    }


def average_rate(last: Row) -> float | None:
    """Tokens/s of a run up to its last training step, evaluations and saves included; None where that is unknown."""
    tokens, seconds = _number(last.get("tokens")), _number(last.get("elapsed_seconds"))
    return tokens / seconds if tokens and seconds else None


def read_config(run: Path) -> Config:
    """The settings of a run. Raises ConfigError where config.yaml is missing or damaged."""
    if not (run / "config.yaml").is_file():
        raise ConfigError("no such file")
    return resolve(str(run / "config.yaml")).config


def find_own_data(models: Sequence[str]) -> str:
    """Where the data of some runs are; "" where one of the models is no run. Raises ConfigError where they differ."""
    if not all(is_run(Path(name)) for name in models):
        return ""
    paths = {name: read_config(Path(name)).data.path for name in models}
    if len({*paths.values()}) > 1:
        what = "; ".join(f"{name} was trained on {path}" for name, path in paths.items())
        raise ConfigError(what, "megatoken eval", "give --data, one text or dataset for all")
    return paths[models[0]]


def _is_alive(pid: Any) -> bool:
    """Whether a process of this machine runs; True where that cannot be known."""
    if (
        not isinstance(pid, int) or pid <= 0 or not hasattr(os, "killpg")
    ):  # on Windows kill(pid, 0) ends it
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another user
        return True
    return True


def _number(value: Any) -> Any:
    """The value if it is a number of possible size, else None: a file may hold anything."""
    return (
        value
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
        else None
    )


def _count_steps(config: Config) -> int | None:
    """Steps of the whole run; None where they depend on the dataset."""
    return None if config.budget.epochs else config.total_steps(epoch_tokens=0)


def _count_bytes(folder: Path) -> int:
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):  # of a checkpoint that is replaced now
                total += Path(path, name).lstat().st_size
    return total


def format_row(row: Row) -> tuple[str, ...]:
    """The cells of a run, in the order of COLUMNS."""

    def cell(key: str, form: str) -> str:
        return "-" if row[key] is None else format(row[key], form)

    step = "-" if row["step"] is None else f"{row['step']:,}"
    step += f"/{row['total_steps']:,}" if row["total_steps"] is not None else ""
    left = format_duration(row["eta_seconds"]) if row["eta_seconds"] else "-"
    losses = (cell("loss", ".4f"), cell("val_loss", ".4f"), cell("tokens_per_second", ",.0f"))
    return row["run"], row["state"], step, *losses, left, format_quantity(row["bytes"], "B")


def add_objectives(lines: list[tuple[str, ...]], rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The lines, heads first, with a column of objectives where one of the runs has another than PRETRAIN."""
    if all(row["objective"] in ("", PRETRAIN) for row in rows):
        return lines
    cells = ["objective", *(row["objective"] for row in rows)]
    return [
        (*line[:OBJECTIVE], cell, *line[OBJECTIVE:])
        for line, cell in zip(lines, cells, strict=True)
    ]


def list_differences(runs: Sequence[Path]) -> dict[str, list[str]]:
    """The settings whose values are not the same in all of some runs, each with its value in each run."""
    settings: list[dict[str, str]] = []
    for run in runs:
        try:
            values = flatten(read_config(run))
        except MegatokenError:
            values = {}
        settings.append({key: format_value(value) for key, value in values.items()})
    keys = dict.fromkeys(key for values in settings for key in values)
    table = {key: [values.get(key, "-") for values in settings] for key in keys}
    return {key: values for key, values in table.items() if len(set(values) - {"-"}) > 1}
