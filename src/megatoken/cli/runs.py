"""`megatoken runs`: list run folders with their state, progress and losses, or compare some.

Does not import torch.
"""

from argparse import Namespace
from pathlib import Path

from megatoken.base.console import Console, format_duration, format_quantity
from megatoken.base.errors import DataError
from megatoken.base.system.metrics_log import Row
from megatoken.cli import Data
from megatoken.store.run_state import find_runs, is_run, list_differences, read_run

HELP = "list runs, or compare their settings and losses"
EXAMPLE = "megatoken runs --sort val_loss"
# Keys of a row by which runs can be sorted, and whether the largest value is the best.
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
DEFAULT = Path("runs")  # may be missing
COLUMNS = ("run", "state", "objective", "step", "loss", "val loss", "tokens/s", "left", "size")


def run(options: Namespace, console: Console) -> Data:
    folders = options.folders or [DEFAULT]
    for folder in folders:
        if not folder.is_dir() and folder != DEFAULT:
            raise DataError("no such folder", folder, "name a folder with runs")
    runs = dict.fromkeys(run for folder in folders for run in find_runs(folder))
    rows = [read_run(run) for run in runs]
    if options.sort:
        key, descending = SORT_KEYS[options.sort]
        rows.sort(  # rows without the value last
            key=lambda row: ((row[key] is None) != descending, row[key]), reverse=descending
        )
    cells = [COLUMNS, *(format_row(row) for row in rows)]
    differences: dict[str, list[str]] = {}
    if not rows:
        console.print(f"no runs in {folders[0]}; next: megatoken train RECIPE")
    elif len(folders) > 1 and all(is_run(folder) for folder in folders):
        differences = list_differences([Path(row["run"]) for row in rows])
        settings = [(key, *values) for key, values in differences.items()]
        console.table([*zip(*cells, strict=True), *settings], left=1)
    else:
        console.table(cells, left=3)
    for row in rows:
        if row["message"]:
            console.warn(f"{row['run']}: {row['message']}")
    return {"runs": rows, "differences": differences}


def format_row(row: Row) -> tuple[str, ...]:
    """Return the table cells of a run, in the order of COLUMNS."""

    def cell(key: str, spec: str) -> str:
        return "-" if row[key] is None else format(row[key], spec)

    return (
        row["run"],
        row["state"],
        row["objective"],
        f"{cell('step', ',')}/{cell('total_steps', ',')}",
        cell("loss", ".4f"),
        cell("val_loss", ".4f"),
        cell("tokens_per_second", ",.0f"),
        format_duration(row["eta_seconds"]) if row["eta_seconds"] else "-",
        format_quantity(row["bytes"], "B"),
    )
