"""Examples of a task from a file on this disk or from the Hugging Face hub, each knowing its place.

In: .jsonl, .json (a list of objects), .parquet, or nothing: the task's dataset on the hub, read by `datasets` (extra
`eval`) as lm-evaluation-harness reads it, from its cache where it is there. Out: Examples in the order of the file.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatoken.errors import Exit, Fault
from megatoken.evaluate.tasks import Example, Task

SUFFIXES = (".jsonl", ".json", ".parquet")
PLACE_EXAMPLES = "give a local file with --data FILE (.jsonl, .json or .parquet)"


def read_examples(tasks: Sequence[Task], data: Path | None, limit: int = 0) -> dict[str, list[Example]]:
    """The first `limit` examples of each task (0: all), by name.

    data: the file of a single task, or a folder with a file named after each; None: the hub. Raises Fault(CONFIG)
    for one file and several tasks, Fault(DATA) naming file and line for what is missing or malformed.
    """
    if len(tasks) > 1 and data and data.is_file():
        fix = f"give a folder with {', '.join(task.name + SUFFIXES[0] for task in tasks)}"
        raise Fault(Exit.CONFIG, f"one file cannot be {len(tasks)} tasks", str(data), fix)
    return {task.name: _read_task(task, data, limit) for task in tasks}


def _read_task(task: Task, data: Path | None, limit: int) -> list[Example]:
    rows = _read_hub(task) if data is None else _read_file(_find_file(task, data))
    examples = []
    for place, row in itertools.islice(rows, limit or None):
        try:
            examples.append(dataclasses.replace(task.read(row), place=place))
        except ValueError as wrong:
            fix = f"mend or remove it; {task.name} wants rows as {task.hub} on the hub has them"
            raise Fault(Exit.DATA, f"malformed example of {task.name}: {wrong}", place, fix) from None
    if not examples:
        raise Fault(Exit.DATA, f"no examples of {task.name}", str(data or task.hub), PLACE_EXAMPLES)
    return examples


def _find_file(task: Task, data: Path) -> Path:
    if data.is_dir():
        names = [task.name + suffix for suffix in SUFFIXES]
        found = next((data / name for name in names if (data / name).is_file()), None)
        if found is None:
            raise Fault(Exit.DATA, f"no examples of {task.name} in this folder", str(data), f"place {names[0]} there")
        return found
    if not data.is_file():
        raise Fault(Exit.DATA, "no such file", str(data), PLACE_EXAMPLES)
    if data.suffix not in SUFFIXES:
        raise Fault(Exit.DATA, f"examples are not read from {data.suffix or 'such'} files", str(data), PLACE_EXAMPLES)
    return data


def _read_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every row."""
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet(path)
        elif path.suffix == ".json":
            rows = _parse(path.read_bytes(), str(path))
            if not isinstance(rows, list):
                raise Fault(Exit.DATA, "not a list of objects", str(path), "write it as .jsonl, an object a line")
            for number, row in enumerate(rows, start=1):
                yield _check_row(row, f"{path}, row {number}")
        else:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _check_row(_parse(line, f"{path}:{number}"), f"{path}:{number}")
    except OSError as wrong:
        raise Fault(Exit.DATA, f"cannot read it: {wrong.strerror}", str(path), "check its permissions") from wrong


def _parse(text: bytes, place: str) -> Any:
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as wrong:
        line = f"{place}:{wrong.lineno}" if wrong.lineno > 1 else place
        what = f"not JSON: {wrong.msg} at column {wrong.colno}"
        raise Fault(Exit.DATA, what, line, "mend or remove it") from None
    except (ValueError, RecursionError) as wrong:
        raise Fault(Exit.DATA, f"not JSON: {wrong}", place, "mend or remove it") from None


def _check_row(row: Any, place: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise Fault(Exit.DATA, f"not an object but {row!r:.40}", place, "mend or remove it")
    return place, row


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        fix = 'pip install "megatoken[data]"'
        raise Fault(Exit.CONFIG, "parquet files need pyarrow, which is not installed", str(path), fix) from None
    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield f"{path}, row {number}", row
    except pyarrow.ArrowException as wrong:
        raise Fault(Exit.DATA, f"not a whole parquet file: {wrong}", str(path), "copy or download it again") from None


def _read_hub(task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from datasets import load_dataset, logging
        from huggingface_hub.utils import logging as hub_logging
    except ImportError:
        fix = f'pip install "megatoken[eval]", or {PLACE_EXAMPLES}'
        raise Fault(Exit.CONFIG, f"reading {task.hub} from the hub needs `datasets`", task.name, fix) from None
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # it tells of every retry; what remains to be said is below
    try:
        rows = load_dataset(task.hub, task.config, split=task.split)
    except Exception as wrong:  # the hub, its cache and the network each raise their own kinds
        what = f"cannot get {task.hub} from the Hugging Face hub: {type(wrong).__name__}"
        raise Fault(Exit.DATA, what, task.name, PLACE_EXAMPLES) from wrong
    for number, row in enumerate(rows, start=1):
        yield f"{task.hub} {task.split}, row {number}", dict(row)
