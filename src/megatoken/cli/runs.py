"""`megatoken runs`: list run folders with their state, progress and losses, or compare some.

Does not import torch.
"""

import operator
import re
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatoken.base.config.fields import parse_value
from megatoken.base.config.schema import FIELDS, flatten
from megatoken.base.config.setting_names import suggest_setting
from megatoken.base.console import Console, format_duration, format_memory
from megatoken.base.errors import ConfigError, DataError
from megatoken.base.system.metrics_log import Row
from megatoken.cli import Data
from megatoken.store.run_state import find_runs, is_run, list_differences, read_config, read_run

HELP = "list runs, or compare their settings and losses"
EXAMPLE = "megatoken runs --where 'val_loss<3.5' --where model.n_layer=4 --sort val_loss"
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
CONDITION = re.compile(r"([\w.]+)(!=|=|<|>)(.*)")
COMPARISONS = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt}


def run(options: Namespace, console: Console) -> Data:
    folders = options.folders or [DEFAULT]
    for folder in folders:
        if not folder.is_dir() and folder != DEFAULT:
            raise DataError("no such folder", folder, "name a folder with runs")
    runs = dict.fromkeys(run for folder in folders for run in find_runs(folder))
    conditions = [parse_condition(text) for text in options.where]
    rows = [row for row in map(read_run, runs) if all(matches(row) for matches in conditions)]
    if options.tag:
        rows = [row for row in rows if options.tag in re.split(r"\s*,\s*", row["tags"])]
    if options.sort:
        key, descending = SORT_KEYS[options.sort]
        rows.sort(  # rows without the value last
            key=lambda row: ((row[key] is None) != descending, row[key]), reverse=descending
        )
    cells = [COLUMNS, *(format_row(row) for row in rows)]
    tags = [row["tags"] for row in rows]
    if any(tags):
        cells = [(*line, tag) for line, tag in zip(cells, ["tags", *tags], strict=True)]
    differences: dict[str, list[str]] = {}
    if not rows and runs:
        console.print("no run matches")
    elif not rows:
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


def parse_condition(text: str) -> Callable[[Row], bool]:
    """Parse a condition on a setting or column, such as `model.n_layer=4` or `val_loss<3.5`.

    Returns a function from a row of `read_run` to whether the run meets it. Raises ConfigError.
    """
    match = CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(f"not a condition: {text!r}", "--where", "write KEY=VALUE or KEY<NUMBER")
    key, sign, expected = match.groups()
    if key in SORT_KEYS:
        column = SORT_KEYS[key][0]
        return lambda row: compare(row[column], sign, expected)
    if key not in FIELDS:
        raise ConfigError(f"unknown setting '{key}'", "--where", suggest_setting(key))
    try:
        value = parse_value(FIELDS[key], expected)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}", "--where") from None

    def matches(row: Row) -> bool:
        with suppress(ConfigError):
            return compare(flatten(read_config(Path(row["run"])))[key], sign, value)
        return False

    return matches


def compare(value: Any, sign: str, expected: Any) -> bool:
    """Compare a value, converting the text of a number; False if the types have no order."""
    with suppress(ValueError, TypeError):
        if isinstance(value, int | float) and isinstance(expected, str):
            expected = float(expected)
        return bool(COMPARISONS[sign](value, expected))
    return False


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
        format_memory(row["bytes"]),
    )
